"""The console script `rootlace`."""

from __future__ import annotations

import sys

import click
from click.exceptions import NoArgsIsHelpError


def main() -> None:
    """Run the command line. What is wrong with it is told in one line."""
    from rootlace.cli.app import app
    from rootlace.cli.common import INTERRUPTED, tell

    try:
        sys.exit(app(standalone_mode=False))
    except click.Abort:
        sys.exit(INTERRUPTED)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "rootlace"
        said = " ".join(error.format_message().split()).rstrip(".")
        tell(f"{said} ({command} --help lists what there is)")
        sys.exit(error.exit_code)
