"""`rootlace simulate --replicas`: a trace over several engines, by different routers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from rootlace.cli.failure import fail

_WIDEST = 1000
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def print_wide(console: Any, table: Any) -> None:
    """In a narrow terminal, broken lines are easier to read than narrow columns."""
    options = console.options.update(width=_WIDEST)
    console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)


def routers_of(given: Sequence[str]) -> list[str]:
    """The names in `--router`; ends the command where there is no such router."""
    from rootlace.runtime.simulation.routers import ROUTINGS

    names = [name.strip() for part in given for name in part.split(",")]
    for name in names:
        if name not in ROUTINGS and name != "all":
            fail(f"--router {name}: there is no such router; there are {', '.join(ROUTINGS)}, all")
    return list(ROUTINGS) if "all" in names else list(dict.fromkeys(names))


def apart_of(
    given: str | None, replicas: int, least_tokens: int, link: str, token_bytes: int
) -> list[Any]:
    """What `--disaggregate` and its options ask for, behind None: all replicas do both. Ends the
    command where that cannot be."""
    if given is None:
        return [None]
    if replicas == 1:
        fail("--disaggregate divides several replicas: give --replicas")
    from rootlace.runtime.simulation.disaggregated import Apart, Link

    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?", link, re.ASCII)
    if found is None or not float(found[1]):
        fail(f"--link {link}: write GB/s, or GB/s and milliseconds as 50:1")
    over = Link(1e9 * float(found[1]), float(found[2] or 0) / 1000, token_bytes)
    aparts: list[Any] = [None]
    for part in given.split(","):
        count = int(part) if part.strip().isdecimal() else 0
        if not 0 < count < replicas:
            fail(f"--disaggregate {part.strip()}: from 1 to {replicas - 1} of the --replicas")
        aparts.append(Apart(count, least_tokens, over))
    return aparts


def below_of(host: str | None, disk: str | None, token_bytes: int) -> tuple[Any, ...]:
    """What `--host` and `--disk` ask for. Ends the command where they say something else."""
    from rootlace.runtime.simulation.below import Below

    found = []
    for name, given in (("host", host), ("disk", disk)):
        if given is None:
            continue
        tokens, _, speed = given.partition(":")
        if not re.fullmatch(r"\d+(\.\d+)?", speed, re.ASCII) or not float(speed):
            fail(f"--{name} {given}: write tokens and GB/s, as 4M:2.5")
        (size,) = sizes_of(f"--{name}", tokens)
        found.append(Below(name, size, token_bytes / (1e9 * float(speed))))
    return tuple(found)


def sizes_of(option: str, text: str) -> list[int]:
    """The sizes in tokens that an option gives, in their order; ends the command where one is
    none."""
    sizes = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kMG]?)\s*", part)
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
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
    """A report for each machine, router and way of disaggregation, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from rootlace.runtime.simulation.cluster import Cluster

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    reports: list[Any] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        runs = list(product(machines, routers, aparts))
        task = bar.add_task("", total=len(workload) * len(runs))
        for done, (machine, router, apart) in enumerate(runs):

            def show(arrived: int, done: int = done, router: str = router) -> None:
                finished = len(workload) * done + arrived
                bar.update(task, description=router, completed=finished)

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
