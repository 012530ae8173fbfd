"""How requests are spread over simulated replicas: our router, and what others do."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.messages import Below
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.routing.index import PrefixIndex
from rootlace.runtime.routing.router import Router, RouterConfig
from rootlace.runtime.simulation.engine import Machine, SimulatedEngine
from rootlace.runtime.simulation.trace import SHARED_BY, Workload


class Routing(Protocol):
    """Chooses a replica for each request of a workload as it arrives, and is told of its first
    token, its end, and what caches hold."""

    def route(self, number: int, now: float) -> int: ...

    def first_token(self, number: int, now: float) -> None: ...

    def ended(self, number: int, now: float) -> None: ...

    def heard(self, replica: int, change: Change, below: Sequence[Below] = ()) -> None: ...


class Exact:
    """Our own router."""

    empty = RouterConfig.empty

    def __init__(self, workload: Workload, machine: Machine, engines: list[SimulatedEngine]):
        size = workload.granularity
        self._workload = workload
        self._router = Router(
            RouterConfig(
                replicas=len(engines),
                block_size=engines[0].block,
                capacity=engines[0].scheduler.kv.capacity,
                cost=_by_the_unit(machine.cost, size),
                empty=self.empty,
            )
        )
        self._output = int(np.median(workload.output_units))
        """What a server may know of outputs: their lengths of late."""

    def route(self, number: int, now: float) -> int:
        prompt = self._workload.prompt(number)
        return self._router.route(number, "", prompt, self._output, now)

    def first_token(self, number: int, now: float) -> None:
        self._router.first_token(number, now)

    def ended(self, number: int, now: float) -> None:
        self._router.ended(number, now)

    def heard(self, replica: int, change: Change, below: Sequence[Below] = ()) -> None:
        self._router.heard(replica, change, below)


class ExactOnePrice(Exact):
    """The same, where holding a prefix twice has one price, however full the pool is."""

    empty = 1.0


def _by_the_unit(cost: StepCost, size: int) -> StepCost:
    """`cost` in units of `size` tokens."""
    return replace(
        cost,
        prefill=cost.prefill * size,
        context=cost.context * size,
        pair=cost.pair * size * size,
        max_step_tokens=max(cost.max_step_tokens // size, 1),
    )


class Blind:
    """Knows how many requests each replica has, and nothing of caches. Chooses by turns."""

    def __init__(self, workload: Workload, machine: Machine, engines: list[SimulatedEngine]):
        self.workload = workload
        self.dice = random.Random(0)
        self.queues = [0] * len(engines)
        self._where: dict[int, int] = {}
        self._turn = -1

    def route(self, number: int, now: float) -> int:
        replica = self.choose(number)
        self._where[number] = replica
        self.queues[replica] += 1
        return replica

    def choose(self, number: int) -> int:
        self._turn += 1
        return self._turn % len(self.queues)

    def first_token(self, number: int, now: float) -> None:
        pass

    def ended(self, number: int, now: float) -> None:
        self.queues[self._where.pop(number)] -= 1

    def heard(self, replica: int, change: Change, below: Sequence[Below] = ()) -> None:
        pass


class PowerOfTwo(Blind):
    """The one of two, drawn at random, that has fewer requests."""

    def choose(self, number: int) -> int:
        count = len(self.queues)
        drawn = self.dice.sample(range(count), min(2, count))
        return min(drawn, key=self.queues.__getitem__)


class Sessions(Blind):
    """All requests of a conversation to one replica. A conversation is told by the first part of
    the prompt that is no system prompt (that of fewer than 1 % of the requests)."""

    def __init__(self, workload: Workload, machine: Machine, engines: list[SimulatedEngine]):
        super().__init__(workload, machine, engines)
        uses = np.bincount(workload.trace.blocks)
        self._common = uses >= max(SHARED_BY * len(workload.trace), 2)

    def choose(self, number: int) -> int:
        blocks = self.workload.blocks(number)
        known = blocks[blocks < len(self._common)]
        common = np.zeros(len(blocks), bool)
        common[: len(known)] = self._common[known]
        own = blocks[~common]
        # Not `hash`: that of an integer is the integer, and others differ from run to run.
        session = int(own[0] if len(own) else blocks[-1])
        return zlib.crc32(str(session).encode()) % len(self.queues)


class RayPrefix(PowerOfTwo):
    """Ray Serve's PrefixCacheAffinityRouter (2.60), after its documentation: while the longest
    queue has at most `threshold` requests more than the shortest, the replica that was sent the
    longest prefix of this prompt (of several, that with the fewest requests); if that is less than
    a tenth of the prompt, the replica that was sent the least text; else the power of two choices.
    It forgets nothing of what was sent, which is its default."""

    threshold = float("inf")

    def __init__(self, workload: Workload, machine: Machine, engines: list[SimulatedEngine]):
        super().__init__(workload, machine, engines)
        # Twice as big as it can become: nothing of what was sent is ever missing.
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
        """Who was sent the longest prefix, and how many blocks that has."""
        found = self._sent.match(blocks)
        if not found:
            return [], 0
        count, replicas = found[-1]
        return [r for r in range(len(self.queues)) if replicas >> r & 1], count


class RayPrefixBalanced(RayPrefix):
    """The same where queues that differ by more than ten requests count as unequal."""

    threshold = 10.0


ROUTINGS: dict[str, type[Exact] | type[Blind]] = {
    "exact": Exact,
    "exact:1": ExactOnePrice,
    "ray-prefix": RayPrefix,
    "ray-prefix:10": RayPrefixBalanced,
    "power-of-two": PowerOfTwo,
    "sessions": Sessions,
    "turns": Blind,
}
