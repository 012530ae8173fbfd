"""Every policy on every cache size: replays on a simulated clock, and upper bounds beside them."""

from __future__ import annotations

import heapq
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.engine import Below, Machine, NamedPolicy, SimulatedEngine, Times
from rootlace.runtime.simulation.trace import Workload


def infinite_bound(workload: Workload, served: np.ndarray | None = None) -> float:
    """Return the hit rate of a cache that forgets nothing: the best in any order of service.

    A unit of the prompts' common trie is computed once, and the last unit of a prompt always is:
    its logits are wanted. So a unit that ends some prompt is found by all other prompts with the
    unit, and any other unit by all but one. `served`: the numbers of the requests that count (all).
    """
    uses = _Uses(workload, served)
    count = int(uses.blocks.max(initial=0)) + 1
    times = np.bincount(uses.blocks, minlength=count)
    size = np.zeros(count, np.int64)
    size[uses.blocks] = uses.units
    ends = np.bincount(uses.blocks[uses.last], minlength=count)
    hits = int(((times - 1) * size)[times > 0].sum()) - int(np.maximum(ends - 1, 0).sum())
    return hits / max(int(uses.sizes.sum()), 1)


def clairvoyant_bound(
    workload: Workload, cache_units: int, served: np.ndarray | None = None
) -> float:
    """Return the best hit rate of `cache_units` units for a cache that knows the future.

    Requests are served in the order of `served` (by default that of arrival, without those that do
    not fit), one prompt after the other.

    This is Belady's rule, with the freedom not to keep a unit at all: whenever too much is kept,
    the unit that is used again latest is dropped. Whoever uses a continuation uses its prefix too,
    so continuations go first, and what is kept is always a tree. A prompt takes its own room while
    it is computed; outputs, and prompts of requests that decode, take none here, so a real cache
    has less. The rule is optimal by an exchange argument: at the first moment with too little room
    some unit must go, and of all that are kept then, this one would take room the longest.
    """
    if served is None:
        served = workload.fitting(cache_units)
    uses = _Uses(workload, served)
    by_block = np.argsort(uses.blocks, kind="stable")
    again = uses.blocks[by_block[1:]] == uses.blocks[by_block[:-1]]
    use, following = by_block[:-1][again], by_block[1:][again]
    # The last unit of a prompt is computed in any case: not worth keeping for it.
    worth = uses.units[use] - uses.last[following]
    turns = np.repeat(np.arange(len(served)), uses.lengths)
    del by_block, again
    # Blocks of one prompt that are used next by the same one are kept and given up together.
    spans, which = np.unique(turns[use] * len(served) + turns[following], return_inverse=True)
    amounts = np.bincount(which, weights=worth, minlength=len(spans)).astype(np.int64)
    begins, ends = np.divmod(spans, max(len(served), 1))
    hits = _keep_nearest(begins, ends, amounts, uses.sizes, cache_units)
    return hits / max(int(uses.sizes.sum()), 1)


class _Uses:
    """The blocks of requests, in order of service.

    Arrays over all uses of blocks: `blocks`, `units` and whether it is the `last` of its prompt;
    over the requests: how many blocks (`lengths`) and units (`sizes`) each has.
    """

    def __init__(self, workload: Workload, served: np.ndarray | None) -> None:
        blocks, units, starts = workload.all_blocks()
        if served is None:
            served = np.arange(len(workload))
        self.lengths = np.diff(starts)[served]
        self.sizes = workload.prompt_units[served]
        ends = np.cumsum(self.lengths)
        places = np.arange(int(self.lengths.sum()))
        places += np.repeat(starts[:-1][served] - (ends - self.lengths), self.lengths)
        self.blocks, self.units = blocks[places], units[places]
        self.last = np.zeros(len(places), bool)
        self.last[ends - 1] = True


def _keep_nearest(
    begins: np.ndarray, ends: np.ndarray, amounts: np.ndarray, sizes: np.ndarray, capacity: int
) -> int:
    """Count the units found again, with `capacity` units in all, if `amounts` may be kept from turn
    `begins` (ascending) to turn `ends`. At turn t, prompt t takes `sizes[t]` of the capacity."""
    units: dict[int, int] = {}  # end -> units kept until then
    heap: list[int] = []  # ends, the latest first; some have passed
    total = hits = at = 0
    spans = list(zip(begins.tolist(), ends.tolist(), amounts.tolist(), strict=True))
    for turn, size in enumerate(sizes.tolist()):
        used = units.pop(turn, 0)
        hits += used
        total -= used
        # Units kept beyond this turn are no part of this prompt, and must fit beside it.
        while total > capacity - size:
            end = -heap[0]
            amount = units.get(end, 0)
            if amount <= total - (capacity - size):
                heapq.heappop(heap)
                total -= units.pop(end, 0)
            else:
                units[end] = amount - (total - (capacity - size))
                total = capacity - size
        while at < len(spans) and spans[at][0] == turn:
            _, end, amount = spans[at]
            if end not in units:
                heapq.heappush(heap, -end)
            units[end] = units.get(end, 0) + amount
            total += amount
            at += 1
    return hits


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a run's requests. Arrays over all of them, NaN or -1 for refused requests (prompt
    and output do not fit into the cache).

    `waited`, `first` and `last` are the seconds from a request's arrival to its admission, its
    first and its last token. `decoding` is the time between first and last token, less the wait for
    the simulated step to end while its prompt is computed. `cached` counts prompt units found in
    the tree, `overtaken` the later requests that were admitted before. `admitted` are the requests
    in order of admission, `steps` the number of the engine's steps.
    """

    policy: NamedPolicy
    machine: Machine
    waited: np.ndarray
    first: np.ndarray
    last: np.ndarray
    decoding: np.ndarray
    cached: np.ndarray
    overtaken: np.ndarray
    admitted: np.ndarray
    seconds: float
    busy_seconds: float
    steps: int
    evicted_tokens: int
    retractions: int
    restored_tokens: int


def replay(
    workload: Workload,
    policy: NamedPolicy,
    machine: Machine,
    progress: Callable[[int], None] = lambda ended: None,
) -> Outcome:
    """Play everything; `progress` is told now and then how many requests have ended.

    A request that arrives while a step runs is seen by the scheduler when that ends.
    """
    times, arrivals, count = Times(len(workload)), workload.arrivals, len(workload)
    engine = SimulatedEngine(workload, policy, machine, times)
    arrived = refused = ended = reported = 0
    while True:
        until = int(np.searchsorted(arrivals, engine.now, side="right"))
        for number in range(arrived, until):
            if engine.fits[number]:
                engine.submit(number)
            else:
                refused += 1
        arrived = until
        updates = engine.step()
        if updates is None:
            next_arrival = float(arrivals[arrived]) if arrived < count else math.inf
            then = min(next_arrival, engine.next_read)
            if then == math.inf:
                break
            engine.now = max(engine.now, then)
            continue
        ended += sum(update.finish is not None for update in updates)
        if ended + refused >= reported + count // 1000:
            reported = ended + refused
            progress(reported)
    progress(ended + refused)
    if engine.scheduler.has_work:
        raise RuntimeError("the scheduler has work and plans nothing")
    admitted = np.argsort(times.admitted, kind="stable")[: count - refused]  # NaN comes last
    stats = engine.scheduler.stats()
    return Outcome(
        policy=policy,
        machine=machine,
        waited=times.admitted - arrivals,
        first=times.first - arrivals,
        last=times.last - arrivals,
        decoding=np.maximum(times.last - times.decodes_from, 0.0),
        cached=times.cached,
        overtaken=count_overtaken(admitted, count),
        admitted=admitted,
        seconds=engine.now,
        busy_seconds=engine.busy,
        steps=engine.steps,
        evicted_tokens=int(stats["evicted_blocks"]) * engine.block * workload.granularity,
        retractions=int(stats["retractions"]),
        restored_tokens=engine.restored_units * workload.granularity,
    )


def count_overtaken(admitted: np.ndarray, count: int) -> np.ndarray:
    """Count, for each of `count` requests, the higher numbers before it in `admitted`; -1 for a
    request not in `admitted`."""
    counts = np.full(count, -1, np.int64)
    gone = np.ones(count + 1, bool)
    gone[admitted] = False
    gone[count] = False
    head = int(np.argmin(gone))
    ahead: list[int] = []  # admitted, and behind the head
    for number in admitted.tolist():
        at = bisect_left(ahead, number)
        counts[number] = len(ahead) - at
        gone[number] = True
        if number != head:
            ahead.insert(at, number)
            continue
        while gone[head]:
            head += 1
        del ahead[: bisect_left(ahead, head)]
    return counts


# Report -------------------------------------------------------------------------------------------
#
# The figures of a run: rates, percentiles, rows of a table.


PERCENTILES = (50, 90, 99)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Results on one cache size. Times in seconds; percentiles are (p50, p90, p99).

    `hit_rate`: cached share of the prompt tokens of served requests; `read_back`: share read from
    below the pool.
    """

    cache_tokens: int
    requests: int
    refused: int
    hit_rate: float
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    requests_per_second: float
    busy: float
    read_back: float = 0.0

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        for name in {"ttft", "tpot", "waiting"} & row.keys():
            row[name] = {f"p{p}": value for p, value in zip(PERCENTILES, row[name], strict=True)}
        return row


class Report(Figures, frozen=True, kw_only=True):
    """Results of one policy. `clairvoyant_own_order`: the bound for the order in which this policy
    served the requests."""

    policy: str
    clairvoyant_own_order: float
    waiting: tuple[float, ...]
    longest_wait: float
    longest_overtaking: int
    evicted_tokens: int
    retractions: int
    seconds: float
    steps: int
    output_tokens_per_second: float
    simulation_seconds: float


def report_on(workload: Workload, outcome: Outcome, simulation_seconds: float) -> Report:
    served = outcome.admitted
    outputs = workload.outputs[served]
    several = outputs > 1
    pace = outcome.decoding[served][several] / (outputs[several] - 1)
    prompts = int(workload.prompt_units[served].sum())
    seconds = max(outcome.seconds, 1e-9)
    return Report(
        policy=outcome.policy.name,
        cache_tokens=outcome.machine.cache_tokens,
        requests=len(workload),
        refused=len(workload) - len(served),
        hit_rate=int(outcome.cached[served].sum()) / max(prompts, 1),
        clairvoyant_own_order=clairvoyant_bound(
            workload, outcome.machine.cache_tokens // workload.granularity, served
        ),
        ttft=percentiles(outcome.first[served]),
        tpot=percentiles(pace),
        waiting=percentiles(outcome.waited[served]),
        longest_wait=float(outcome.waited[served].max(initial=0.0)),
        longest_overtaking=int(outcome.overtaken.max(initial=0)),
        evicted_tokens=outcome.evicted_tokens,
        retractions=outcome.retractions,
        seconds=outcome.seconds,
        busy=outcome.busy_seconds / seconds,
        steps=outcome.steps,
        requests_per_second=len(served) / seconds,
        output_tokens_per_second=int(outputs.sum()) / seconds,
        simulation_seconds=simulation_seconds,
        read_back=outcome.restored_tokens / max(prompts * workload.granularity, 1),
    )


def percentiles(values: np.ndarray) -> tuple[float, ...]:
    if not len(values):
        return (0.0,) * len(PERCENTILES)
    return tuple(np.percentile(values, PERCENTILES).tolist())


Progress = Callable[[str, int, int], None]
"""Callback for progress: the name of the run, ended requests of all runs, all runs' requests."""


class Study(msgspec.Struct, frozen=True):
    """`clairvoyant` has the bound in order of arrival for each of `sizes` (tokens)."""

    workload: Workload
    cost: StepCost
    max_running: int
    sizes: tuple[int, ...]
    reports: list[Report]
    infinite: float
    clairvoyant: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        workload = self.workload
        trace, load = workload.trace, workload.load
        return {
            "trace": {
                "name": trace.name,
                "format": trace.format,
                "requests": len(trace),
                "prompt_tokens": int(trace.prompt_tokens.sum()),
                "output_tokens": int(trace.output_tokens.sum()),
            },
            "load": {
                "requests": len(workload),
                "rate": load.rate,
                "granularity": load.granularity,
                "arrivals_per_second": arrivals_per_second(workload),
            },
            "cost": asdict(self.cost),
            "max_running": self.max_running,
            "bounds": {
                "infinite": self.infinite,
                "clairvoyant": {str(size): rate for size, rate in self.clairvoyant.items()},
            },
            "runs": [report.to_json() for report in self.reports],
        }


def arrivals_per_second(workload: Workload) -> float:
    """On average; 0 where all come at once."""
    span = float(workload.arrivals[-1])
    return (len(workload) - 1) / span if span else 0.0


def run_study(
    workload: Workload,
    policies: Sequence[NamedPolicy],
    sizes: Sequence[int],
    cost: StepCost,
    max_running: int = 256,
    progress: Progress = lambda what, done, total: None,
    below: tuple[Below, ...] = (),
) -> Study:
    """Replay `workload` under each of `policies`, with each of `sizes` tokens of cache and the
    levels `below`."""
    total, done = len(workload) * len(sizes) * len(policies), 0
    reports = []
    for size in sizes:
        for policy in policies:
            name = f"{policy.name}, {short(size)} tokens"
            progress(name, done, total)
            began = time.perf_counter()
            machine = Machine(size, cost, max_running, below)
            outcome = replay(workload, policy, machine, partial(_tell, progress, name, done, total))
            reports.append(report_on(workload, outcome, time.perf_counter() - began))
            done += len(workload)
    progress("bounds", done, total)
    return Study(
        workload=workload,
        cost=cost,
        max_running=max_running,
        sizes=tuple(sizes),
        reports=reports,
        infinite=infinite_bound(workload),
        clairvoyant={
            size: clairvoyant_bound(workload, size // workload.granularity) for size in sizes
        },
    )


def _tell(progress: Progress, what: str, before: int, total: int, ended: int) -> None:
    progress(what, before + ended, total)


def default_sizes(workload: Workload) -> list[int]:
    """Six, each twice the one before; the first holds the longest request twice."""
    trace = workload.trace
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    size = 1 << 16
    while size < 2 * longest:
        size *= 2
    return [size << step for step in range(6)]


def short(tokens: int) -> str:
    """1500000 -> 1.5M"""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{letter}"
    return str(tokens)


# Plot ---------------------------------------------------------------------------------------------
#
# A picture of a study: hit rate against cache size (needs matplotlib).


_SHADES = {"fcfs": "0.45", "lpm": "C0", "dfs": "C2"}


def plot_study(study: Study, path: Path) -> None:
    """Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    # Text as text, and the same bytes for the same figures.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rootlace"}):
        figure = _draw(study, pyplot)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw(study: Study, pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    sizes = list(study.sizes)
    axes.axhline(100 * study.infinite, color="0.2", linewidth=1, linestyle=":")
    axes.annotate(
        "infinite cache",
        (sizes[0], 100 * study.infinite),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
    axes.plot(
        sizes,
        [100 * study.clairvoyant[size] for size in sizes],
        color="0.2",
        linewidth=1,
        linestyle="--",
        label="clairvoyant, in order of arrival",
    )
    for name in dict.fromkeys(report.policy for report in study.reports):
        rates = {r.cache_tokens: 100 * r.hit_rate for r in study.reports if r.policy == name}
        base = re.split(r"[-:+]", name)[0]
        axes.plot(
            sizes,
            [rates[size] for size in sizes],
            marker="o" if name == base else "x",
            markersize=4,
            linestyle="-" if name == base else "-.",
            linewidth=1.4 if name == base else 1,
            color=_SHADES.get(base),
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [short(size) for size in sizes])
    axes.minorticks_off()
    # The infinite cache is above all others, and its name is above its line.
    axes.set_ylim(0, 108 * study.infinite or 1)
    axes.set_xlabel("cache, tokens")
    axes.set_ylabel("prompt tokens found in the cache, %")
    workload = study.workload
    axes.set_title(
        f"{workload.trace.name}: {len(workload):,} requests at rate {workload.load.rate:g}",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
