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
    weight_cache: Annotated[
        str,
        typer.Option(help="Folder of packed weights.", show_default="~/.cache/rootlace/weights"),
    ] = "",
    delete_packed: Annotated[
        bool, typer.Option("--delete-packed", help="Delete the packed weights of earlier starts.")
    ] = False,
) -> None:
    """List the models that were downloaded, what they need, and whether they fit in memory here;
    and the packed weights that starts keep for the next one.
    """
    check_runtime()
    from rootlace.runtime.doctor.cached_models import (
        cached_models,
        delete_packed_models,
        packed_models,
    )

    if delete_packed:
        deleted = delete_packed_models(weight_cache)
        typer.echo(f"{_gib(deleted)} of packed weights deleted")
        return
    found, free = cached_models()
    packed = packed_models(weight_cache)
    if as_json:
        told = {
            "free": free,
            "models": [asdict(one) for one in found],
            "packed": [asdict(one) for one in packed],
        }
        typer.echo(json.dumps(told, indent=1))
        return
    if found:
        _show(found, free)
    else:
        typer.echo("No models are cached: `rootlace serve OWNER/NAME` downloads one.")
    if packed:
        typer.echo("Packed weights of earlier starts (--delete-packed deletes them):")
        for one in packed:
            typer.echo(f"  {_gib(one.size):>12}  {one.model}")


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
