"""`rootlace models`: the models of the Hugging Face cache, what each needs, and whether it fits."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rootlace.cli.failure import check_runtime

if TYPE_CHECKING:
    from rootlace.runtime.doctor.cached_models import CachedModel

GIB = 1 << 30


def models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models that were downloaded, what they need, and whether they fit in memory here."""
    check_runtime()
    from rootlace.runtime.doctor.cached_models import cached_models

    found, free = cached_models()
    if as_json:
        typer.echo(json.dumps({"free": free, "models": [asdict(one) for one in found]}, indent=1))
    elif found:
        _show(found, free)
    else:
        typer.echo("No models are cached: `rootlace serve OWNER/NAME` downloads one.")


def _show(found: list[CachedModel], free: int) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"Models, with {_gib(free)} of memory free"
    table = Table(title=title, box=SIMPLE, title_justify="left")
    table.add_column("model", overflow="fold", style="bold")
    for column in ("weights", "context", "needs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits here", overflow="fold")
    for one in found:
        fits = "yes" if one.fits else f"no, {_gib((one.needs or 0) - free)} too much"
        table.add_row(
            Text(one.name),
            _gib(one.weights),
            "" if one.context is None else f"{one.context:,}",
            "" if one.needs is None else _gib(one.needs),
            Text(one.refused or fits),
        )
    Console(highlight=False).print(table)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"
