"""`rootlace keys`: who may use a server, how much, and with which part of the cache."""

from __future__ import annotations

from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rootlace.cli.common import check_runtime, fail
from rootlace.wire.errors import InvalidRequest

keys = typer.Typer(
    help="API keys of a server (`rootlace serve --keys FILE`), which follows changes at once.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="The key's name, in logs and metrics.")]
File = Annotated[
    Path, typer.Option("--keys", help="The file of keys.", envvar="ROOTLACE_KEYS", dir_okay=False)
]
Limit = Annotated[int | None, typer.Option(min=1, show_default="no limit")]
Bound = Annotated[int | None, typer.Option(show_default="no bound")]

_FILE = Path("keys.json")


class Namespace(StrEnum):
    own = "own"
    shared = "shared"


@keys.command()
def add(
    name: Name,
    *,
    file: File = _FILE,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    namespace: Annotated[
        Namespace, typer.Option(help="Whether its cached prefixes are its own.")
    ] = Namespace.own,
    max_priority: Bound = None,
    max_pins: Bound = None,
    max_batches: Bound = None,
) -> None:
    """Make a key and print it: only now, for the file does not hold it."""
    check_runtime()
    from rootlace.runtime.server.auth import new_key, read_keys, write_keys

    try:
        known = read_keys(str(file)) if file.exists() else ()
        if any(entry.name == name for entry in known):
            fail(f"{file} has a key named {name!r} already")
        key, entry = new_key(
            name,
            requests_per_minute,
            tokens_per_minute,
            namespace.value,
            max_priority=max_priority,
            max_pins=max_pins,
            max_batches=max_batches,
        )
        write_keys(str(file), (*known, entry))
    except (InvalidRequest, OSError) as error:
        fail(str(error))
    typer.echo(key)


@keys.command("list")
def list_(*, file: File = _FILE) -> None:
    """Names, quotas and namespaces of the keys."""
    check_runtime()
    from rootlace.runtime.server.auth import read_keys

    try:
        known = read_keys(str(file))
    except InvalidRequest as error:
        fail(str(error))
    for entry in known:
        quotas = (
            (entry.requests_per_minute, "requests/min"),
            (entry.tokens_per_minute, "tokens/min"),
            (entry.max_priority, "max priority"),
            (entry.max_pins, "pins"),
            (entry.max_batches, "batches"),
        )
        shown = [f"{limit} {unit}" for limit, unit in quotas if limit is not None]
        typer.echo(f"{entry.name}  {', '.join(shown) or 'no quota'}  namespace {entry.namespace}")


@keys.command()
def remove(name: Name, *, file: File = _FILE) -> None:
    """Remove a key: from now on it is refused."""
    check_runtime()
    from rootlace.runtime.server.auth import read_keys, write_keys

    try:
        known = read_keys(str(file))
        if all(entry.name != name for entry in known):
            near = get_close_matches(name, [entry.name for entry in known], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            fail(f"{file} has no key named {name!r}{hint}")
        write_keys(str(file), (entry for entry in known if entry.name != name))
    except (InvalidRequest, OSError) as error:
        fail(str(error))
