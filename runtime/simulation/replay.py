"""Replays a workload through the real scheduler and tree, on a simulated clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.scheduler.running import Headroom
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.simulation.cost import StepCost, time_step
from rootlace.runtime.simulation.executor import STOP, ReplayExecutor, StepWork
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.workload import Workload
from rootlace.wire.protocol import SamplingParams

BLOCK_TOKENS = CacheConfig().block_size

_TICK = 1e-7
"""Seconds by which the clock moves when the scheduler reads it, so that requests admitted in one
step have different times, in the order of their admission."""

_NEVER = 1 << 60
_FIRST = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Machine:
    """What the requests run on: tokens of KV memory, rows, and what steps cost."""

    cache_tokens: int
    cost: StepCost
    max_running: int = 256


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


class Replay:
    """One run. A request that arrives while a step runs is seen by the scheduler when that ends."""

    def __init__(self, workload: Workload, policy: NamedPolicy, machine: Machine) -> None:
        size = workload.granularity
        self._workload = workload
        self._policy = policy
        self._machine = machine
        self._executor = ReplayExecutor(workload)
        block = max(BLOCK_TOKENS // size, 1)
        blocks = max(machine.cache_tokens // (block * size), 1)
        self._fits = np.zeros(len(workload), bool)
        self._fits[workload.fitting(block * blocks)] = True
        # A client asks for no more than the longest output of all: the scheduler does not learn
        # from `max_tokens` how long this one is.
        self._most_units = int(workload.output_units[self._fits].max(initial=1))
        default = Headroom()
        self._scheduler = Scheduler(
            SchedulerConfig(
                policy=policy.policy,
                max_overtaken=policy.max_overtaken,
                max_delay=policy.max_delay,
                # As many units here as tokens there: a simulated step stands for `granularity`
                # of the engine's.
                max_step_tokens=machine.cost.max_step_tokens,
                max_running=machine.max_running,
                max_waiting=_NEVER,
            ),
            CacheConfig(block_size=block, num_blocks=blocks, eviction=policy.eviction),
            _NEVER,
            self._read_clock,
            headroom=Headroom(default.least / size, default.most / size, default.decay**size),
        )
        count = len(workload)
        self._now = 0.0
        self._busy = 0.0
        self._steps = 0
        self._arrived = 0
        self._next_arrival = 0.0
        self._refused = 0
        self._admitted_at = np.full(count, np.nan)
        self._first_at = np.full(count, np.nan)
        self._decodes_from = np.full(count, np.nan)
        self._last_at = np.full(count, np.nan)
        self._cached = np.full(count, -1, np.int64)

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Outcome:
        """Play everything; `progress` is told now and then how many requests have ended."""
        scheduler, count = self._scheduler, len(self._workload)
        ended = told = 0
        while True:
            self._arrive()
            plan = scheduler.plan()
            if plan is None:
                if self._arrived == count:
                    break
                self._now = max(self._now, float(self._workload.arrivals[self._arrived]))
                continue
            result, work = self._executor.run(plan)
            ended += self._take(work, scheduler.commit(plan, result))
            if ended + self._refused >= told + count // 1000:
                told = ended + self._refused
                progress(told)
        progress(ended + self._refused)
        if scheduler.has_work:
            raise RuntimeError("the scheduler has work and plans nothing")
        return self._outcome()

    def _read_clock(self) -> float:
        self._now += _TICK
        return self._now

    def _arrive(self) -> None:
        """Give the scheduler the requests that have arrived."""
        if self._now < self._next_arrival:
            return
        workload, arrivals = self._workload, self._workload.arrivals
        until = int(np.searchsorted(arrivals, self._now, side="right"))
        for number in range(self._arrived, until):
            if not self._fits[number]:
                self._refused += 1
                continue
            params = SamplingParams(
                max_tokens=self._most_units, stop_token_ids=(STOP,), seed=number
            )
            waited = self._now - float(arrivals[number])
            prompt = workload.prompt(number)
            self._scheduler.add(Request(number, prompt, params, emit_every=_NEVER), waited=waited)
        self._arrived = until
        self._next_arrival = float(arrivals[until]) if until < len(arrivals) else math.inf

    def _take(self, work: StepWork, updates: list[Update]) -> int:
        """Record what a step did and move the clock; returns how many requests ended."""
        for update in updates:
            if update.queued is not None and update.cached_tokens is not None:
                at = self._workload.arrivals[update.rid] + update.queued
                self._admitted_at[update.rid] = at
                self._cached[update.rid] = update.cached_tokens
        order = self._in_order(work.chunk_requests)
        times = time_step(
            self._machine.cost,
            work.chunk_tokens[order],
            work.chunk_ends[order],
            work.row_tokens,
            work.row_contexts,
        )
        prefilled = work.chunk_requests[order]
        if len(order):
            complete = prefilled >= 0
            prefilled, ready = prefilled[complete], self._now + times.chunks[complete]
            # One that comes back after a retraction had its first token before.
            fresh = np.isnan(self._first_at[prefilled])
            self._first_at[prefilled[fresh]] = ready[fresh]
            self._decodes_from[prefilled[fresh]] = self._now + times.total
        finished = [update.rid for update in updates if update.finish is not None]
        if finished:
            if len(prefilled):
                self._last_at[prefilled] = ready
            self._last_at[work.row_requests] = self._now + times.rows
        self._now += times.total
        self._busy += times.total
        self._steps += times.steps
        return len(finished)

    def _in_order(self, numbers: np.ndarray) -> np.ndarray:
        """How chunks of requests `numbers` are sorted in order of admission; a cut one (-1) is the
        last of its step."""
        if len(numbers) < 2:
            return _FIRST[: len(numbers)]
        admitted = np.where(numbers >= 0, self._admitted_at[numbers], np.inf)
        return np.argsort(admitted, kind="stable")

    def _outcome(self) -> Outcome:
        arrivals = self._workload.arrivals
        admitted = np.argsort(self._admitted_at, kind="stable")
        admitted = admitted[: len(admitted) - self._refused]  # NaN comes last
        stats = self._scheduler.stats()
        block = self._scheduler.kv.block_size * self._workload.granularity
        return Outcome(
            policy=self._policy,
            machine=self._machine,
            waited=self._admitted_at - arrivals,
            first=self._first_at - arrivals,
            last=self._last_at - arrivals,
            decoding=np.maximum(self._last_at - self._decodes_from, 0.0),
            cached=self._cached,
            overtaken=count_overtaken(admitted, len(arrivals)),
            admitted=admitted,
            seconds=self._now,
            busy_seconds=self._busy,
            steps=self._steps,
            evicted_tokens=int(stats["evicted_blocks"]) * block,
            retractions=int(stats["retractions"]),
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
