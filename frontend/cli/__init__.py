"""The console script `rootlace`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from rootlace.cli.app import app

    app()
