"""How a command fails: one clear line on standard error and exit code 1."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

import typer

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""

_RUNTIME_MODULES = (
    *(
        "aiohttp",
        "huggingface_hub",
        "interegular",
        "jsonschema",
        "jsonschema_rs",
        "llguidance",
        "numpy",
    ),
    *("outlines_core", "tokenizers", "torch", "yaml"),
)


def fail(message: str) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(message, err=True)
    raise typer.Exit(1)


def check_runtime() -> None:
    """End the command with a hint where `rootlace[runtime]` is not installed. Imports nothing."""
    missing = [name for name in _RUNTIME_MODULES if not _is_there(name)]
    if missing:
        fail(
            "this needs the runtime, which is not installed here; install it with: "
            f"pip install 'rootlace[runtime]' (missing: {', '.join(missing)})"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
