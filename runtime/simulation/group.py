"""Simulated engines behind one router, on a clock that several groups share."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.step_cost import StepCost
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.simulation.engine import Machine, SimulatedEngine, Times
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.routers import ROUTINGS, Routing
from rootlace.runtime.simulation.workload import Workload

UNCHANGED = Change(np.empty(0, np.uint64), np.empty(0, np.uint64))


class Clock:
    """What happens at which time; of what happens at the same one, what was asked for first."""

    def __init__(self, cpu: Callable[[], float] = time.thread_time) -> None:
        """`cpu`: what the work of routers is measured with."""
        self.cpu = cpu
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), what))

    def run(self, until: float) -> None:
        """All that happens until then."""
        while self._due and self._due[0][0] <= until:
            heapq.heappop(self._due)[2]()


class Group:
    """So many engines and their router, which sees what a step did when it ends."""

    def __init__(
        self,
        workload: Workload,
        policy: NamedPolicy,
        machine: Machine,
        replicas: int,
        router: str,
        clock: Clock,
        *,
        priced: StepCost | None = None,
        begun: Callable[[int, int], None] = lambda replica, number: None,
    ) -> None:
        """`priced`: what the router takes steps to cost, if not what they do. `begun` is told, as a
        step begins, by which replica and whose first token will come of it."""
        self.times = Times(len(workload))
        self.engines = [
            SimulatedEngine(workload, policy, machine, self.times) for _ in range(replicas)
        ]
        known = replace(machine, cost=priced or machine.cost)
        self._router: Routing = ROUTINGS[router](workload, known, self.engines)
        self._clock = clock
        self._begun = begun
        self.routing_seconds = 0.0
        self._said: dict[int, list[Update]] = {}
        """What the steps do that run now, by replica: known at their end."""
        if router.startswith("exact"):
            for engine in self.engines:
                engine.scheduler.cache.keep_journal()

    def route(self, number: int, now: float) -> int:
        """Where the router sends a request, which is to be submitted there."""
        began = self._clock.cpu()
        replica = self._router.route(number, now)
        self.routing_seconds += self._clock.cpu() - began
        return replica

    def submit(self, replica: int, number: int, now: float) -> None:
        """A request has come to a replica."""
        engine = self.engines[replica]
        if replica not in self._said:
            engine.now = max(engine.now, now)
        engine.submit(number)
        if replica not in self._said:
            self._step(replica)

    def _step(self, replica: int) -> None:
        engine = self.engines[replica]
        updates = engine.step()
        if updates is None:
            if engine.scheduler.has_work:
                self._wait_for_read(replica)
            return
        self._said[replica] = updates
        for number in engine.begun:
            self._begun(replica, number)
        self._clock.at(engine.now, lambda: self._stepped(replica))

    def _stepped(self, replica: int) -> None:
        """A step has ended."""
        engine, updates = self.engines[replica], self._said.pop(replica)
        cache = engine.scheduler.cache
        change, below = cache.changes(), cache.changes_below()
        began = self._clock.cpu()
        if change is not None or below:
            self._router.heard(replica, change or UNCHANGED, below)
        for number in engine.begun:
            self._router.first_token(number, engine.now)
        for update in updates:
            if update.finish is not None:
                self._router.ended(update.rid, engine.now)
        self.routing_seconds += self._clock.cpu() - began
        self._step(replica)

    def _wait_for_read(self, replica: int) -> None:
        """All that the replica has waits for what is below its pool."""
        engine = self.engines[replica]
        then = engine.next_read
        if then == float("inf"):
            raise RuntimeError("the scheduler has work and plans nothing")

        def go_on() -> None:
            if replica not in self._said:  # no request has come meanwhile that can be computed
                engine.now = max(engine.now, then)
                self._step(replica)

        self._clock.at(then, go_on)
