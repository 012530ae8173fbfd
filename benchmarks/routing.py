"""Requests over replicas: how many a cluster takes by each router, and what a choice costs.

    python -m benchmarks.routing --trace mooncake=PATH --trace azure=PATH --json FILE

*Loads*: for each trace, the made-up load of tree searches, and each number of replicas, the highest
rate of requests at which 99 of 100 have their first token within a limit (`--limit` seconds, and
twice what the longest of 100 prompts takes), by simulation (`rootlace simulate --replicas`,
docs/simulation.md): our router, those of Ray Serve, the power of two choices, and sessions that
stay where they were. *pooled* is one engine as fast as all together, with all their memory, which
no router's replicas can be expected to exceed; *bound* a cache as large as all together which knows
the future, and work that is divided evenly. A trace is repeated until there are enough requests for
each replica, all of which come as fast as the rate says. A run that is called again with the same
`--json` goes on where it was.

*Choices*: CPU time of a choice, and of hearing what caches hold, by the number of replicas and of
cached blocks, and the memory of the table. *Played*: CPU time of both on the traces (`--played`
replicas), beside engines that are simulated in the same process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from rich.console import Console

from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from benchmarks.synthetic_traces import LOADS, write_trace
from rootlace.runtime.cache.journal import Change, PrefixDigests
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.routing.index import PrefixIndex
from rootlace.runtime.routing.router import Router, RouterConfig
from rootlace.runtime.simulation.cluster import ROUTINGS, Cluster, Exact, PowerOfTwo
from rootlace.runtime.simulation.engine import (
    DEFAULT_COST,
    Machine,
    SimulatedEngine,
    parse_policy,
    read_cost,
)
from rootlace.runtime.simulation.study import clairvoyant_bound
from rootlace.runtime.simulation.trace import Load, Trace, Workload, read_trace

BLOCK = 16
MOST = 64
"""Times the first rate, or a part of it: no other one is tried."""
STRIDE = 1.15
"""Between the first rates that are tried."""
TOLD = 16
"""Prefixes that a request puts into its replica's cache, where as many go: of 64 blocks."""
RAYS = ("ray-prefix", "ray-prefix:10", "power-of-two")
BOUND, POOLED = "bound", "pooled"
SAME = ("cache_tokens", "granularity", "limit", "precision")


# Other routers ------------------------------------------------------------------------------------


class ExactOnePrice(Exact):
    """The exact router with one price for holding a prefix twice, however full the pool is."""

    empty = 1.0


class RayPrefix(PowerOfTwo):
    """Ray Serve's PrefixCacheAffinityRouter (2.60), after its documentation: while the longest
    queue has at most `threshold` requests more than the shortest, the replica that was sent the
    longest prefix of this prompt (of several, that with the fewest requests); if that is less than
    a tenth of the prompt, the replica that was sent the least text; else the power of two choices.
    It forgets nothing of what was sent, which is its default."""

    threshold = float("inf")

    def __init__(self, workload: Workload, machine: Machine, engines: list[SimulatedEngine]):
        super().__init__(workload, machine, engines)
        # Twice the largest possible size, so that it never loses an entry.
        self._sent = PrefixIndex(2 * len(workload.all_blocks()[0]))
        self._sizes = [0.0] * len(engines)

    def choose(self, number: int) -> int:
        blocks = self.workload.blocks(number).astype(np.uint64) + np.uint64(1)
        replica = self._best(blocks)
        if replica is None:
            replica = super().choose(number)
        held = self._sent.match(blocks)
        known = next((count for count, replicas in held if replicas >> replica & 1), 0)
        new = 1 - known / len(blocks)
        self._sizes[replica] += new * int(self.workload.prompt_units[number])
        self._sent.add(replica, blocks)
        return replica

    def _best(self, blocks: np.ndarray) -> int | None:
        if max(self.queues) - min(self.queues) > self.threshold:
            return None
        holders, count = self._matched(blocks)
        if count < 0.1 * len(blocks):
            least = min(self._sizes)
            holders = [r for r, size in enumerate(self._sizes) if size == least]
        return min(holders, key=self.queues.__getitem__)

    def _matched(self, blocks: np.ndarray) -> tuple[list[int], int]:
        """Return the replicas sent the longest prefix, and the prefix's number of blocks."""
        matches = self._sent.match(blocks)
        if not matches:
            return [], 0
        count, replicas = matches[-1]
        return [r for r in range(len(self.queues)) if replicas >> r & 1], count


class RayPrefixBalanced(RayPrefix):
    """Ray's prefix router, where queues that differ by more than ten requests count as unequal."""

    threshold = 10.0


ROUTINGS.update(
    {"exact:1": ExactOnePrice, "ray-prefix": RayPrefix, "ray-prefix:10": RayPrefixBalanced}
)


@dataclass(frozen=True)
class Rate:
    """The highest rate that a router sustains, in requests per second of the cluster, its hits
    there, and p99 of the first token; 0 if it sustains none, or none was measured. `requests`:
    number played. `seed`: number of the load of this kind."""

    load: str
    replicas: int
    router: str
    requests: int
    requests_per_second: float
    hit_rate: float
    p99: float
    seed: int = 0


@dataclass(frozen=True)
class Choice:
    """CPU microseconds per request, and bytes per entry of the table."""

    replicas: int
    blocks: int
    route: float
    told: float
    bytes_per_block: float


@dataclass(frozen=True)
class Played:
    """CPU microseconds per request of a trace at its recorded rate."""

    load: str
    replicas: int
    requests: int
    hit_rate: float
    router_microseconds: float


class Earlier(msgspec.Struct):
    """Results of an earlier run."""

    options: dict[str, Any] = {}
    choices: list[Choice] = []
    played: list[Played] = []
    rates: list[Rate] = []


class TooSlow(Exception):
    """Raised when too many first tokens are late already."""


def highest_rate(
    name: str, trace: Trace, router: str, replicas: int, first: float, given: argparse.Namespace
) -> Rate:
    """Search from the rate `first` (of a replica) by growing steps until one is met and one is not,
    then halve the interval, to `--precision`."""
    machine = Machine(given.cache_tokens, read_cost(DEFAULT_COST))
    limit, engines = limit_of(trace, machine.cost, given), replicas
    if router == POOLED:
        machine, engines = pooled(machine, replicas), 1

    def play(per_replica: float) -> Rate | None:
        rate = per_replica * replicas
        workload = workload_of(trace, rate, replicas, given)
        policy = parse_policy("lpm")
        # Reading the CPU clock takes longer than a choice on some machines.
        sends = "turns" if router == POOLED else router
        cluster = Cluster(workload, policy, machine, engines, sends, cpu=lambda: 0.0)

        def watch(arrived: int) -> None:
            if cluster.late(arrived, limit) > 0.01 * len(workload) + 1:
                raise TooSlow

        try:
            report = cluster.run(watch)
        except TooSlow:
            return None
        if report.ttft[2] > limit:
            return None
        return Rate(name, replicas, router, len(workload), rate, report.hit_rate, report.ttft[2])

    low, high, best = 0.0, math.inf, None
    rate, stride = first, STRIDE
    while high > given.precision * low and first / MOST <= rate <= first * MOST:
        if (found := play(rate)) is None:
            high = rate
        else:
            low, best = rate, found
        if low and high < math.inf:
            rate = (low * high) ** 0.5
        else:
            rate, stride = (rate * stride if low else rate / stride), stride**1.5
    return best or Rate(name, replicas, router, 0, 0.0, 0.0, 0.0)


def pooled(machine: Machine, replicas: int) -> Machine:
    """Return a machine as fast as so many, with the memory of all. A step has as many tokens as
    before, so the fixed time of a step is as small per token."""
    cost = machine.cost
    seconds = ("step", "prefill", "decode", "context", "pair")
    faster = msgspec.structs.replace(
        cost, **{name: getattr(cost, name) / replicas for name in seconds}
    )
    return Machine(machine.cache_tokens * replicas, faster, machine.max_running * replicas)


def limit_of(trace: Trace, cost: StepCost, given: argparse.Namespace) -> float:
    """Return a limit in seconds for p99 of the first token: `--limit`, and twice what the
    99th of 100 prompts takes alone and uncached."""
    tokens = float(np.percentile(trace.prompt_tokens, 99))
    each = cost.prefill + cost.step / cost.max_step_tokens + cost.pair * tokens / 2
    return float(given.limit) + 2 * tokens * each


def workload_of(trace: Trace, rate: float, replicas: int, given: argparse.Namespace) -> Workload:
    """Make the workload. `rate`: requests per second of all replicas."""
    count = min(given.requests * replicas, given.most_requests)
    last = min(count, len(trace)) - 1
    span = float(trace.arrivals[last]) / max(last, 1)
    return Workload(trace, Load(rate=rate * span, requests=count, granularity=given.granularity))


def bound_of(name: str, trace: Trace, replicas: int, given: argparse.Namespace) -> Rate:
    """Return a bound for all routers: the hits of a cache as large as all together that knows the
    future, in order of arrival, and full steps on all replicas all the time. Attention of prompts
    costs nothing here."""
    cost, machine = read_cost(DEFAULT_COST), Machine(given.cache_tokens, read_cost(DEFAULT_COST))
    workload = workload_of(trace, 1.0, replicas, given)
    hits = clairvoyant_bound(workload, replicas * given.cache_tokens // given.granularity)
    prompts = workload.prompt_units * float(given.granularity)
    outputs = workload.outputs.astype(float)
    computed = float(prompts.sum()) * (1 - hits)
    rows = float(outputs.sum())
    steps = max(computed / cost.max_step_tokens, rows / machine.max_running)
    context = float((outputs * (prompts + outputs / 2)).sum())
    seconds = cost.step * steps + cost.prefill * computed + cost.decode * rows
    seconds += cost.context * context
    count = len(workload)
    return Rate(name, replicas, BOUND, count, replicas * count / seconds, hits, 0.0)


def prompts(dice: np.random.Generator, stems: int) -> Iterator[np.ndarray]:
    """Make prompts of 4,096 tokens behind one of so many prefixes of 3,072."""
    while True:
        stem = np.random.default_rng(int(dice.integers(stems))).integers(1 << 17, size=3072)
        yield np.concatenate((stem, dice.integers(1 << 17, size=1024))).astype(np.int32)


def measure_choices(replicas: int, blocks: int, requests: int) -> Choice:
    """Measure a router that knows `blocks` blocks: each replica has some of the shared prefixes,
    and fills up with blocks that no request uses."""
    process, digests = psutil.Process(), PrefixDigests()
    dice = np.random.default_rng(0)
    gc.collect()
    before = process.memory_info().rss
    capacity = max(blocks // replicas, 1024) * BLOCK
    router = Router(RouterConfig(replicas, BLOCK, capacity, read_cost(DEFAULT_COST)))
    stems = max(replicas // 2, 1)
    each, none = blocks // replicas, np.empty(0, np.uint64)

    def others(replica: int) -> np.ndarray:
        dice = np.random.default_rng([1, replica])
        return dice.integers(1, 1 << 63, size=max(each - 3072 // BLOCK, 0), dtype=np.uint64)

    for replica in range(replicas):
        prompt = next(prompts(np.random.default_rng(replica), stems))
        held = digests.reported("", prompt[:3072], BLOCK)
        router.heard(replica, Change(np.concatenate((held, others(replica))), none))
    size = (process.memory_info().rss - before) / max(blocks, 1)
    asked = [prompt for prompt, _ in zip(prompts(dice, stems), range(requests), strict=False)]
    gc.collect()
    gc.freeze()  # a gateway does this after its start
    # All arrive at once, so no first token is late.
    began = time.thread_time()
    went = [router.route(i, "", prompt, 200, 0.0) for i, prompt in enumerate(asked)]
    routed = time.thread_time()
    gone = {replica: iter(np.array_split(others(replica), each // TOLD)) for replica in set(went)}
    told = [
        Change(digests.reported("", prompt, BLOCK)[-TOLD:], next(gone[replica], none))
        for prompt, replica in zip(asked, went, strict=True)
    ]
    tell = time.thread_time()
    for i, replica in enumerate(went):
        router.heard(replica, told[i])
        router.first_token(i, 0.5)
        router.ended(i, 1.0)
    len(router)  # lets the last reports enter the table
    end = time.thread_time()
    return Choice(
        replicas,
        blocks,
        1e6 * (routed - began) / requests,
        1e6 * (end - tell) / requests,
        size,
    )


def play_trace(name: str, path: Path, replicas: int, given: argparse.Namespace) -> Played:
    """Play a trace through our router."""
    load = Load(requests=given.requests * replicas, granularity=given.granularity)
    workload = Workload(read_trace(path), load)
    machine = Machine(given.cache_tokens, read_cost(DEFAULT_COST))
    report = Cluster(workload, parse_policy("lpm"), machine, replicas, "exact").run()
    cpu = report.router_microseconds
    return Played(name, replicas, len(workload), report.hit_rate, cpu)


def loads_of(given: argparse.Namespace) -> dict[str, Callable[[int, int], Trace]]:
    """Return functions by name that make a trace for so many replicas and a seed. A recorded trace
    is the same for all replicas, and accelerated for more; a made-up one has more programs, each at
    the same speed. A seed chooses a recorded one's beginning, or a made-up one."""
    loads: dict[str, Callable[[int, int], Trace]] = {}
    for named in given.trace:
        name, _, path = named.partition("=")
        loads[name] = partial(_recorded, read_trace(Path(path)))
    for name in given.made_up:
        loads[name] = partial(_made_up, given, name)
    return loads


def _recorded(trace: Trace, replicas: int, seed: int) -> Trace:
    """Return a recorded trace: three seeds begin at its thirds, and it wraps around at its end."""
    size = len(trace)
    order = (np.arange(size) + seed * size // 3) % size
    span = float(trace.arrivals[-1]) * size / max(size - 1, 1)
    ends = zip(trace.starts[order], trace.starts[order + 1], strict=True)
    return msgspec.structs.replace(
        trace,
        arrivals=(trace.arrivals[order] - trace.arrivals[order[0]]) % span,
        prompt_tokens=trace.prompt_tokens[order],
        output_tokens=trace.output_tokens[order],
        blocks=np.concatenate([trace.blocks[start:end] for start, end in ends]),
        starts=np.concatenate(([0], np.cumsum(np.diff(trace.starts)[order]))),
    )


def _made_up(given: argparse.Namespace, name: str, replicas: int, seed: int) -> Trace:
    count = min(given.requests * replicas, given.most_requests)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write_trace(count, seed, path, name, replicas * given.first_rate)
        return read_trace(path)


def rates_of(
    given: argparse.Namespace, found: list[Rate], progress: Callable[[str], None]
) -> Iterator[Rate]:
    """Measure all loads, replicas and routers that are not `found` yet. A router's search begins
    with its rate for another seed or fewer replicas, or with another router's."""
    known = {(rate.load, rate.replicas, rate.router, rate.seed): rate for rate in found}
    begin: dict[tuple[object, ...], float] = {}
    ways = itertools.product(range(given.seeds), given.replicas, loads_of(given).items())
    for seed, replicas, (name, trace_for) in ways:
        trace = trace_for(replicas, seed)
        for router in given.routers:
            progress(f"{name}, {replicas}: {router}")
            alike = ((name, router, replicas), (name, router), (name,))
            first = next(filter(None, map(begin.get, alike)), given.first_rate)
            rate = known.get((name, replicas, router, seed))
            if rate is None:
                if router == BOUND:
                    rate = bound_of(name, trace, replicas, given)
                else:
                    rate = highest_rate(name, trace, router, replicas, first, given)
                rate = replace(rate, seed=seed)
                yield rate
            if router != BOUND:
                begin.update(dict.fromkeys(alike, rate.requests_per_second / replicas or first))


def print_rates(console: Console, rates: list[Rate]) -> None:
    """Print a table for each load, number of replicas and seed."""
    for key in dict.fromkeys((rate.load, rate.replicas, rate.seed) for rate in rates):
        name, replicas, seed = key
        found = {r.router: r for r in rates if (r.load, r.replicas, r.seed) == key}
        rays = max((found[ray].requests_per_second for ray in RAYS if ray in found), default=0)
        rows = {
            router: {**vars(rate), "ratio": rate.requests_per_second / (rays or math.nan)}
            for router, rate in found.items()
        }
        columns = {
            "req/s": "{requests_per_second:.3g}",
            "times the best of Ray's": "{ratio:.2f}",
            "hits": "{hit_rate:.1%}",
            "p99 s": "{p99:.2f}",
        }
        title = f"{name}, {replicas} replicas, seed {seed}"
        console.print(table_of(title, rows, columns))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser("routing", __doc__)
    option = parser.add_argument
    routers = [*ROUTINGS, POOLED, BOUND]
    option("--trace", action="append", default=[], metavar="NAME=FILE", help="may be repeated")
    option("--made-up", nargs="*", choices=sorted(LOADS), default=["tree-search"])
    option("--seeds", type=int, default=1, help="so many loads of each kind")
    option("--replicas", type=int, nargs="+", default=[2, 8, 64, 1000])
    option("--routers", nargs="+", choices=sorted(routers), default=routers)
    option("--requests", type=int, default=1000, help="for each replica")
    option("--most-requests", type=int, default=40_000, help="for all of them")
    option("--cache-tokens", type=int, default=250_000, help="of each replica")
    option("--granularity", type=int, default=128, help="tokens of a simulated one")
    option("--limit", type=float, default=2.0, help="seconds: see above")
    option("--first-rate", type=float, default=2.0, help="requests per second and replica")
    option("--precision", type=float, default=1.03, help="of rates: so many times at most")
    option("--choices", nargs="*", default=["1000x10000000"], metavar="REPLICASxBLOCKS")
    option("--played", nargs="*", type=int, default=[], metavar="REPLICAS")
    option("--plot", type=Path, metavar="FILE.svg", help="rates by the number of replicas")
    given = parser.parse_args(arguments)
    before = earlier(given)
    report, console = Report("routing", given), console_of(100)
    report.add("choices", before.choices)
    report.add("rates", before.rates)
    if given.choices and not before.choices:
        sizes = [tuple(map(int, size.split("x"))) for size in given.choices]
        report.add("choices", [measure_choices(each, blocks, 2000) for each, blocks in sizes])
        found = report.found["choices"]
        rows = {f"{one['replicas']} replicas, {one['blocks']:,} blocks": one for one in found}
        columns = {
            "route us": "{route:.0f}",
            "told us": "{told:.0f}",
            "bytes/block": "{bytes_per_block:.0f}",
        }
        console.print(table_of("CPU per request", rows, columns))
    report.add("played", before.played)
    if given.played and not before.played:
        pairs = itertools.product((named.partition("=") for named in given.trace), given.played)
        played = [play_trace(name, Path(path), each, given) for (name, _, path), each in pairs]
        report.add("played", played)
        rows = {f"{one.load}, {one.replicas} replicas": vars(one) for one in played}
        columns = {"hits": "{hit_rate:.2%}", "router us": "{router_microseconds:.0f}"}
        console.print(table_of("CPU per request of a trace", rows, columns))
    rates = before.rates
    with progress_bar(console) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str) -> None:
            bar.update(task, description=what, advance=1)

        for rate in rates_of(given, rates, tell) if given.replicas != [0] else ():
            rates.append(rate)
            report.add("rates", rates)
            report.foreign_line()
            report.write()
    print_rates(console, rates)
    console.print(report.foreign_line())
    report.write()
    if given.plot:
        from benchmarks.plot import plot_rates

        plot_rates(report.found["rates"], given.plot)


def earlier(given: argparse.Namespace) -> Earlier:
    """Return results of an earlier run with the same options from its file."""
    if given.json is None or not given.json.exists():
        return Earlier()
    found = msgspec.json.decode(given.json.read_bytes(), type=Earlier)
    for name in SAME:
        if found.options.get(name) != getattr(given, name):
            raise SystemExit(f"{given.json} was measured with another --{name.replace('_', '-')}")
    return found


if __name__ == "__main__":
    main()
