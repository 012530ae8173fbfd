"""Scheduler over a pool with stores below it: restored blocks are the computed ones."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import ClassVar, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootlace.runtime.config import Eviction, Policy
from rootlace.wire.errors import ContextLengthExceeded, InternalError
from rootlace.wire.sampling import Cache, Handling
from tests.scheduler.world import World
from tests.simulated_store import SimulatedStore

EXAMPLES = 12


def prompt(first: int, length: int = 33) -> list[int]:
    return [first] * length


def fill(world: World, *firsts: int) -> None:
    for first in firsts:
        world.expect_cold(world.run(prompt(first)))


def test_what_was_evicted_comes_back() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=12, stores=(store,))
    fill(world, 1, 2, 3)
    assert world.match(prompt(1)) == 0 and len(store.tier) >= 8
    job = world.run(prompt(1))
    world.expect_cold(job)
    assert job.cached == 32 and world.stats["restored_tokens"] == 32
    assert world.stats["computed_tokens"] == 3 * 33 + 1


def test_who_waits_for_what_is_read_for_one_that_is_gone_is_waited_for() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=12, stores=(store,))
    fill(world, 1, 2, 3)
    store.slow = True
    world.abort(world.submit(prompt(1), 1))
    rid = world.submit(prompt(1), 1)
    assert world.scheduler.plan() is None and world.scheduler.kv.tiering.fetching.waiting
    world.drain()
    world.expect_cold(world.jobs[rid])
    assert not world.scheduler.kv.tiering.fetching.waiting


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize(
    "other", [{}, {"client": "another"}, {"handling": Handling(priority=-1)}], ids=str
)
def test_others_are_admitted_while_the_first_ones_blocks_are_read(policy, other) -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=40, stores=(store,), policy=policy)
    fill(world, 5, 1, 2, 3, 4)
    store.slow = True
    rids = [world.submit(prompt(5), 1, client="one"), world.submit(prompt(9), 1, **other)]
    while world.jobs[rids[1]].finish is None:
        assert world.step() is not None
    assert world.jobs[rids[0]].finish is None and world.scheduler.kv.tiering.fetching.waiting
    world.drain()
    world.expect_cold(*(world.jobs[rid] for rid in rids))
    assert world.jobs[rids[0]].cached == 32
    world.expect_empty()


def test_the_room_of_those_whose_blocks_are_read_is_left_to_them() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=16, stores=(store,))
    fill(world, 1, 2, 3)
    store.slow = True
    rids = [world.submit(prompt(first), 1) for first in (1, 9)]
    assert world.scheduler.plan() is None
    world.drain()
    assert world.jobs[rids[0]].cached == 32
    world.expect_cold(*(world.jobs[rid] for rid in rids))


def test_no_more_overtake_one_whose_blocks_are_read_than_may_overtake_any() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=100, stores=(store,), max_overtaken=3, max_delay=0.0)
    fill(world, *range(12))
    store.slow = True
    first = world.submit(prompt(0), 1)
    others = [world.submit(prompt(20 + at, 5), 1) for at in range(6)]
    while world.step() is not None:
        pass
    assert sum(world.jobs[rid].finish is not None for rid in others) == 3
    assert world.jobs[first].finish is None
    world.drain()
    assert world.jobs[first].cached == 32


def test_the_next_start_is_warm() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=12, stores=(store,))
    fill(world, 1, 2, 3)
    for _ in range(3):
        for moves in world.scheduler.kv.tiering.spill():
            world.executor.move(moves)
    world.scheduler.kv.tiering.poll()
    again = World(num_blocks=12, stores=(store.next_start(),))
    for first in (1, 2, 3):
        job = again.run(prompt(first))
        again.expect_cold(job)
        assert job.cached == 32


def killed(world: World, store: SimulatedStore) -> World:
    """The world of the next engine, without a word of the one before."""
    for _ in range(4):
        world.step()
    return World(num_blocks=64, stores=(store.next_start(),))


def test_what_is_shared_outlives_a_kill() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=64, stores=(store,))
    world.run(prompt(1))
    assert not store.saved, "nobody shares it, and nothing was evicted"
    world.submit([*prompt(1, 32), 2, 3, 4, 5, 6], 9)
    again = killed(world, store)
    assert len(store.published) == 8
    store = again.executor.stores[0]
    store.slow = True
    rid = again.submit([*prompt(1, 32), 2, 3, 4, 5, 6], 9, suspected=38)
    assert again.scheduler.plan() is None and again.scheduler.kv.tiering.waiting
    again.drain()
    again.expect_cold(again.jobs[rid])
    assert again.jobs[rid].cached == 32 and again.stats["restored_tokens"] == 32


def test_what_is_shared_is_not_written_twice_nor_beyond_the_hour() -> None:
    for hourly, expected in ((None, 8), (5, 5)):
        store = SimulatedStore(64, writable_slots=64)
        world = World(num_blocks=64, stores=(store,), hourly_bytes=hourly)
        for last in range(2, 6):
            world.run([*prompt(1, 32), last], 4)
            world.step()
        assert len(store.saved) == expected


def test_what_is_shared_stays_in_memory_where_that_ends_with_the_process() -> None:
    store = SimulatedStore(64, writable_slots=64, name="host")
    world = World(num_blocks=64, stores=(store,))
    for _ in range(3):
        world.run(prompt(1))
    assert not store.saved


def test_a_restart_begins_as_warm_as_it_ended() -> None:
    """The hit rate of the first requests is within 5 % of that of the last ones before."""
    dice = random.Random(4)

    def hit_rate(world: World) -> float:
        """Return the hit rate of sixty prompts, some more popular than others. The pool holds four
        prompts."""
        jobs = [
            world.run(
                [*prompt(min(int(dice.expovariate(0.2)), 30), 32), dice.randrange(50, 100)], 1
            )
            for _ in range(60)
        ]
        return sum(job.cached or 0 for job in jobs) / sum(len(job.prompt) for job in jobs)

    store = SimulatedStore(400, writable_slots=400)
    world = World(num_blocks=40, stores=(store,))
    cold, before = hit_rate(world), hit_rate(world)
    for moves in world.scheduler.kv.tiering.spill():
        world.executor.move(moves)
    world.scheduler.kv.tiering.poll()
    again = hit_rate(World(num_blocks=40, stores=(store.next_start(),)))
    assert cold < 0.9 * before
    assert again == pytest.approx(before, rel=0.05)


def test_what_has_a_time_to_live_is_not_saved() -> None:
    store = SimulatedStore(64, writable_slots=64)
    world = World(num_blocks=12, stores=(store,))
    mortal = Handling(cache=Cache(ttl=5.0))
    for _ in range(2):
        world.run(prompt(1), handling=mortal)
    fill(world, 2, 3, 4)
    assert world.match(prompt(1)) == 0
    found = [world.scheduler.kv.tiering.fetching.reach(*of(first)) for first in (1, 2)]
    assert found == [0, 32]
    world.executor._host += 10.0
    world.scheduler.kv.retention.expire()
    assert not world.scheduler.kv.tiering.saving.mortal
    fill(world, 1, 2, 3, 4)  # this time it has none
    assert world.scheduler.kv.tiering.fetching.reach(*of(1)) == 32


def of(first: int) -> tuple[str, np.ndarray, int, int]:
    return "", np.array(prompt(first), np.int32), 0, 32


BASES = [[(base + at * at) % 3 for at in range(30)] for base in range(3)]


class TieredMachine(RuleBasedStateMachine):
    """A pool that is too small over stores that write and read when they like, find blocks damaged
    and are switched off; steps fail. The executor looks at every slot that a row attends to, every
    invariant is checked after every step, and outputs are compared with those of cold requests."""

    overlap = False
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        slots=st.lists(st.sampled_from([2, 9, 50]), min_size=1, max_size=2),
        writable_slots=st.sampled_from([1, 4, 50]),
        hourly=st.sampled_from([None, None, 20]),
        blocks=st.sampled_from([9, 12, 20]),
        eviction=st.sampled_from(get_args(Eviction)),
        step_tokens=st.sampled_from([7, 64]),
        eager=st.booleans(),
    )
    def start(self, slots, writable_slots, hourly, blocks, eviction, step_tokens, eager) -> None:
        self.stores = tuple(
            SimulatedStore(count, writable_slots, f"store{at}", slow=True)
            for at, count in enumerate(slots)
        )
        self.world = World(
            num_blocks=blocks,
            vocab_size=3,
            eviction=eviction,
            overlap=self.overlap,
            max_step_tokens=step_tokens,
            stores=self.stores,
            hourly_bytes=hourly,
            eager=eager,
        )
        self.checked: set[int] = set()

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(5, 30),
        more=st.lists(st.integers(0, 2), max_size=3),
        namespace=st.sampled_from(["", "", "", "tenant"]),
        tokens=st.integers(0, 5),
        cache=st.sampled_from([Cache(), Cache(), Cache(pin="try"), Cache(ttl=0.02)]),
        steps=st.sampled_from([0, 1, 3, 20, 20]),
    )
    def ask(self, base, length, more, namespace, tokens, cache, steps) -> None:
        prompt = base[:length] + more
        with suppress(ContextLengthExceeded):  # much is pinned
            self.world.submit(prompt, tokens, namespace=namespace, handling=Handling(cache=cache))
        self.step(steps)

    @rule(base=st.sampled_from(BASES), length=st.integers(20, 30))
    def ask_for_much(self, base, length) -> None:
        self.ask(base, length, [], "", 1, Cache(), 20)

    @rule(count=st.integers(1, 12))
    def step(self, count) -> None:
        for _ in range(count):
            self.world.step()

    @rule(data=st.data(), count=st.integers(1, 9))
    def go_on(self, data, count) -> None:
        data.draw(st.sampled_from(self.stores)).go_on(count)

    @precondition(lambda self: self.world.open_rids())
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.world.abort(data.draw(st.sampled_from(self.world.open_rids())))

    @rule(what=st.integers(0, 9), data=st.data())
    def mishap(self, what, data) -> None:
        store = data.draw(st.sampled_from(self.stores))
        if what == 0:
            self.world.fail(InternalError("injected"))
        elif what == 1:
            self.world.scheduler.cache.flush()
        elif what == 2:
            self.world.scheduler.cache.forget_namespace("tenant")
        elif what == 3 and data.draw(st.booleans()):
            store.working = False
        elif what > 5 and store.published:
            store.damaged.add(data.draw(st.sampled_from(sorted(store.published))))

    @invariant()
    def outputs_are_those_of_cold_requests(self) -> None:
        for rid, job in self.world.jobs.items() if hasattr(self, "world") else ():
            if rid not in self.checked and job.finish is not None:
                self.checked.add(rid)
                if job.finish in ("stop", "length"):
                    self.world.expect_cold(job)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.drain()
        self.outputs_are_those_of_cold_requests()
        for store in self.stores:
            store.go_on(1000)
        fetching = self.world.scheduler.kv.tiering.fetching
        self.seen["restored"] += fetching.restored_tokens
        self.seen["passed"] += len(self.stores) > 1 and len(self.stores[1].saved)
        self.world.expect_empty()
        self.world.scheduler.kv.tiering.poll()
        self.world.scheduler.kv.tiering.poll()
        self.world.scheduler.check()
        assert not any(len(store.tier) or store._fetched for store in self.stores)
        self.world.scheduler.kv.retention.end()
        assert not self.world.scheduler.kv.tiering.saving.mortal


@pytest.mark.parametrize("overlap", [False, True])
def test_machine(overlap: bool) -> None:
    machine = type("Tiered" + "Overlapped" * overlap, (TieredMachine,), {"overlap": overlap})
    machine.seen = Counter()
    case = machine.TestCase
    case.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
    assert machine.seen["restored"] > 0 and machine.seen["passed"] > 0
