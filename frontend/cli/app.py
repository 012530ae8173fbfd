"""Commands of `rootlace`. Commands import their modules when run, so `--version` is instant."""

from __future__ import annotations

from typing import Any

import click

from rootlace.cli.common import fail
from rootlace.cli.doctor import doctor, models
from rootlace.cli.options import Group
from rootlace.cli.run import chat, evaluate, run
from rootlace.cli.running import bench, cache, top
from rootlace.cli.serve import keys, serve
from rootlace.cli.simulate import simulate
from rootlace.wire.errors import RootlaceError


class App(Group):
    """Command group that ends a command's typed error with one line."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except RootlaceError as error:
            fail(str(error))


@click.group(
    "rootlace",
    cls=App,
    commands=[serve, run, chat, simulate, doctor, top, bench, evaluate, cache, keys, models],
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(
    package_name="rootlace", message="%(package)s %(version)s", help="Print the version and exit."
)
def app() -> None:
    """LLM programs on a radix-tree KV cache: serve a model, run a program, chat, simulate."""
