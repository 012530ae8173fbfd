"""Command `rootlace simulate`: a trace through the scheduler and the tree, without a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from rootlace.cli.common import fail
from rootlace.cli.options import PATH, POSITIVE, FloatRange, IntRange

if TYPE_CHECKING:
    from rootlace.runtime.simulation.study import Progress, Study


# Cluster ------------------------------------------------------------------------------------------
#
# `rootlace simulate --replicas`: a trace over several engines, by different routers.


_WIDEST = 1000
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def print_wide(console: Any, table: Any) -> None:
    """Print a table at full width: broken lines are easier to read than narrow columns."""
    options = console.options.update(width=_WIDEST)
    console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)


def routers_of(values: Sequence[str]) -> list[str]:
    """Return the router names of `--router`; end the command for an unknown one."""
    from rootlace.runtime.simulation.cluster import ROUTINGS

    names = [name.strip() for part in values for name in part.split(",")]
    for name in names:
        if name not in ROUTINGS and name != "all":
            fail(f"--router {name}: there is no such router; there are {', '.join(ROUTINGS)}, all")
    return list(ROUTINGS) if "all" in names else list(dict.fromkeys(names))


def apart_of(
    value: str | None, replicas: int, least_tokens: int, link: str, token_bytes: int
) -> list[Any]:
    """Return None (no disaggregation) and the splits of `--disaggregate` and its options. Ends the
    command for an impossible split."""
    if value is None:
        return [None]
    if replicas == 1:
        fail("--disaggregate divides several replicas: give --replicas")
    from rootlace.runtime.simulation.cluster import Apart, Link

    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?", link, re.ASCII)
    if match is None or not float(match[1]):
        fail(f"--link {link}: write GB/s, or GB/s and milliseconds as 50:1")
    over = Link(1e9 * float(match[1]), float(match[2] or 0) / 1000, token_bytes)
    aparts: list[Any] = [None]
    for part in value.split(","):
        count = int(part) if part.strip().isdecimal() else 0
        if not 0 < count < replicas:
            fail(f"--disaggregate {part.strip()}: from 1 to {replicas - 1} of the --replicas")
        aparts.append(Apart(count, least_tokens, over))
    return aparts


def below_of(host: str | None, disk: str | None, token_bytes: int) -> tuple[Any, ...]:
    """Parse `--host` and `--disk`. Ends the command for a malformed value."""
    from rootlace.runtime.simulation.engine import Below

    levels = []
    for name, value in (("host", host), ("disk", disk)):
        if value is None:
            continue
        tokens, _, speed = value.partition(":")
        if not re.fullmatch(r"\d+(\.\d+)?", speed, re.ASCII) or not float(speed):
            fail(f"--{name} {value}: write tokens and GB/s, as 4M:2.5")
        (size,) = sizes_of(f"--{name}", tokens)
        levels.append(Below(name, size, token_bytes / (1e9 * float(speed))))
    return tuple(levels)


def sizes_of(option: str, text: str) -> list[int]:
    """Parse an option's sizes in tokens, and sort them; end the command for a wrong size."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kMG]?)\s*", part)
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        if size < 1:
            fail(f"{option} {text}: {part.strip()!r} is no size; write 500k, 1M or 2000000")
        sizes.append(size)
    return sorted(set(sizes))


def run_clusters(
    workload: Any,
    policy: Any,
    machines: Sequence[Any],
    replicas: int,
    routers: Sequence[str],
    aparts: Sequence[Any] = (None,),
) -> list[Any]:
    """Return a report for each machine, router and way of disaggregation, with a progress bar."""
    from rootlace.runtime.simulation.cluster import Cluster

    reports: list[Any] = []
    runs = list(product(machines, routers, aparts))
    with _progress() as told:
        for done, (machine, router, apart) in enumerate(runs):

            def show(arrived: int, done: int = done, router: str = router) -> None:
                told(router, len(workload) * done + arrived, len(workload) * len(runs))

            cluster = Cluster(workload, policy, machine, replicas, router, apart)
            reports.append(cluster.run(show))
    return reports


def show_clusters(reports: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rootlace.runtime.simulation.study import short

    table = Table(box=None, header_style="bold", pad_edge=False)
    titles = "cache,router,hits,TTFT s,TPOT ms,req/s,busy,busiest,router us"
    apart = any(report.prefill_replicas for report in reports)
    below = any(report.read_back for report in reports)
    if below:
        titles += ",read back"
    if apart:
        titles += ",prefill,handed,moved,busy prefill,busy decode"
    for title in titles.split(","):
        table.add_column(title, justify="left" if title == "router" else "right", no_wrap=True)
    for report in reports:
        table.add_row(
            short(report.cache_tokens),
            report.router,
            f"{report.hit_rate:.2%}",
            " / ".join(f"{value:.3g}" for value in report.ttft),
            " / ".join(f"{1000 * value:.3g}" for value in report.tpot),
            f"{report.requests_per_second:.3g}",
            f"{report.busy:.0%}",
            f"{report.imbalance:.2f}",
            f"{report.router_microseconds:.0f}",
            *([f"{report.read_back:.2%}"] if below else ()),
            *(_of_apart(report) if apart else ()),
        )
    console = Console(highlight=False)
    print_wide(console, table)
    console.print(
        "TTFT and TPOT: p50 / p90 / p99; cache: of each replica; busiest: times the mean; "
        "router us: CPU time per request"
    )
    if apart:
        console.print(
            "prefill: replicas that compute prompts alone; handed: requests of these; moved: "
            "tokens that travelled, of those of all prompts"
        )


def _of_apart(report: Any) -> tuple[str, ...]:
    return (
        str(report.prefill_replicas),
        f"{report.handed:,}",
        f"{report.moved:.1%}",
        f"{report.prefill_busy:.0%}",
        f"{report.decode_busy:.0%}",
    )


# Simulate -----------------------------------------------------------------------------------------


_PICTURES = (".svg", ".png", ".pdf")


@click.command()
@click.argument(
    "trace",
    type=PATH,
    help="Mooncake's JSON lines or Azure's CSV, or recorded texts, plain or gzipped.",
)
@click.option(
    "--policy",
    metavar="NAME,...",
    multiple=True,
    show_default="lpm,fcfs",
    help="lpm, fcfs, dfs, lpm-no-aging, dfs-no-aging, POLICY:MAX_OVERTAKEN[:MAX_DELAY], or all of "
    "those with a name; POLICY+EVICTION for another eviction. May be repeated.",
)
@click.option(
    "--cache-tokens",
    metavar="N,...",
    show_default="six, doubling, from twice the longest request",
    help="Sizes of the KV cache in tokens, as 500k,1M,4M.",
)
@click.option(
    "--rate", type=FloatRange(1e-6), default=1.0, help="How many times as fast requests arrive."
)
@click.option(
    "--repeat",
    type=POSITIVE,
    default=1,
    help="Play the trace this many times, each copy with own prompts.",
)
@click.option(
    "--requests", type=POSITIVE, help="Play this many requests: part of the trace, or copies of it."
)
@click.option(
    "--granularity",
    type=POSITIVE,
    default=16,
    help="Tokens that one simulated token stands for; 1 is exact.",
)
@click.option(
    "--cost",
    metavar="NAME|FILE",
    show_default="h200_8b_roofline",
    help="Cost model: the name of one that is included, or a JSON file.",
)
@click.option("--max-running", type=POSITIVE, default=256, help="Rows of a step.")
@click.option(
    "--replicas", type=POSITIVE, default=1, help="Engines, each with such a cache, behind a router."
)
@click.option(
    "--router",
    metavar="NAME,...",
    multiple=True,
    show_default="all",
    help="With --replicas: exact, power-of-two, sessions, turns or all. May be repeated.",
)
@click.option(
    "--disaggregate",
    metavar="M,...",
    help="With --replicas: so many of them compute prompts alone and hand the KV over; beside the "
    "same number that do both.",
)
@click.option(
    "--disaggregate-from",
    type=IntRange(0),
    default=512,
    help="Prompt tokens, not cached, that are computed apart.",
)
@click.option(
    "--link",
    metavar="GB/S[:MS]",
    default="50:1",
    help="What KV travels over: bandwidth and latency.",
)
@click.option(
    "--token-bytes",
    type=POSITIVE,
    default=131072,
    help="KV of a token; the default is that of the 8B model.",
)
@click.option(
    "--host", metavar="N:GB/S", help="Tokens in main memory below each cache, and its speed."
)
@click.option("--disk", metavar="N:GB/S", help="Tokens on a disk below each cache, and its speed.")
@click.option(
    "--json", "json_file", type=PATH, metavar="FILE", help="Write all figures to this file."
)
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.svg",
    help="Draw hit rate against cache size (also as .png or .pdf).",
)
def simulate(
    trace: Path,
    policy: tuple[str, ...],
    cache_tokens: str | None,
    cost: str | None,
    max_running: int,
    replicas: int,
    router: tuple[str, ...],
    disaggregate: str | None,
    disaggregate_from: int,
    link: str,
    token_bytes: int,
    host: str | None,
    disk: str | None,
    json_file: Path | None,
    plot: Path | None,
    **load: Any,
) -> None:
    """Replay a trace of requests through the scheduler and the prefix tree on a simulated clock.

    Prints hit rates and those of an ideal cache, times, overtaking and evictions for each cache
    size and policy. docs/simulation.md lists the real and the simulated parts. For recorded texts
    (input_ids and output_ids of a request per line), prints the savings of drafts from the cache.
    """
    if router and replicas == 1:
        fail("--router says how requests are spread over several replicas: give --replicas")
    if replicas > 1 and plot is not None:
        fail("--plot draws studies of one engine: not with --replicas")
    aparts = apart_of(disaggregate, replicas, disaggregate_from, link, token_bytes)
    below = below_of(host, disk, token_bytes)
    _check_outputs(json_file, plot)
    _check_packages(plot)
    from rootlace.runtime.simulation.engine import (
        DEFAULT_COST,
        BadCost,
        BadPolicy,
        Machine,
        all_policies,
        parse_policy,
        read_cost,
    )
    from rootlace.runtime.simulation.study import default_sizes
    from rootlace.runtime.simulation.trace import BadTrace, Load, Workload, is_recorded, read_trace

    try:
        if is_recorded(trace):
            context = click.get_current_context()
            for name in context.params:
                typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
                if typed and name not in ("trace", "json_file"):
                    option = f"--{name.replace('_', '-')}"
                    fail(f"{option}: recorded texts show what drafts save; --json alone fits them")
            _write(json_file, {"prices": _replay_texts(trace)})
            return
        wanted = [name.strip() for part in policy or ("lpm,fcfs",) for name in part.split(",")]
        named = {name: parse_policy(name) for name in wanted if name != "all"}
        if "all" in wanted:
            named = {each.name: each for each in all_policies()} | named
        workload = Workload(read_trace(trace), Load(**load))
        chosen = sizes_of("--cache-tokens", cache_tokens) if cache_tokens else []
        sizes = chosen or default_sizes(workload)
        model = read_cost(cost or DEFAULT_COST)
        if replicas > 1:
            machines = [Machine(size, model, max_running, below) for size in sizes]
            order = parse_policy(policy[0] if policy else "lpm")
            names = routers_of(router or ["all"])
            reports = run_clusters(workload, order, machines, replicas, names, aparts)
            show_clusters(reports)
            _write(json_file, {"runs": [report.to_json() for report in reports]})
            return
        study = _run(workload, list(named.values()), sizes, model, max_running, below)
    except (BadTrace, BadPolicy, BadCost, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or trace}: {error.strerror or error}")
    except MemoryError as error:
        fail(f"not enough memory for so many requests, or so large a cache: {error}")
    _show(study)
    _write(json_file, study.to_json())
    if plot is not None:
        from rootlace.runtime.simulation.study import plot_study

        try:
            plot_study(study, plot)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}")


def _write(file: Path | None, figures: dict[str, Any]) -> None:
    try:
        if file is not None:
            file.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")


def _check_packages(plot: Path | None) -> None:
    from importlib.util import find_spec

    if find_spec("numpy") is None:
        fail("this needs numpy; install it with: pip install 'rootlace[runtime]'")
    if plot is not None and find_spec("matplotlib") is None:
        fail("--plot needs matplotlib; install it with: pip install 'rootlace[bench]'")


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """End the command now if its results could not be written."""
    for path in (json_file, plot):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            fail(f"{path} cannot be written: {'a folder' if path.is_dir() else 'no such folder'}")
    if plot is not None and plot.suffix not in _PICTURES:
        fail(f"--plot {plot}: the name must end with one of {', '.join(_PICTURES)}")


def _run(
    workload: Any, policies: Any, sizes: list[int], cost: Any, max_running: int, below: Any
) -> Study:
    from rootlace.runtime.simulation.study import run_study

    with _progress() as told:
        return run_study(workload, policies, sizes, cost, max_running, told, below)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar on standard error."""
    from rich import progress
    from rich.console import Console

    columns = progress.TextColumn("{task.description}"), progress.BarColumn()
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _replay_texts(file: Path) -> list[dict[str, Any]]:
    """Print the savings of drafts on recorded texts, and return the figures of each price."""
    from msgspec.structs import asdict
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from rootlace.runtime.simulation.trace import DRAFT_PRICES, read_recorded, replay_texts

    texts = read_recorded(file)
    results = [
        replay_texts(texts, price)
        for price in track(DRAFT_PRICES, "prices", transient=True, console=Console(stderr=True))
    ]
    sources = [name for name in results[0].right if any(one.right[name] for one in results)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("price", "times as fast", "steps", *sources, "wrong"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in results:
        counts = (*(one.right[name] for name in sources), sum(one.wrong.values()))
        cells = (f"{count / max(one.tokens, 1):.1%}" for count in counts)
        table.add_row(f"{one.price:g}", f"{one.speedup:.2f}", f"{one.steps:,}", *cells)
    console = Console(highlight=False)
    console.print(f"{len(texts):,} requests, {results[0].tokens:,} output tokens", markup=False)
    print_wide(console, table)
    console.print("price: of a drafted token, in steps of one row; shares: of the output tokens")
    return [asdict(one) for one in results]


def _show(study: Study) -> None:
    from rich.console import Console
    from rich.table import Table

    from rootlace.runtime.simulation.study import arrivals_per_second, short

    workload = study.workload
    console = Console(highlight=False)
    pace = arrivals_per_second(workload)
    console.print(
        f"{workload.trace.name} ({workload.trace.format}): {len(workload):,} requests, "
        f"{f'{pace:.3g} per second' if pace else 'all at once'}; one simulated token is "
        f"{workload.granularity}",
        markup=False,
    )
    source = study.cost.source or "of a file that does not say where it is from"
    console.print(f"cost model: {source}", markup=False)
    console.print(f"an infinite cache: {study.infinite:.2%} of the prompt tokens")
    table = Table(box=None, header_style="bold", pad_edge=False)
    titles = "cache,policy,hits,best in this order,TTFT s,TPOT ms,waiting s,longest wait,"
    titles += "overtaken,evicted,retracted,req/s,tok/s,busy"
    for title in titles.split(","):
        justify: Literal["left", "right"] = "left" if title == "policy" else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    below = any(report.read_back for report in study.reports)
    if below:
        table.add_column("read back", justify="right", no_wrap=True)
    size = 0
    for report in study.reports:
        if report.cache_tokens != size:
            size = report.cache_tokens
            bound = f"{study.clairvoyant[size]:.2%}"
            table.add_row(short(size), "[dim]clairvoyant[/dim]", bound, bound, *[""] * 10)
        table.add_row(
            "",
            report.policy,
            f"{report.hit_rate:.2%}",
            f"{report.clairvoyant_own_order:.2%}",
            _percentiles(report.ttft),
            _percentiles(tuple(1000 * value for value in report.tpot)),
            _percentiles(report.waiting),
            _figure(report.longest_wait),
            str(report.longest_overtaking),
            short(report.evicted_tokens),
            str(report.retractions),
            f"{report.requests_per_second:.3g}",
            f"{report.output_tokens_per_second:.4g}",
            f"{report.busy:.0%}",
            *([f"{report.read_back:.2%}"] if below else ()),
        )
    print_wide(console, table)
    console.print("TTFT, TPOT and waiting: p50 / p90 / p99")
    refused = {report.cache_tokens: report.refused for report in study.reports if report.refused}
    for tokens, count in refused.items():
        console.print(
            f"{short(tokens)}: {count:,} of {len(workload):,} requests did not fit and were refused"
        )


def _percentiles(values: tuple[float, ...]) -> str:
    return " / ".join(map(_figure, values))


def _figure(value: float) -> str:
    # The simulated clock moves by less than a microsecond when it is read.
    return f"{value:.3g}" if value >= 1e-5 else "0"
