"""Several simulated engines and a router before them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rootlace.runtime.simulation.disaggregated import Apart, Prefilling
from rootlace.runtime.simulation.engine import Machine
from rootlace.runtime.simulation.group import Clock, Group
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.report import PERCENTILES, percentiles
from rootlace.runtime.simulation.workload import Workload


@dataclass(frozen=True)
class ClusterReport:
    """What a router made of a workload. Times in seconds; percentiles are (p50, p90, p99).

    `imbalance`: how many times the mean of all replicas' busy seconds the busiest one has.
    `router_microseconds`: CPU time of a choice and of what the router was told, per request.
    `prefill_replicas` of the replicas compute prompts alone, those of `handed` requests; they were
    busy for `prefill_busy` of the time, the others for `decode_busy`. `moved`: tokens that
    travelled, of all tokens of prompts; `read_back`: those that were read from below the pools.
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
    prefill_replicas: int = 0
    handed: int = 0
    moved: float = 0.0
    prefill_busy: float = 0.0
    decode_busy: float = 0.0
    read_back: float = 0.0

    def to_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("ttft", "tpot"):
            row[name] = {f"p{p}": value for p, value in zip(PERCENTILES, row[name], strict=True)}
        return row


class Cluster:
    """One run. The router sees a request when it arrives, and what a step did when it ends. With
    `apart`, some of the replicas compute prompts alone."""

    def __init__(
        self,
        workload: Workload,
        policy: NamedPolicy,
        machine: Machine,
        replicas: int,
        router: str,
        apart: Apart | None = None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`cpu`: what the router's own work is measured with."""
        self._workload = workload
        self._clock = Clock(cpu)
        self._name = router
        self._cache_tokens = machine.cache_tokens
        self._refused = 0
        self._prefilling: Prefilling | None = None
        if apart is None:
            self._group = Group(workload, policy, machine, replicas, router, self._clock)
            return
        self._group = Group(
            workload,
            policy,
            machine,
            replicas - apart.prefill,
            router,
            self._clock,
            priced=apart.priced(machine.cost),
        )
        self._prefilling = Prefilling(
            apart, workload, policy, machine, router, self._clock, self._group
        )

    def run(self, progress: Callable[[int], None] = lambda arrived: None) -> ClusterReport:
        """Play everything; `progress` is told now and then how many requests have arrived."""
        arrivals = self._workload.arrivals
        for number, at in enumerate(arrivals.tolist()):
            self._clock.run(at)
            self._arrive(number, at)
            if number % 1000 == 0:
                progress(number)
        self._clock.run(float("inf"))
        progress(len(arrivals))
        return self._report()

    def late(self, arrived: int, limit: float) -> int:
        """How many of the first `arrived` requests have not had their first token `limit` seconds
        after they came, or had it later."""
        if not arrived:
            return 0
        came = self._workload.arrivals[:arrived]
        waited = np.fmin(self._group.times.first[:arrived], came[-1]) - came
        return int(np.count_nonzero((waited > limit) & self._group.engines[0].fits[:arrived]))

    def _arrive(self, number: int, now: float) -> None:
        if not self._group.engines[0].fits[number]:
            self._refused += 1
        elif self._prefilling is None or not self._prefilling.take(number, now):
            self._group.submit(self._group.route(number, now), number, now)

    def _report(self) -> ClusterReport:
        times, workload = self._group.times, self._workload
        groups = [self._group]
        found = times.cached.copy()
        handed = moved = 0
        if self._prefilling is not None:
            groups.append(self._prefilling.group)
            taken = self._prefilling.taken
            # What was computed in the other place was not found.
            computed = workload.prompt_units - self._prefilling.group.times.cached
            found[taken] -= computed[taken]
            handed, moved = int(taken.sum()), self._prefilling.moved
        served = np.flatnonzero(times.cached >= 0)
        outputs = workload.outputs[served]
        several = outputs > 1
        decoding = np.maximum(times.last - times.decodes_from, 0.0)[served][several]
        engines = [engine for group in groups for engine in group.engines]
        busy = np.array([engine.busy for engine in engines])
        seconds = max(max(engine.now for engine in engines), 1e-9)
        prompts = max(int(workload.prompt_units[served].sum()), 1)
        decoders = len(self._group.engines)
        return ClusterReport(
            router=self._name,
            replicas=len(engines),
            cache_tokens=self._cache_tokens,
            requests=len(workload),
            refused=self._refused,
            hit_rate=int(found[served].sum()) / prompts,
            ttft=percentiles((times.first - workload.arrivals)[served]),
            tpot=percentiles(decoding / (outputs[several] - 1)),
            requests_per_second=len(served) / seconds,
            busy=float(busy.mean()) / seconds,
            imbalance=float(busy.max() / max(busy.mean(), 1e-9)),
            router_microseconds=1e6
            * sum(group.routing_seconds for group in groups)
            / max(len(served), 1),
            prefill_replicas=len(engines) - decoders,
            handed=handed,
            moved=moved / prompts,
            prefill_busy=float(busy[decoders:].sum()) / max(len(engines) - decoders, 1) / seconds,
            decode_busy=float(busy[:decoders].mean()) / seconds,
            read_back=sum(engine.restored_units for engine in engines) / prompts,
        )
