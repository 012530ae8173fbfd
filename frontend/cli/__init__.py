"""Console script `rootlace`."""

from __future__ import annotations

import sys

import click
from click.core import ParameterSource
from click.exceptions import NoArgsIsHelpError


def main() -> None:
    """Run the command line. An error of its arguments prints one line."""
    from rootlace.cli.app import app
    from rootlace.cli.common import INTERRUPTED, tell
    from rootlace.cli.options import FILE

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
        message = " ".join(error.format_message().split()).rstrip(".")
        name = getattr(getattr(error, "param", None), "name", None)
        source = context.get_parameter_source(name) if context is not None and name else None
        if context is not None and source is ParameterSource.DEFAULT_MAP:
            message = f"{context.meta[FILE]}: {message}"
        tell(f"{message} ({command} --help lists what there is)")
        sys.exit(error.exit_code)
