"""`rootlace bench`: load on a server that speaks OpenAI's interface, and what came of it.

`loads` makes the requests, `sending` sends and times them, `figures` sums them up, `page` draws.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.common import check_runtime, fail

if TYPE_CHECKING:
    from rootlace.cli.bench_load import Figures, Server


class LoadName(StrEnum):
    """Kinds of loads."""

    chat = "chat"
    shared = "shared"
    random = "random"


def bench(
    *,
    url: Annotated[str, typer.Option(help="The running server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[str, typer.Option(help="The server's key.", envvar="ROOTLACE_API_KEY")] = "",
    model: Annotated[str, typer.Option(help="Its model.", show_default="the first it has")] = "",
    load: Annotated[
        LoadName,
        typer.Option(
            help="chat: lengths as in conversations; shared: groups with a common prefix; random: "
            "nothing in common."
        ),
    ] = LoadName.chat,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines with timestamp, input_length, output_length and hash_ids."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="At most so many at a time.")] = 16,
    rate: Annotated[
        float,
        typer.Option(min=0.0, help="Requests a second (Poisson); 0: as others end."),
    ] = 0.0,
    speed: Annotated[float, typer.Option(min=0.001, help="How fast a trace is played.")] = 1.0,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Tokens of a prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="Of an answer.")] = 64,
    prefix: Annotated[int, typer.Option(min=0, help="Tokens of a shared prefix.")] = 1024,
    groups: Annotated[int, typer.Option(min=1, help="Prefixes of the shared load.")] = 4,
    seed: Annotated[int, typer.Option(help="Of lengths, texts and arrivals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write figures and all requests there.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a page with plots there.")
    ] = None,
) -> None:
    """Put load on a running server: first token, time between tokens, throughput, hit rate."""
    check_runtime()
    from rootlace.cli import bench_load

    server = bench_load.Server(url.rstrip("/"), api_key, model)
    try:
        model, words = asyncio.run(bench_load.look(server))
        server = bench_load.Server(server.url, api_key, model)
        shape = bench_load.Shape(requests, input_tokens, output_tokens, prefix, groups, words, seed)
        if trace is not None:
            asks = bench_load.of_trace(trace, shape, speed)
        else:
            asks = bench_load.arriving(bench_load.LOADS[load.value](shape), rate, seed)
    except (bench_load.Unusable, bench_load.BadTrace) as error:
        fail(str(error))
    asked: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": server.url,
        "model": model,
        "load": load.value if trace is None else str(trace),
        "requests": len(asks),
        "concurrency": concurrency,
        "input": input_tokens,
        "output": output_tokens,
        "seed": seed,
        "rootlace": metadata.version("rootlace"),
    }
    if trace is not None:  # which says when requests come, and how long they are
        asked["speed"] = speed
        del asked["input"], asked["output"]
    else:
        asked["rate"] = rate
    if trace is None and load is LoadName.shared:
        asked |= {"prefix": prefix, "groups": groups}
    found = bench_load.Figures.of(_sent(server, asks, concurrency), asked)
    _print(found)
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_json(), indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(bench_load.page(found))
    if found.errors:
        sys.exit(1)


def _sent(server: Server, asks: list, concurrency: int) -> list:  # type: ignore[type-arg]
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from rootlace.cli.bench_load import send_all

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("requests", total=len(asks))
        return asyncio.run(
            send_all(server, asks, concurrency, lambda: progress.advance(task)),
        )


def _print(found: Figures) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    title = Text(f"{found.asked['model']} at {found.asked['url']}\n{found.terms()}")
    table = Table(box=SIMPLE, title=title, title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99", "most"):
        table.add_column(name, justify="right")
    for name, spread in found.spreads.items():
        table.add_row(name, *(f"{1000 * value:,.1f}" for value in spread))
    console.print(table)
    for name, value in found.rates.items():
        console.print(f"  {name:<28}{value:>12,.2f}")
    for error, count in found.errors.items():
        console.print(f"  {count} x {error}", style="red")
