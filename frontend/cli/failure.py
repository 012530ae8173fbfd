"""How a command fails: one clear line on standard error and exit code 1."""

from __future__ import annotations

from typing import NoReturn

import typer

RUNTIME_HINT = (
    "this needs the runtime, which is not installed here; install it with: "
    "pip install 'rootlace[runtime]'"
)


def fail(message: str) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(message, err=True)
    raise typer.Exit(1)


def missing_runtime(error: ImportError) -> str:
    """What to tell somebody whose import of the runtime failed."""
    missing = (error.name or "").partition(".")[0]
    return f"{RUNTIME_HINT} (no module {missing!r})" if missing else f"{RUNTIME_HINT} ({error})"
