"""Several simulated engines and a router before them."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rootlace.runtime.cache.journal import Journal
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.simulation.engine import Machine, SimulatedEngine, Times
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.report import PERCENTILES, percentiles
from rootlace.runtime.simulation.routers import ROUTINGS, Routing
from rootlace.runtime.simulation.workload import Workload


@dataclass(frozen=True)
class ClusterReport:
    """What a router made of a workload. Times in seconds; percentiles are (p50, p90, p99).

    `imbalance`: how many times the mean of all replicas' busy seconds the busiest one has.
    `router_microseconds`: CPU time of a choice and of what the router was told, per request.
    """

    router: str
    replicas: int
    cache_tokens: int
    requests: int
    refused: int
    hit_rate: float
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    requests_per_second: float
    busy: float
    imbalance: float
    router_microseconds: float

    def to_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("ttft", "tpot"):
            row[name] = {f"p{p}": value for p, value in zip(PERCENTILES, row[name], strict=True)}
        return row


class Cluster:
    """One run. The router sees a request when it arrives, and what a step did when it ends."""

    def __init__(
        self, workload: Workload, policy: NamedPolicy, machine: Machine, replicas: int, router: str
    ) -> None:
        self._workload = workload
        self._times = Times(len(workload))
        self._engines = [
            SimulatedEngine(workload, policy, machine, self._times) for _ in range(replicas)
        ]
        self._router: Routing = ROUTINGS[router](workload, machine, self._engines)
        self._name = router
        self._cache_tokens = machine.cache_tokens
        self._refused = 0
        self._routing_seconds = 0.0
        self._due: list[tuple[float, int]] = []
        """Engines that compute, by the time at which their step ends."""
        self._said: dict[int, list[Update]] = {}
        """What the steps do that run now, by replica: known at their end."""
        if router == "exact":
            for engine in self._engines:
                tree = engine.scheduler.kv.tree
                tree.journal = Journal(engine.block, tree.evicted.digests)

    def run(self, progress: Callable[[int], None] = lambda arrived: None) -> ClusterReport:
        """Play everything; `progress` is told now and then how many requests have arrived."""
        arrivals = self._workload.arrivals
        for number, at in enumerate(arrivals.tolist()):
            self._until(at)
            self._arrive(number, at)
            if number % 1000 == 0:
                progress(number)
        self._until(float("inf"))
        progress(len(arrivals))
        return self._report()

    def _until(self, now: float) -> None:
        """All steps that end until then."""
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            self._tell(number)
            self._step(number)

    def _arrive(self, number: int, now: float) -> None:
        if not self._engines[0].fits[number]:
            self._refused += 1
            return
        began = time.thread_time()
        replica = self._router.route(number, now)
        self._routing_seconds += time.thread_time() - began
        engine = self._engines[replica]
        engine.now = max(engine.now, now)
        engine.submit(number)
        if replica not in self._said:
            self._step(replica)

    def _step(self, replica: int) -> None:
        engine = self._engines[replica]
        updates = engine.step()
        if updates is None:
            if engine.scheduler.has_work:
                raise RuntimeError("the scheduler has work and plans nothing")
            return
        self._said[replica] = updates
        heapq.heappush(self._due, (engine.now, replica))

    def _tell(self, replica: int) -> None:
        """The router hears of the step that ends now."""
        engine, updates = self._engines[replica], self._said.pop(replica)
        journal = engine.scheduler.kv.tree.journal
        change = None if journal is None else journal.take()
        began = time.thread_time()
        if change is not None:
            self._router.heard(replica, change)
        for number in engine.begun:
            self._router.first_token(number)
        for update in updates:
            if update.finish is not None:
                self._router.ended(update.rid, engine.now)
        self._routing_seconds += time.thread_time() - began

    def _report(self) -> ClusterReport:
        times, workload = self._times, self._workload
        served = np.flatnonzero(times.cached >= 0)
        outputs = workload.outputs[served]
        several = outputs > 1
        decoding = np.maximum(times.last - times.decodes_from, 0.0)[served][several]
        busy = np.array([engine.busy for engine in self._engines])
        seconds = max(max(engine.now for engine in self._engines), 1e-9)
        return ClusterReport(
            router=self._name,
            replicas=len(self._engines),
            cache_tokens=self._cache_tokens,
            requests=len(workload),
            refused=self._refused,
            hit_rate=int(times.cached[served].sum())
            / max(int(workload.prompt_units[served].sum()), 1),
            ttft=percentiles((times.first - workload.arrivals)[served]),
            tpot=percentiles(decoding / (outputs[several] - 1)),
            requests_per_second=len(served) / seconds,
            busy=float(busy.mean()) / seconds,
            imbalance=float(busy.max() / max(busy.mean(), 1e-9)),
            router_microseconds=1e6 * self._routing_seconds / max(len(served), 1),
        )
