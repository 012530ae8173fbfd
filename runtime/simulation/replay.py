"""Replays a workload through the real scheduler and tree, on a simulated clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rootlace.runtime.simulation.bounds import clairvoyant_bound
from rootlace.runtime.simulation.engine import Machine, SimulatedEngine, Times
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.trace import Workload


@dataclass(frozen=True)
class Outcome:
    """What became of a run's requests. Arrays over all of them, NaN or -1 for those refused (prompt
    and output do not fit into the cache).

    `waited`, `first` and `last` are the seconds from a request's arrival to its admission, its
    first and its last token; `decoding` those between first and last token, without the time that
    it waits, its prompt being computed, for the simulated step to end. `cached` counts prompt units
    found in the tree, `overtaken` the later requests that were admitted before. `admitted` are the
    requests in order of admission, `steps` the number of the engine's steps.
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


class Replay:
    """One run. A request that arrives while a step runs is seen by the scheduler when that ends."""

    def __init__(self, workload: Workload, policy: NamedPolicy, machine: Machine) -> None:
        self._workload = workload
        self._policy = policy
        self._machine = machine
        self._times = Times(len(workload))
        self._engine = SimulatedEngine(workload, policy, machine, self._times)
        self._arrived = 0
        self._next_arrival = 0.0
        self._refused = 0

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Outcome:
        """Play everything; `progress` is told now and then how many requests have ended."""
        engine, count = self._engine, len(self._workload)
        ended = told = 0
        while True:
            self._arrive()
            updates = engine.step()
            if updates is None:
                then = min(self._next_arrival, engine.next_read)
                if then == math.inf:
                    break
                engine.now = max(engine.now, then)
                continue
            ended += sum(update.finish is not None for update in updates)
            if ended + self._refused >= told + count // 1000:
                told = ended + self._refused
                progress(told)
        progress(ended + self._refused)
        if engine.scheduler.has_work:
            raise RuntimeError("the scheduler has work and plans nothing")
        return self._outcome()

    def _arrive(self) -> None:
        """Give the scheduler the requests that have arrived."""
        engine, arrivals = self._engine, self._workload.arrivals
        if engine.now < self._next_arrival:
            return
        until = int(np.searchsorted(arrivals, engine.now, side="right"))
        for number in range(self._arrived, until):
            if engine.fits[number]:
                engine.submit(number)
            else:
                self._refused += 1
        self._arrived = until
        self._next_arrival = float(arrivals[until]) if until < len(arrivals) else math.inf

    def _outcome(self) -> Outcome:
        arrivals, times, engine = self._workload.arrivals, self._times, self._engine
        admitted = np.argsort(times.admitted, kind="stable")
        admitted = admitted[: len(admitted) - self._refused]  # NaN comes last
        stats = engine.scheduler.stats()
        block = engine.block * self._workload.granularity
        return Outcome(
            policy=self._policy,
            machine=self._machine,
            waited=times.admitted - arrivals,
            first=times.first - arrivals,
            last=times.last - arrivals,
            decoding=np.maximum(times.last - times.decodes_from, 0.0),
            cached=times.cached,
            overtaken=count_overtaken(admitted, len(arrivals)),
            admitted=admitted,
            seconds=engine.now,
            busy_seconds=engine.busy,
            steps=engine.steps,
            evicted_tokens=int(stats["evicted_blocks"]) * block,
            retractions=int(stats["retractions"]),
            restored_tokens=engine.restored_units * self._workload.granularity,
        )


def count_overtaken(admitted: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` requests, how many with higher numbers come before it in `admitted`; -1
    for those that are not in there."""
    found = np.full(count, -1, np.int64)
    gone = np.ones(count + 1, bool)
    gone[admitted] = False
    gone[count] = False
    head = int(np.argmin(gone))
    ahead: list[int] = []  # admitted, and behind the head
    for number in admitted.tolist():
        at = bisect_left(ahead, number)
        found[number] = len(ahead) - at
        gone[number] = True
        if number != head:
            ahead.insert(at, number)
            continue
        while gone[head]:
            head += 1
        del ahead[: bisect_left(ahead, head)]
    return found


# Report -------------------------------------------------------------------------------------------
#
# The figures of a run: rates, percentiles, rows of a table.


PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Report:
    """One policy on one cache size. Times in seconds; percentiles are (p50, p90, p99).

    `hit_rate`: of the prompt tokens of the requests that were served, `read_back` those of them
    that were read from below the pool. `clairvoyant_own_order`: the
    bound for the order in which this policy served them (None if it was not asked for).
    """

    policy: str
    cache_tokens: int
    requests: int
    refused: int
    hit_rate: float
    clairvoyant_own_order: float | None
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    waiting: tuple[float, ...]
    longest_wait: float
    longest_overtaking: int
    evicted_tokens: int
    retractions: int
    seconds: float
    busy: float
    steps: int
    requests_per_second: float
    output_tokens_per_second: float
    simulation_seconds: float
    read_back: float = 0.0

    def to_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("ttft", "tpot", "waiting"):
            row[name] = {f"p{p}": value for p, value in zip(PERCENTILES, row[name], strict=True)}
        return row


def report_on(
    workload: Workload, outcome: Outcome, simulation_seconds: float, own_order: bool = True
) -> Report:
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
        )
        if own_order
        else None,
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
