"""Commands for a running server: its activity, its cache, and its figures under load. `rootlace
top`, `rootlace cache` and `rootlace bench`."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from rootlace.cli.common import ask, check_runtime, fail
from rootlace.cli.options import PATH, POSITIVE, FloatRange, Group, IntRange, server_options
from rootlace.wire.errors import ServerUnavailable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

    from rootlace.cli.bench_load import Figures, Server

_MARK = re.compile(r"<[|\w][^<>\s]{2,}>|\[/?[A-Z_]{3,}\]")

_UNWRAPPED = 10_000


@click.group(cls=Group)
def cache() -> None:
    """Inspect a running server's cache."""


_salt = click.option("--cache-salt", help="Whose part of the cache.")
_as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print the server's answer as it is."
)


@cache.command()
@click.argument(
    "file", help="A text, or the JSON body of a (chat) completion; - for standard input."
)
@server_options
@_salt
@_as_json
def explain(
    file: str, url: str, api_key: str | None, cache_salt: str | None, as_json: bool
) -> None:
    """Explain how much of a prompt is cached, and why no more. Computes nothing."""
    body = _body(_read(file))
    plain = body.keys() == {"prompt"}
    if cache_salt:
        body["cache_salt"] = cache_salt
    report = ask(url, "/cache/explain", api_key, body)
    click.echo(json.dumps(report, indent=1, ensure_ascii=False) if as_json else report["says"])
    if plain and report["reason"] != "whole":
        template = ask(url, "/tokenizer_info", api_key).get("chat_template")
        if template is not None and not _is_rendered(body["prompt"], template):
            click.echo(
                "The file was explained as it stands, but this model has a chat template, which "
                'chats are written by: for a chat, give its JSON body ({"messages": [...]}).',
                err=True,
            )


@cache.command()
@server_options
@_salt
@click.option("--limit", type=IntRange(1, 2000), default=50, help="Nodes to show.")
@_as_json
def tree(url: str, api_key: str | None, cache_salt: str | None, limit: int, as_json: bool) -> None:
    """Draw the cached prefixes, the last used first."""
    query = urllib.parse.urlencode({"namespace": cache_salt or "", "limit": limit})
    page = ask(url, f"/cache/tree?{query}", api_key)
    if as_json:
        click.echo(json.dumps(page, indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    # Where it is no terminal, a node is a line.
    width = None if sys.stdout.isatty() else _UNWRAPPED
    Console(highlight=False, width=width).print(_drawn(page))


@cache.command()
@server_options
@_salt
@_as_json
def lint(url: str, api_key: str | None, cache_salt: str | None, as_json: bool) -> None:
    """List causes that keep prompts from sharing the cache, the costliest first."""
    query = urllib.parse.urlencode({"namespace": cache_salt or ""})
    findings = ask(url, f"/cache/lint?{query}", api_key)["findings"]
    if as_json:
        click.echo(json.dumps(findings, indent=1, ensure_ascii=False))
    elif not findings:
        click.echo("Nothing was noticed.")
    for finding in [] if as_json else findings:
        click.echo(f"{finding['tokens_lost']:>10,} tokens  {finding['says']}")


@cache.command()
@server_options
@_salt
@_as_json
def pins(url: str, api_key: str | None, cache_salt: str | None, as_json: bool) -> None:
    """List the pinned prompts, those that expire soonest first."""
    query = urllib.parse.urlencode({} if cache_salt is None else {"namespace": cache_salt})
    pinned = ask(url, f"/cache/pins?{query}", api_key)["pins"]
    if as_json:
        click.echo(json.dumps(pinned, indent=1, ensure_ascii=False))
    elif not pinned:
        click.echo("Nothing is pinned.")
    for pin in [] if as_json else pinned:
        names = "".join(f"  {name} {pin[name]!r}" for name in ("namespace", "adapter") if pin[name])
        left = f"{pin['seconds_left']:,.0f} s left"
        click.echo(f"{pin['tokens']:>10,} tokens  {left}  {pin['id']}{names}")


@cache.command()
@server_options
def flush(url: str, api_key: str | None) -> None:
    """Remove every cached prefix that no running request uses."""
    ask(url, "/flush_cache", api_key, {})
    click.echo("The cache is empty, but for what running requests use.")


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file}: {getattr(error, 'strerror', None) or error}")


def _body(text: str) -> dict[str, Any]:
    """Return the body to explain: a saved completion or chat completion, or a text as prompt."""
    try:
        body = json.loads(text)
    except ValueError:
        return {"prompt": text}
    if not isinstance(body, dict):
        return {"prompt": text}
    return body


def _is_rendered(prompt: str, template: str) -> bool:
    """Return whether a text has one of the template's marks, such as <|im_start|>."""
    return any(mark in prompt for mark in _MARK.findall(template))


def _drawn(page: dict[str, Any]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    shown, total = len(page["nodes"]), page.get("total")
    counts = f"{shown:,} nodes" if total is None else f"{total:,} nodes, {page['tokens']:,} tokens"
    root = Tree(counts + ("" if page.get("complete", True) else f"; {shown:,} shown"))
    drawn: dict[int, Tree] = {}
    for node in page["nodes"]:
        text = node.get("head_text", "")
        if tail := node.get("tail_text"):
            text += f" … {tail}"
        label = Text(f"{node['end'] - node['start']:,} ", style="bold")
        label.append(repr(text)[1:-1], style="dim")
        label.append(f"  {_state(node)}")
        drawn[node["id"]] = drawn.get(node["parent"], root).add(label)
    return root


def _state(node: dict[str, Any]) -> str:
    notes = [f"used {node.get('uses', 0):,} times", f"{node.get('idle_seconds', 0.0):.0f} s ago"]
    if node.get("requests"):
        notes.append(f"{len(node['requests'])} running")
    notes += node.get("programs", [])
    return ", ".join(notes)


_FINDINGS = 5
_SUM = re.compile(r'^rootlace_(\w+_seconds)_(sum|count)(?:{model="(.*)"})? (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """Sample of the server's metrics: counters, and sum and count of each timing."""

    when: float
    info: dict[str, Any]
    status: dict[str, Any]
    timed: dict[str, float]
    findings: list[dict[str, Any]]


@click.command()
@server_options
@click.option("--model", help="Of several models, this one; else the first.")
@click.option("--interval", type=FloatRange(0.1), default=1.0, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
def top(url: str, api_key: str | None, model: str | None, interval: float, once: bool) -> None:
    """Watch a running server: tokens, hit rate, times, queue, blocks, and lint findings.

    Rates cover the time since the last sample; the first ones that between the first two. Without a
    terminal, each frame is printed after the last one, with its time.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if once:
        last = _look(url, api_key, model)
        time.sleep(interval)
        now = _look(url, api_key, model)
        console.print(_frame(url, last, now), soft_wrap=not console.is_terminal)
        return
    seen: Sample | None = None
    frame: RenderableType | None
    try:
        # Elsewhere than in a terminal Live draws nothing before its end.
        live = Live(console=console, screen=True) if console.is_terminal else None
        with live or nullcontext():
            while True:
                frame = None
                try:
                    now = _look(url, api_key, model)
                except ServerUnavailable as error:  # a model that is not loaded may be, later
                    seen, frame = None, Text(str(error))
                else:
                    if seen is not None:
                        frame = _frame(url, seen, now)
                    seen = now
                if frame is not None and live is not None:
                    live.update(frame)
                elif frame is not None:
                    now_is = time.strftime("%Y-%m-%d %H:%M:%S")
                    console.print(now_is, frame, "", sep="\n", soft_wrap=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _look(url: str, api_key: str | None, model: str | None) -> Sample:
    """Take a sample. Raises ServerUnavailable if there is no data at present."""
    query = f"?model={quote(model)}" if model else ""
    info = ask(url, f"/get_server_info{query}", api_key)
    metrics = ask(url, "/metrics", api_key).decode()
    timed = {
        f"{name}_{part}": float(value)
        for name, part, whose, value in _SUM.findall(metrics)
        if whose in ("", info["served_model_name"])  # a single model's have no label
    }
    findings = ask(url, f"/cache/lint{query}", api_key)["findings"]
    return Sample(time.monotonic(), info, info["status"], timed, findings)


def _frame(url: str, last: Sample, now: Sample) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(no_wrap=True)
    for name, value in _rows(last, now):
        table.add_row(name, value)
    title = f"{now.info.get('served_model_name', '?')} at {url}"
    lines: list[RenderableType] = [Text(title, style="bold"), table]
    worst = sorted(now.findings, key=lambda each: -each["tokens_lost"])[:_FINDINGS]
    if worst:
        lines.append(Text("\nPrompts that could share more", style="bold"))
    # The text of a prompt is no markup.
    lines += [Text(f"{each['tokens_lost']:>10,} tokens  {each['says']}") for each in worst]
    return Group(*lines)


def _rows(last: Sample, now: Sample) -> list[tuple[str, str]]:
    """Return the figures of a frame, each with its name."""
    seconds = max(now.when - last.when, 1e-6)
    engines = _since(last.status, now.status)

    def more(*names: str) -> float:
        return sum(
            own.get(name, 0) - before.get(name, 0) for own, before in engines for name in names
        )

    def mean(name: str) -> str:
        count = now.timed.get(f"{name}_count", 0) - last.timed.get(f"{name}_count", 0)
        total = now.timed.get(f"{name}_sum", 0) - last.timed.get(f"{name}_sum", 0)
        return f"{1000 * total / count:,.1f} ms" if count > 0 else "-"

    def at(name: str) -> float:
        return now.status.get(name, 0)

    prompt = more("prompt_tokens")
    whole = at("cached_tokens") / at("prompt_tokens") if at("prompt_tokens") else 0.0
    # Prompts are counted on arrival, their cached tokens at the start.
    begun = more("cached_tokens", "computed_tokens")
    hits = f"{more('cached_tokens') / begun:.1%}" if begun else "-"
    blocks = max(at("blocks_total"), 1)
    written, right = more("output_tokens", "forced_tokens"), more("accepted_tokens")
    replicas = now.status.get("replicas", [])
    return [
        ("generated", f"{written / seconds:,.1f} tokens/s"),
        (
            "drafted",
            f"{right / max(written, 1):.1%} of these, "
            f"{right / max(more('drafted_tokens'), 1):.1%} of drafts right",
        ),
        ("prompts", f"{prompt / seconds:,.1f} tokens/s"),
        ("hit rate", f"{hits} (since the start {whole:.1%})"),
        ("first token", mean("time_to_first_token_seconds")),
        ("between tokens", mean("time_per_output_token_seconds")),
        ("in the queue", mean("queue_duration_seconds")),
        ("requests", f"{at('running'):,.0f} running, {at('waiting'):,.0f} waiting"),
        (
            "blocks",
            f"{at('blocks_used') / blocks:.1%} in use, {at('blocks_evictable') / blocks:.1%} "
            f"cached, {at('blocks_free') / blocks:.1%} free of {at('blocks_total'):,.0f}",
        ),
        ("tree", f"{at('nodes'):,.0f} nodes, {at('tree_tokens'):,.0f} tokens"),
        (
            "given up",
            f"{more('evicted_blocks') / seconds:,.1f} blocks/s evicted, "
            f"{more('retractions') / seconds:,.1f} requests/s retracted",
        ),
        *((f"replica {one['replica']}", _of_replica(one)) for one in replicas),
    ]


def _since(
    last: dict[str, Any], now: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each engine's counters, now and before. A restarted engine counts from 0; an engine
    that did not answer the last time is left out."""
    before = {one["replica"]: one for one in last.get("replicas", [{**last, "replica": 0}])}
    pairs = []
    for one in now.get("replicas", [{**now, "replica": 0}]):
        was = before.get(one["replica"], {})
        if one.get("up", True) and was.get("up", True):
            restarted = one.get("computed_tokens", 0) < was.get("computed_tokens", 0)
            pairs.append((one, {} if restarted else was))
    return pairs


def _of_replica(counters: dict[str, Any]) -> str:
    """Return the figures of one of several engines, since its start."""
    if not counters["up"]:
        return "is down"
    hits = counters["cached_tokens"] / max(counters["prompt_tokens"], 1)
    blocks = counters["blocks_used"] / max(counters["blocks_total"], 1)
    return (
        f"{counters['running']:,.0f} running, {counters['waiting']:,.0f} waiting, "
        f"{hits:.1%} hits, {blocks:.1%} of its blocks in use"
    )


# `rootlace bench`: load on a server with OpenAI's interface, and its results.
# `bench_load` makes the requests, sends and times them, sums them up and draws.


@click.command()
@server_options
@click.option("--model", show_default="the first it has", help="Its model.")
@click.option(
    "--load",
    type=click.Choice(["chat", "shared", "random"]),
    default="chat",
    help="chat: lengths as in conversations; shared: groups with a common prefix; random: nothing "
    "in common.",
)
@click.option(
    "--trace",
    type=PATH,
    help="JSON lines with timestamp, input_length, output_length and hash_ids.",
)
@click.option("--requests", type=POSITIVE, default=100, help="How many requests.")
@click.option("--concurrency", type=POSITIVE, default=16, help="At most so many at a time.")
@click.option(
    "--rate", type=FloatRange(0), default=0.0, help="Requests a second (Poisson); 0: as others end."
)
@click.option("--speed", type=FloatRange(0.001), default=1.0, help="How fast a trace is played.")
@click.option("--input", "input_tokens", type=POSITIVE, default=256, help="Tokens of a prompt.")
@click.option("--output", "output_tokens", type=POSITIVE, default=64, help="Of an answer.")
@click.option("--prefix", type=IntRange(0), default=1024, help="Tokens of a shared prefix.")
@click.option("--groups", type=POSITIVE, default=4, help="Prefixes of the shared load.")
@click.option("--seed", type=int, default=0, help="Of lengths, texts and arrivals.")
@click.option("--json", "json_file", type=PATH, help="Write figures and all requests there.")
@click.option("--html", "html_file", type=PATH, help="Write a page with plots there.")
def bench(
    url: str,
    api_key: str | None,
    model: str | None,
    load: str,
    trace: Path | None,
    concurrency: int,
    rate: float,
    speed: float,
    json_file: Path | None,
    html_file: Path | None,
    **sizes: Any,
) -> None:
    """Put load on a running server: first token, time between tokens, throughput, hit rate."""
    check_runtime()
    import asyncio
    from importlib import metadata

    from rootlace.cli import bench_load
    from rootlace.runtime.simulation.trace import BadTrace

    server = bench_load.Server(url.rstrip("/"), api_key or "", model or "")
    try:
        model, words = asyncio.run(bench_load.look(server))
        server = replace(server, model=model)
        shape = bench_load.Shape(words=words, **sizes)
        if trace is not None:
            asks = bench_load.of_trace(trace, shape, speed)
        else:
            asks = bench_load.arriving(bench_load.LOADS[load](shape), rate, shape.seed)
    except (bench_load.Unusable, BadTrace) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{trace}: {error.strerror or error}")
    settings: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": server.url,
        "model": model,
        "load": load if trace is None else str(trace),
        "requests": len(asks),
        "concurrency": concurrency,
        "input": shape.input_tokens,
        "output": shape.output_tokens,
        "seed": shape.seed,
        "rootlace": metadata.version("rootlace"),
    }
    if trace is not None:  # which says when requests come, and how long they are
        settings["speed"] = speed
        del settings["input"], settings["output"]
    else:
        settings["rate"] = rate
    if trace is None and load == "shared":
        settings |= {"prefix": shape.prefix, "groups": shape.groups}
    figures = bench_load.Figures.of(_sent(server, asks, concurrency), settings)
    _print_figures(figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures.as_json(), indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(bench_load.page(figures))
    if figures.errors:
        sys.exit(1)


def _sent(server: Server, asks: list, concurrency: int) -> list:  # type: ignore[type-arg]
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from rootlace.cli.bench_load import send_all

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("requests", total=len(asks))
        return asyncio.run(send_all(server, asks, concurrency, lambda: progress.advance(task)))


def _print_figures(figures: Figures) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    title = Text(f"{figures.asked['model']} at {figures.asked['url']}\n{figures.terms()}")
    table = Table(box=SIMPLE, title=title, title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99", "most"):
        table.add_column(name, justify="right")
    for name, spread in figures.spreads.items():
        table.add_row(name, *(f"{1000 * value:,.1f}" for value in spread))
    console.print(table)
    for name, value in figures.rates.items():
        console.print(f"  {name:<28}{value:>12,.2f}")
    for error, count in figures.errors.items():
        console.print(f"  {count} x {error}", style="red")
