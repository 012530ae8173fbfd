"""Overload on a simulated clock: the real scheduler, and steps whose time follows a formula."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from benchmarks.overload.goodput import Fate, Goodput, arrivals, goodput_of
from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.contracts.plan import StepCost, StepPlan, StepResult
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import Overloaded
from rootlace.wire.protocol import SamplingParams
from rootlace.wire.sampling import Handling

COST = StepCost(step=0.004, prefill=0.0001, decode=0.0003)
"""About the embedded model on two cores."""
STOP, OTHER = 1, 2


@dataclass(frozen=True)
class Load:
    """Prompts and outputs have these mean lengths; outputs, of unknown length, are geometrically
    distributed if `uneven`. Requests have a `timeout` in seconds and come from so many clients."""

    prompt: int = 300
    output: int = 48
    uneven: bool = True
    timeout: float = 10.0
    clients: int = 8


class Simulation:
    """A run of one rate."""

    def __init__(self, load: Load, rate: float, seconds: float, seed: int = 0) -> None:
        self._load = load
        self._seconds = seconds
        self._arrivals = arrivals(rate, seconds, seed)
        dice = self._dice = np.random.default_rng(seed + 1)
        count = len(self._arrivals)
        long = np.full(count, load.output)
        self._outputs = np.minimum(dice.geometric(1 / load.output, count), 512)
        self._outputs = self._outputs if load.uneven else long
        self._now = 0.0
        self._fates: dict[int, Fate] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._scheduler = Scheduler(
            SchedulerConfig(), CacheConfig(num_blocks=16384), 8192, self._clock
        )

    def run(self) -> Goodput:
        scheduler, arrived = self._scheduler, 0
        while arrived < len(self._arrivals) or scheduler.has_work:
            while arrived < len(self._arrivals) and self._arrivals[arrived] <= self._now:
                self._submit(arrived)
                arrived += 1
            self._give_up()
            plan = scheduler.plan()
            self._take(scheduler.take_updates())
            if plan is not None:
                self._take(scheduler.commit(plan, self._computed(plan)))
            elif arrived < len(self._arrivals):
                self._now = max(self._now, float(self._arrivals[arrived]))
        return goodput_of(list(self._fates.values()), self._seconds)

    def _clock(self) -> float:
        return self._now

    def _submit(self, number: int) -> None:
        load = self._load
        prompt = self._dice.integers(3, 30000, load.prompt, np.int32)
        request = EngineRequest(
            number,
            prompt,
            SamplingParams(max_tokens=512, seed=number, stop_token_ids=(STOP,)),
            np.empty(0, np.int32),
            client=str(number % load.clients),
            handling=Handling(timeout=load.timeout),
        )
        try:
            self._scheduler.add(request)
        except Overloaded:
            self._end(number, "refused")
        else:
            heapq.heappush(self._deadlines, (self._arrivals[number] + load.timeout, number))

    def _give_up(self) -> None:
        """End requests after their deadlines, as the gateway does."""
        while self._deadlines and self._deadlines[0][0] <= self._now:
            _, number = heapq.heappop(self._deadlines)
            if number not in self._fates:
                self._scheduler.abort(number)
                self._end(number, "late")

    def _computed(self, plan: StepPlan) -> StepResult:
        rows = sum(len(sample.token_ids) > sample.prompt_len for sample in plan.samples)
        prompts = plan.num_tokens - rows
        self._now += COST.step + COST.prefill * prompts + COST.decode * rows
        made = np.array([len(one.token_ids) - one.prompt_len + 1 for one in plan.samples], int)
        whole = self._outputs[np.array([one.params.seed for one in plan.samples], int)]
        tokens = np.where(made >= whole, STOP, OTHER)
        return StepResult(tokens.astype(np.int32), [None] * len(tokens), [])

    def _take(self, updates: list[EngineOutput]) -> None:
        for update in updates:
            if update.finish is not None and update.rid not in self._fates:
                known = {"stop": "in time", "length": "in time"}.get(update.finish, "failed")
                refused = update.code in ("overloaded", "deadline_impossible")
                self._end(update.rid, "refused" if refused else known)

    def _end(self, number: int, kind: str) -> None:
        self._fates[number] = Fate(kind, self._now - float(self._arrivals[number]))


def capacity(load: Load) -> float:
    """Return the requests per second at the most rows, which no schedule exceeds by much."""
    row = COST.decode + COST.step / 256
    return 1 / (COST.prefill * load.prompt + row * load.output)
