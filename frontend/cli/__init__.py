"""The console script `rootlace`."""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Run the command line. What is wrong with it is told in one line."""
    import typer

    from rootlace.cli.app import app

    # Typer keeps the base of its errors to itself.
    bases = typer.BadParameter.__mro__
    wrong: Any = next(kind for kind in bases if kind.__name__ == "ClickException")
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        sys.exit("aborted")
    except wrong as error:
        if not sys.argv[1:] or type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            _tell(error)
        sys.exit(error.exit_code)


def _tell(error: Any) -> None:
    import typer

    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "rootlace"
    said = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(f"{said.rstrip('.')} ({command} --help lists what there is)", err=True)
