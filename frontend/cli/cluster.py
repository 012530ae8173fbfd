"""`rootlace simulate --replicas`: a trace over several engines, by different routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootlace.cli.failure import fail

_WIDEST = 1000


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


def run_clusters(
    workload: Any, policy: Any, machines: Sequence[Any], replicas: int, routers: Sequence[str]
) -> list[Any]:
    """A report for each machine and router, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from rootlace.runtime.simulation.cluster import Cluster

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    reports: list[Any] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(workload) * len(machines) * len(routers))
        for machine in machines:
            for router in routers:
                done = len(workload) * len(reports)

                def show(arrived: int, done: int = done, router: str = router) -> None:
                    bar.update(task, description=router, completed=done + arrived)

                reports.append(Cluster(workload, policy, machine, replicas, router).run(show))
    return reports


def show_clusters(reports: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rootlace.runtime.simulation.study import short

    table = Table(box=None, header_style="bold", pad_edge=False)
    titles = "cache,router,hits,TTFT s,TPOT ms,req/s,busy,busiest,router us"
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
        )
    console = Console(highlight=False)
    print_wide(console, table)
    console.print(
        "TTFT and TPOT: p50 / p90 / p99; cache: of each replica; busiest: times the mean; "
        "router us: CPU time per request"
    )
