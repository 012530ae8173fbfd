"""Requests over replicas: how many a cluster takes by each router, and what a choice costs.

    python -m benchmarks.routing --trace mooncake=PATH --trace azure=PATH --json FILE

*Loads*: for each trace, the made-up load of tree searches, and each number of replicas, the highest
rate of requests at which 99 of 100 have their first token within a limit (`--limit` seconds), by
simulation (`rootlace simulate --replicas`, docs/simulation.md): our router, those of Ray Serve,
the power of two choices, and sessions that stay where they were. A trace is repeated until there
are enough requests for each replica, all of which come as fast as the rate says.

*Choices*: CPU time of a choice, and of hearing what caches hold, by the number of replicas and of
cached blocks, and the memory of the table.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from benchmarks.synthetic_traces import write_trace
from rootlace.runtime.cache.digest import PrefixDigests
from rootlace.runtime.cache.journal import Change
from rootlace.runtime.routing.router import Router, RouterConfig
from rootlace.runtime.simulation.cluster import Cluster
from rootlace.runtime.simulation.cost import DEFAULT_COST, read_cost
from rootlace.runtime.simulation.engine import Machine
from rootlace.runtime.simulation.policies import parse_policy
from rootlace.runtime.simulation.routers import ROUTINGS
from rootlace.runtime.simulation.trace import Trace, read_trace
from rootlace.runtime.simulation.workload import Load, Workload

BLOCK = 16
MOST = 64
"""Times the first rate: no higher one is tried."""
RAYS = ("ray-prefix", "ray-prefix:10", "power-of-two")


@dataclass(frozen=True)
class Rate:
    """The highest rate that a router keeps up with, in requests per second of the cluster."""

    load: str
    replicas: int
    router: str
    requests_per_second: float
    hit_rate: float
    p99: float


@dataclass(frozen=True)
class Choice:
    """CPU microseconds per request, and bytes per entry of the table."""

    replicas: int
    blocks: int
    route: float
    told: float
    bytes_per_block: float


def highest_rate(
    name: str, trace: Trace, router: str, replicas: int, given: argparse.Namespace
) -> Rate:
    """By halving the interval between a rate that is met and one that is not, to `--precision`."""
    machine = Machine(given.cache_tokens, read_cost(DEFAULT_COST))
    count = given.requests * replicas
    span = float(trace.arrivals[-1]) / max(len(trace) - 1, 1)

    def play(per_replica: float) -> Rate | None:
        load = Load(
            rate=per_replica * replicas * span, requests=count, granularity=given.granularity
        )
        report = Cluster(
            Workload(trace, load), parse_policy("lpm"), machine, replicas, router
        ).run()
        if report.ttft[2] > given.limit:
            return None
        rate = per_replica * replicas
        return Rate(name, replicas, router, rate, report.hit_rate, report.ttft[2])

    low, high, best = 0.0, given.first_rate, None
    while high < MOST * given.first_rate and (found := play(high)) is not None:
        low, high, best = high, 2 * high, found
    if best is None:
        low = high / 16
    while high > given.precision * low:
        middle = (low * high) ** 0.5
        found = play(middle)
        low, high, best = (low, middle, best) if found is None else (middle, high, found)
    return best or Rate(name, replicas, router, 0.0, 0.0, float("inf"))


def prompts(dice: np.random.Generator, stems: int) -> Iterator[np.ndarray]:
    """Prompts of 4,096 tokens behind one of so many prefixes of 3,072."""
    while True:
        stem = np.random.default_rng(int(dice.integers(stems))).integers(1 << 17, size=3072)
        yield np.concatenate((stem, dice.integers(1 << 17, size=1024))).astype(np.int32)


def measure_choices(replicas: int, blocks: int, requests: int) -> Choice:
    """A router that knows `blocks` blocks: each replica holds some of the shared prefixes, and as
    many blocks as it takes of what nobody asks for."""
    process, digests = psutil.Process(), PrefixDigests()
    dice = np.random.default_rng(0)
    gc.collect()
    before = process.memory_info().rss
    router = Router(RouterConfig(replicas, BLOCK, 1 << 20, read_cost(DEFAULT_COST)))
    stems = max(replicas // 2, 1)
    each, none = blocks // replicas, np.empty(0, np.uint64)
    for replica in range(replicas):
        prompt = next(prompts(np.random.default_rng(replica), stems))
        held = digests.of_all("", prompt[:3072])[BLOCK::BLOCK]
        other = dice.integers(1 << 63, size=max(each - len(held), 0), dtype=np.uint64)
        router.heard(replica, Change(np.concatenate((held, other)), none))
    size = (process.memory_info().rss - before) / max(blocks, 1)
    asked = [prompt for prompt, _ in zip(prompts(dice, stems), range(requests), strict=False)]
    # All at once: nobody is late with a first token.
    began = time.thread_time()
    went = [router.route(i, "", prompt, 200, 0.0) for i, prompt in enumerate(asked)]
    routed = time.thread_time()
    told = [Change(digests.of_all("", prompt)[BLOCK::BLOCK][-64:], none) for prompt in asked]
    tell = time.thread_time()
    for i, replica in enumerate(went):
        router.heard(replica, told[i])
        router.first_token(i)
        router.ended(i, 1.0)
    end = time.thread_time()
    return Choice(
        replicas,
        blocks,
        1e6 * (routed - began) / requests,
        1e6 * (end - tell) / requests,
        size,
    )


def traces_of(given: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    for named in given.trace:
        name, _, path = named.partition("=")
        yield name, read_trace(Path(path))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree-search"
        write_trace(given.requests * max(given.replicas), 0, path, "tree-search")
        yield "tree-search", read_trace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser("routing", __doc__)
    option = parser.add_argument
    option("--trace", action="append", default=[], metavar="NAME=FILE", help="may be repeated")
    option("--replicas", type=int, nargs="+", default=[2, 8, 64])
    option("--routers", nargs="+", choices=sorted(ROUTINGS), default=list(ROUTINGS))
    option("--requests", type=int, default=1000, help="for each replica")
    option("--cache-tokens", type=int, default=250_000, help="of each replica")
    option("--granularity", type=int, default=128, help="tokens of a simulated one")
    option("--limit", type=float, default=5.0, help="seconds, p99 of the first token")
    option("--first-rate", type=float, default=2.0, help="requests per second and replica")
    option("--precision", type=float, default=1.03, help="of rates: so many times at most")
    option("--choices", nargs="*", default=["1000x10000000"], metavar="REPLICASxBLOCKS")
    given = parser.parse_args(arguments)
    report, console = Report("routing", given), console_of(100)
    sizes = [tuple(map(int, size.split("x"))) for size in given.choices]
    choices = [measure_choices(replicas, blocks, 2000) for replicas, blocks in sizes]
    report.add("choices", choices)
    rows = {f"{one.replicas} replicas, {one.blocks:,} blocks": vars(one) for one in choices}
    console.print(
        table_of(
            "CPU per request",
            rows,
            {
                "route us": "{route:.0f}",
                "told us": "{told:.0f}",
                "bytes/block": "{bytes_per_block:.0f}",
            },
        )
    )
    rates: list[Rate] = []
    loads = list(traces_of(given)) if given.replicas != [0] else []
    with progress_bar(console) as bar:
        task = bar.add_task("", total=len(loads) * len(given.replicas) * len(given.routers))
        for name, trace in loads:
            for replicas in given.replicas:
                for router in given.routers:
                    bar.update(task, description=f"{name}, {replicas}: {router}")
                    rates.append(highest_rate(name, trace, router, replicas, given))
                    bar.advance(task)
    report.add("rates", rates)
    for name, _ in loads:
        for replicas in given.replicas:
            found = {r.router: r for r in rates if (r.load, r.replicas) == (name, replicas)}
            rays = max((found[ray].requests_per_second for ray in RAYS if ray in found), default=0)
            console.print(
                table_of(
                    f"{name}, {replicas} replicas: p99 of the first token within {given.limit:g} s",
                    {
                        router: {**vars(rate), "ratio": rate.requests_per_second / (rays or np.nan)}
                        for router, rate in found.items()
                    },
                    {
                        "req/s": "{requests_per_second:.3g}",
                        "times the best of Ray's": "{ratio:.2f}",
                        "hits": "{hit_rate:.1%}",
                        "p99 s": "{p99:.2f}",
                    },
                )
            )
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
