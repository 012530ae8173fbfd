"""An engine without a model: the real scheduler and tree, on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.step_cost import StepCost
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.scheduler.running import Headroom
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.scheduler.tiers.levels import Tiers
from rootlace.runtime.simulation.below import Below, StoresBelow
from rootlace.runtime.simulation.cost import time_step
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
    """What the requests run on: tokens of KV memory, rows, what steps cost, and what is below that
    memory, the fastest first."""

    cache_tokens: int
    cost: StepCost
    max_running: int = 256
    below: tuple[Below, ...] = ()


class Times:
    """When what happened to each request of a run, on the run's clock (NaN: not yet), and how many
    units of its prompt were cached (-1)."""

    def __init__(self, count: int) -> None:
        self.admitted = np.full(count, np.nan)
        self.first = np.full(count, np.nan)
        self.decodes_from = np.full(count, np.nan)
        self.last = np.full(count, np.nan)
        self.cached = np.full(count, -1, np.int64)


class SimulatedEngine:
    """Takes requests of a workload by their numbers, and computes step by step."""

    def __init__(
        self, workload: Workload, policy: NamedPolicy, machine: Machine, times: Times
    ) -> None:
        size = workload.granularity
        self._workload = workload
        self._cost = machine.cost
        self._times = times
        self._executor = ReplayExecutor(workload)
        self.block = max(BLOCK_TOKENS // size, 1)
        """Units of a block."""
        blocks = max(machine.cache_tokens // (self.block * size), 1)
        fitting = workload.fitting(self.block * blocks)
        self.fits = np.zeros(len(workload), bool)
        """Which requests do: others must not be submitted."""
        self.fits[fitting] = True
        # A client asks for no more than the longest output of all: the scheduler does not learn
        # from `max_tokens` how long this one is.
        self._most_units = int(workload.output_units[fitting].max(initial=1))
        default = Headroom()
        self.now = 0.0
        self._below = StoresBelow(machine.below, self.block * size, lambda: self.now)
        each = machine.cost.prefill + machine.cost.step / machine.cost.max_step_tokens
        self.scheduler = Scheduler(
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
            CacheConfig(block_size=self.block, num_blocks=blocks, eviction=policy.eviction),
            _NEVER,
            self._read_clock,
            headroom=Headroom(default.least / size, default.most / size, default.decay**size),
            # Steps take no time before they are committed here, so none can be measured.
            tiers=Tiers(self._below.levels, prefill_seconds=lambda units: each * size * units),
        )
        self.busy = 0.0
        self.steps = 0
        self.begun: list[int] = []
        """Requests that had their first token in the last step."""

    def submit(self, number: int) -> None:
        """Request `number` has arrived, at the latest now."""
        workload = self._workload
        params = SamplingParams(max_tokens=self._most_units, stop_token_ids=(STOP,), seed=number)
        waited = self.now - float(workload.arrivals[number])
        request = Request(number, workload.prompt(number), params, emit_every=_NEVER)
        self.scheduler.add(request, waited=waited)

    def step(self) -> list[Update] | None:
        """One simulated step, after which the clock stands at its end; None if there is nothing to
        compute."""
        plan = self.scheduler.plan()
        self._below.move(self.scheduler.kv.tiering.take_moves())
        if plan is None:
            return None
        result, work = self._executor.run(plan)
        updates = self.scheduler.commit(plan, result)
        self._take(work, updates)
        return updates

    @property
    def next_read(self) -> float:
        """When there may be more to compute, since requests wait for what is below the pool; inf:
        none does."""
        waits = self.scheduler.kv.tiering.waiting
        return self._below.next_done if waits else float("inf")

    @property
    def restored_units(self) -> int:
        """Units of prompts that were read from below the pool."""
        return self.scheduler.kv.tiering.fetching.restored_tokens

    def _read_clock(self) -> float:
        self.now += _TICK
        return self.now

    def _take(self, work: StepWork, updates: list[Update]) -> None:
        """Record what a step did and move the clock."""
        times = self._times
        for update in updates:
            if update.queued is not None and update.cached_tokens is not None:
                at = self._workload.arrivals[update.rid] + update.queued
                times.admitted[update.rid] = at
                times.cached[update.rid] = update.cached_tokens
        order = self._in_order(work.chunk_requests)
        took = time_step(
            self._cost,
            work.chunk_tokens[order],
            work.chunk_ends[order],
            work.row_tokens,
            work.row_contexts,
        )
        prefilled = work.chunk_requests[order]
        self.begun = []
        if len(order):
            complete = prefilled >= 0
            prefilled, ready = prefilled[complete], self.now + took.chunks[complete]
            # One that comes back after a retraction had its first token before.
            fresh = np.isnan(times.first[prefilled])
            times.first[prefilled[fresh]] = ready[fresh]
            times.decodes_from[prefilled[fresh]] = self.now + took.total
            self.begun = prefilled[fresh].tolist()
        if any(update.finish is not None for update in updates):
            if len(prefilled):
                times.last[prefilled] = ready
            times.last[work.row_requests] = self.now + took.rows
        self.now += took.total
        self.busy += took.total
        self.steps += took.steps

    def _in_order(self, numbers: np.ndarray) -> np.ndarray:
        """How chunks of requests `numbers` are sorted in order of admission; a cut one (-1) is the
        last of its step."""
        if len(numbers) < 2:
            return _FIRST[: len(numbers)]
        admitted = np.where(numbers >= 0, self._times.admitted[numbers], np.inf)
        return np.argsort(admitted, kind="stable")
