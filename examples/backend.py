"""The runtime an example runs on: a server's address, a model's folder, or the embedded model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import rootlace as rl


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--model PATH` and `--url URL`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model", metavar="PATH", help="a model's folder (default: the embedded one)"
    )
    where.add_argument("--url", metavar="URL", help="a running server (tcp://... or http://...)")
    return parser


@contextmanager
def backend(given: argparse.Namespace) -> Iterator[rl.Runtime | rl.RuntimeEndpoint]:
    """The backend that the arguments name, made the default one; a runtime ends with the block."""
    if given.url:
        endpoint = rl.RuntimeEndpoint(given.url)
        rl.set_default_backend(endpoint)
        yield endpoint
        return
    from rootlace.runtime.assets import demo_model

    with rl.Runtime(model=given.model or demo_model()) as runtime:
        rl.set_default_backend(runtime)
        yield runtime
