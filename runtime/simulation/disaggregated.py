"""Some of the simulated replicas compute prompts alone, and hand their KV to those that decode."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np

from rootlace.runtime.contracts.step_cost import StepCost
from rootlace.runtime.simulation.engine import Machine, SimulatedEngine
from rootlace.runtime.simulation.group import Clock, Group
from rootlace.runtime.simulation.policies import NamedPolicy
from rootlace.runtime.simulation.workload import Workload


@dataclass(frozen=True)
class Link:
    """What KV travels over. Each replica sends and receives one prompt's at a time, of
    `token_bytes` for each token; who receives it has it `latency` seconds after the last byte."""

    bytes_per_second: float = 50e9
    latency: float = 1e-3
    token_bytes: int = 131072

    def seconds(self, tokens: int) -> float:
        """Without the latency."""
        return tokens * self.token_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Apart:
    """So many replicas compute `prefill` alone: prompts of which every one of the others lacks at
    least `least_tokens`."""

    prefill: int
    least_tokens: int = 512
    link: Link = Link()

    def priced(self, cost: StepCost) -> StepCost:
        """What prompts cost who receives them."""
        return replace(cost, prefill=self.link.seconds(1), pair=0.0)


class Prefilling:
    """The replicas that compute prompts, before a group that decodes.

    A request whose prompt is computed is sent by that group's router, and what its replica lacks of
    the prompt travels there: whole blocks, after all of them were computed. A block that is evicted
    there meanwhile, or that there is no room for, is computed by the replica itself, with all that
    follows it.
    """

    def __init__(
        self,
        apart: Apart,
        workload: Workload,
        policy: NamedPolicy,
        machine: Machine,
        router: str,
        clock: Clock,
        decoding: Group,
    ) -> None:
        self._apart = apart
        self._clock = clock
        self._workload = workload
        self._decoding = decoding
        self._free: dict[int, float] = {}
        """When each replica's link is, by its number; those that compute prompts count from -1
        downwards."""
        self.taken = np.zeros(len(workload), bool)
        """Which requests' prompts are computed here."""
        self.moved = 0
        """Units that travelled."""
        prompts = copy.copy(workload)
        prompts.outputs = np.ones_like(workload.outputs)
        self.group = Group(
            prompts, policy, machine, apart.prefill, router, clock, begun=self._computed
        )

    def take(self, number: int, now: float) -> bool:
        """Compute the prompt of a request that has come, if it is long enough."""
        least = min(lacks(engine, self._workload, number) for engine in self._decoding.engines)
        if least * self._workload.granularity < self._apart.least_tokens:
            return False
        self.taken[number] = True
        self.group.submit(self.group.route(number, now), number, now)
        return True

    def _computed(self, source: int, number: int) -> None:
        """The step that begins now computes the last of a prompt."""
        ready = float(self.group.times.first[number])
        self._clock.at(ready, lambda: self._send(source, number, ready))

    def _send(self, source: int, number: int, now: float) -> None:
        target = self._decoding.route(number, now)
        units = lacks(self._decoding.engines[target], self._workload, number)
        begin = max(now, self._free.get(-1 - source, 0.0), self._free.get(target, 0.0))
        end = begin + self._apart.link.seconds(units * self._workload.granularity)
        self._free[-1 - source] = self._free[target] = end
        self.moved += units
        there = end + self._apart.link.latency
        self._clock.at(there, lambda: self._arrive(target, number, units, there))

    def _arrive(self, target: int, number: int, units: int, now: float) -> None:
        receive(self._decoding.engines[target], self._workload, number, units)
        self._decoding.submit(target, number, now)


def lacks(engine: SimulatedEngine, workload: Workload, number: int) -> int:
    """Units of the whole blocks of a prompt that are not cached there, but for that of its last
    unit, which is computed in any case."""
    prompt, size = workload.prompt(number), engine.block
    whole = (len(prompt) - 1) // size * size
    matched = engine.scheduler.kv.tree.descend("", prompt, whole)[1]
    return whole - matched // size * size


def receive(engine: SimulatedEngine, workload: Workload, number: int, units: int) -> None:
    """The last `units` of a prompt's whole blocks come into the cache, as far as there is room; if
    they do not continue what is there, they are dropped."""
    kv, prompt, size = engine.scheduler.kv, workload.prompt(number), engine.block
    whole = (len(prompt) - 1) // size
    missing = lacks(engine, workload, number) // size
    count = min(missing, kv.pool.available)
    if not count or missing * size > units:
        return
    first = whole - missing
    node = kv.tree.advance(kv.tree.enter(""), prompt, (first + count) * size)
    # What the prompt begins with is held now, and counts no longer as room.
    count = min(count, kv.pool.available)
    if count:
        kv.tree.evict(max(count - kv.pool.free, 0))
        blocks = kv.pool.allocate(count)
        table = np.zeros(first + count, np.int32)
        table[first:] = blocks
        node = kv.tree.insert(node, prompt, len(table) * size, table)
        kv.pool.drop(blocks, pinned=True)
    kv.tree.leave(node)
