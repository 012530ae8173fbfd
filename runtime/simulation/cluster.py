"""Several simulated engines behind a router: the exact router, or a model of another project's."""

from __future__ import annotations

import copy
import heapq
import itertools
import random
import time
import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.messages import Below, EngineOutput
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.routing.router import EMPTY, Router, RouterConfig
from rootlace.runtime.simulation.engine import Machine, NamedPolicy, SimulatedEngine, Times
from rootlace.runtime.simulation.study import Figures, percentiles
from rootlace.runtime.simulation.trace import SHARED_BY, Workload


class Exact:
    """The exact router. Chooses a replica for each request as it arrives, and is told of first
    tokens, ends, and changes of caches."""

    empty = EMPTY

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
        """Expected output in units, as a server may know it: the median of recent outputs."""
        self.first_token = self._router.first_token
        self.ended = self._router.ended
        self.heard = self._router.heard

    def route(self, number: int, now: float) -> int:
        prompt = self._workload.prompt(number)
        return self._router.route(number, "", prompt, self._output, now)


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
    """Router that draws two replicas at random and takes the one with fewer requests."""

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
        new = blocks[~common]
        # Not `hash`: that of an integer is the integer, and others differ from run to run.
        session = int(new[0] if len(new) else blocks[-1])
        return zlib.crc32(str(session).encode()) % len(self.queues)


ROUTINGS: dict[str, type[Exact] | type[Blind]] = {
    "exact": Exact,
    "power-of-two": PowerOfTwo,
    "sessions": Sessions,
    "turns": Blind,
}


# Group --------------------------------------------------------------------------------------------
#
# Simulated engines behind one router, on a clock that several groups share.


UNCHANGED = Change(np.empty(0, np.uint64), np.empty(0, np.uint64))


class Clock:
    """Queue of events by time; events of equal time run in the order of their request."""

    def __init__(self, cpu: Callable[[], float] = time.thread_time) -> None:
        """`cpu`: what the work of routers is measured with."""
        self.cpu = cpu
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), what))

    def run(self, until: float) -> None:
        """Run all events up to time `until`."""
        while self._due and self._due[0][0] <= until:
            heapq.heappop(self._due)[2]()


class Group:
    """Several engines and their router; the router sees the effects of a step at its end."""

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
        self._router = ROUTINGS[router](workload, known, self.engines)
        self._clock = clock
        self._begun = begun
        self.routing_seconds = 0.0
        self._updates: dict[int, list[EngineOutput]] = {}
        """Updates of the running steps by replica: told to the router at the steps' ends."""
        if router.startswith("exact"):
            for engine in self.engines:
                engine.scheduler.cache.keep_journal()

    def route(self, number: int, now: float) -> int:
        """Return the router's choice of a replica; the caller submits the request there."""
        began = self._clock.cpu()
        replica = self._router.route(number, now)
        self.routing_seconds += self._clock.cpu() - began
        return replica

    def submit(self, replica: int, number: int, now: float) -> None:
        """Submit a request that has reached a replica."""
        engine = self.engines[replica]
        if replica not in self._updates:
            engine.now = max(engine.now, now)
        engine.submit(number)
        if replica not in self._updates:
            self._step(replica)

    def _step(self, replica: int) -> None:
        engine = self.engines[replica]
        updates = engine.step()
        if updates is None:
            if engine.scheduler.has_work:
                self._wait_for_read(replica)
            return
        self._updates[replica] = updates
        for number in engine.begun:
            self._begun(replica, number)
        self._clock.at(engine.now, lambda: self._stepped(replica))

    def _stepped(self, replica: int) -> None:
        """End a step: report its effects to the router and start the next."""
        engine, updates = self.engines[replica], self._updates.pop(replica)
        cache = engine.scheduler.cache
        change, below = cache.changes(), cache.changes_below()
        ended = [update.rid for update in updates if update.finish is not None]
        # Most steps tell nothing, and reading the clock takes some microseconds.
        if change is not None or below or engine.begun or ended:
            began = self._clock.cpu()
            if change is not None or below:
                self._router.heard(replica, change or UNCHANGED, below)
            for number in engine.begun:
                self._router.first_token(number, engine.now)
            for number in ended:
                self._router.ended(number, engine.now)
            self.routing_seconds += self._clock.cpu() - began
        self._step(replica)

    def _wait_for_read(self, replica: int) -> None:
        """Wait for a read: all requests of the replica need blocks from below its pool."""
        engine = self.engines[replica]
        then = engine.next_read
        if then == float("inf"):
            raise RuntimeError("the scheduler has work and plans nothing")

        def go_on() -> None:
            if replica not in self._updates:  # no request has come meanwhile that can be computed
                engine.now = max(engine.now, then)
                self._step(replica)

        self._clock.at(then, go_on)


# Disaggregated ------------------------------------------------------------------------------------
#
# Some simulated replicas compute prompts alone, and hand their KV to replicas that decode.


class Link(msgspec.Struct, frozen=True):
    """A network that moves KV. Each replica sends and receives one prompt's KV at a time,
    `token_bytes` per token; the receiver has the KV `latency` seconds after the last byte."""

    bytes_per_second: float = 50e9
    latency: float = 1e-3
    token_bytes: int = 131072

    def seconds(self, tokens: int) -> float:
        """Without the latency."""
        return tokens * self.token_bytes / self.bytes_per_second


class Apart(msgspec.Struct, frozen=True):
    """Disaggregation: `prefill` replicas compute prompts alone, if every other replica lacks at
    least `least_tokens` tokens of the prompt."""

    prefill: int
    least_tokens: int = 512
    link: Link = Link()

    def priced(self, cost: StepCost) -> StepCost:
        """Return the cost of a step for replicas that receive prompts instead of computing them."""
        return replace(cost, prefill=self.link.seconds(1), pair=0.0)


def lacks(engine: SimulatedEngine, workload: Workload, number: int) -> int:
    """Return the units of a prompt's whole blocks that the engine lacks, without the block of its
    last unit, which is computed in any case."""
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
    # The prompt's cached prefix is locked now, and no longer available.
    count = min(count, kv.pool.available)
    if count:
        kv.tree.evict(max(count - kv.pool.free, 0))
        blocks = kv.pool.allocate(count)
        table = np.zeros(first + count, np.int32)
        table[first:] = blocks
        node = kv.tree.insert(node, prompt, len(table) * size, table)
        kv.pool.drop(blocks, pinned=True)
    kv.tree.leave(node)


# Cluster ------------------------------------------------------------------------------------------


class ClusterReport(Figures, frozen=True, kw_only=True):
    """Results of a router on a workload.

    `imbalance`: the busiest replica's busy seconds over the mean of all replicas'.
    `router_microseconds`: CPU time of a choice and of the events told to the router, per request.
    `prefill_replicas` of the replicas compute prompts alone, for `handed` requests. Those replicas
    were busy for `prefill_busy` of the time, all other replicas for `decode_busy`. `moved`: tokens
    that travelled, of all tokens of prompts.
    """

    router: str
    replicas: int
    imbalance: float
    router_microseconds: float
    prefill_replicas: int = 0
    handed: int = 0
    moved: float = 0.0
    prefill_busy: float = 0.0
    decode_busy: float = 0.0


class Cluster:
    """One run. The router sees a request when it arrives, and the effects of a step when it ends.

    With `apart`, some of the replicas compute prompts alone, before the group that decodes. The
    group's router sends a request whose prompt is computed. The blocks that its replica lacks
    travel there, after all were computed, and only whole blocks. A block may be evicted there
    meanwhile, or find no room. The replica then computes the block, and all that follow.
    """

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
        self._apart = apart
        self._free: dict[int, float] = {}
        """When each replica's link is, by its number; those that compute prompts count from -1
        downwards."""
        self._taken = np.zeros(len(workload), bool)
        """Which requests' prompts are computed apart."""
        self._moved = 0
        """Units that travelled."""
        self._prompts: Group | None = None
        """The replicas that compute prompts."""
        priced = None
        if apart is not None:
            priced = apart.priced(machine.cost)
            replicas -= apart.prefill
            prompts = copy.copy(workload)
            prompts.outputs = np.ones_like(workload.outputs)
            self._prompts = Group(
                prompts, policy, machine, apart.prefill, router, self._clock, begun=self._computed
            )
        self._group = Group(workload, policy, machine, replicas, router, self._clock, priced=priced)

    def run(self, progress: Callable[[int], None] = lambda arrived: None) -> ClusterReport:
        """Play everything; `progress` is told now and then how many requests have arrived."""
        arrivals = self._workload.arrivals
        for number, at in enumerate(arrivals.tolist()):
            self._clock.run(at)
            if not self._group.engines[0].fits[number]:
                self._refused += 1
            elif not self._prompt_apart(number, at):
                self._group.submit(self._group.route(number, at), number, at)
            if number % 1000 == 0:
                progress(number)
        self._clock.run(float("inf"))
        progress(len(arrivals))
        return self._report()

    def late(self, arrived: int, limit: float) -> int:
        """Count the first `arrived` requests without a first token within `limit` seconds of their
        arrival."""
        if not arrived:
            return 0
        came = self._workload.arrivals[:arrived]
        waited = np.fmin(self._group.times.first[:arrived], came[-1]) - came
        return int(np.count_nonzero((waited > limit) & self._group.engines[0].fits[:arrived]))

    def _prompt_apart(self, number: int, now: float) -> bool:
        """Compute a new request's prompt apart if it is long enough; return whether it is."""
        if self._apart is None or self._prompts is None:
            return False
        least = min(lacks(engine, self._workload, number) for engine in self._group.engines)
        if least * self._workload.granularity < self._apart.least_tokens:
            return False
        self._taken[number] = True
        self._prompts.submit(self._prompts.route(number, now), number, now)
        return True

    def _computed(self, source: int, number: int) -> None:
        """Note the start of the step that computes the end of a prompt."""
        assert self._prompts is not None
        ready = float(self._prompts.times.first[number])
        self._clock.at(ready, lambda: self._send(source, number, ready))

    def _send(self, source: int, number: int, now: float) -> None:
        assert self._apart is not None
        target, link = self._group.route(number, now), self._apart.link
        engine = self._group.engines[target]
        units = lacks(engine, self._workload, number)
        begin = max(now, self._free.get(-1 - source, 0.0), self._free.get(target, 0.0))
        end = begin + link.seconds(units * self._workload.granularity)
        self._free[-1 - source] = self._free[target] = end
        self._moved += units
        there = end + link.latency

        def arrive() -> None:
            receive(engine, self._workload, number, units)
            self._group.submit(target, number, there)

        self._clock.at(there, arrive)

    def _report(self) -> ClusterReport:
        times, workload = self._group.times, self._workload
        groups = [self._group]
        cached = times.cached.copy()
        if self._prompts is not None:
            groups.append(self._prompts)
            # Tokens computed by the prompt replica were not found.
            computed = workload.prompt_units - self._prompts.times.cached
            cached[self._taken] -= computed[self._taken]
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
            hit_rate=int(cached[served].sum()) / prompts,
            ttft=percentiles((times.first - workload.arrivals)[served]),
            tpot=percentiles(decoding / (outputs[several] - 1)),
            requests_per_second=len(served) / seconds,
            busy=float(busy.mean()) / seconds,
            imbalance=float(busy.max() / max(busy.mean(), 1e-9)),
            router_microseconds=1e6
            * sum(group.routing_seconds for group in groups)
            / max(len(served), 1),
            prefill_replicas=len(engines) - decoders,
            handed=int(self._taken.sum()),
            moved=self._moved / prompts,
            prefill_busy=float(busy[decoders:].sum()) / max(len(engines) - decoders, 1) / seconds,
            decode_busy=float(busy[:decoders].mean()) / seconds,
            read_back=sum(engine.restored_units for engine in engines) / prompts,
        )
