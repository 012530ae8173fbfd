"""The commands of `rootlace`. What they need is imported when they run: `--version` is instant."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from rootlace.cli.doctor import doctor, models
from rootlace.cli.run import chat, evaluate, run
from rootlace.cli.running import bench, cache, top
from rootlace.cli.serve import keys, serve
from rootlace.cli.simulate import simulate

app = typer.Typer(
    name="rootlace",
    help="LLM programs on a radix-tree KV cache: serve a model, run a program, chat, simulate.",
    no_args_is_help=True,
    # A traceback of ours is for a bug report; locals in it would print people's prompts and keys.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(run)
app.command()(chat)
app.command()(simulate)
app.command()(doctor)
app.command()(top)
app.command()(bench)
app.command("eval")(evaluate)
app.add_typer(cache, name="cache")
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rootlace {metadata.version('rootlace')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """LLM programs on a radix-tree KV cache: serve a model, run a program, chat, simulate."""
