"""The backend of an example: a server, a named model, or the model smollm2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rootlace as rl

DEFAULT = "smollm2"
"""SmolLM2-135M-Instruct: a real model, of which the package index has 98 MB."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--model NAME` and `--url URL`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model",
        metavar="NAME",
        help=f"a model's name, file or folder; demo: the embedded model (default: {DEFAULT})",
    )
    where.add_argument("--url", metavar="URL", help="a running server (tcp://... or http://...)")
    return parser


def started(model: str | None) -> rl.Runtime:
    """Start a runtime with that model. None: smollm2 or, if unavailable, the embedded model."""
    try:
        return rl.Runtime(model or DEFAULT) if model != "demo" else rl.Runtime()
    except rl.RootlaceError as error:
        if model:
            raise
        print(f"{error}\nThe embedded model runs instead. It knows few tasks.", file=sys.stderr)
        return rl.Runtime()


@contextmanager
def backend(given: argparse.Namespace) -> Iterator[rl.RuntimeEndpoint]:
    """Make the named backend the default; a runtime ends with the block."""
    if given.url:
        endpoint = rl.RuntimeEndpoint(given.url)
        rl.set_default_backend(endpoint)
        yield endpoint
        return
    with started(given.model) as runtime:
        rl.set_default_backend(runtime)
        yield runtime.endpoint
