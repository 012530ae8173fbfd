"""The scheduler over a pool with stores below it: what comes back is what was computed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.scheduler.test_machine import Machine
from tests.scheduler.world import World
from tests.simulated_store import SimulatedStore

EXAMPLES = 12


def prompt(first: int, length: int = 33) -> list[int]:
    return [first] * length


def fill(world: World, *firsts: int) -> None:
    for first in firsts:
        world.expect_cold(world.run(prompt(first)))


def test_what_was_evicted_comes_back() -> None:
    store = SimulatedStore(64, room=64)
    world = World(num_blocks=12, stores=(store,))
    fill(world, 1, 2, 3)
    assert world.match(prompt(1)) == 0 and len(store.tier) >= 8
    job = world.run(prompt(1))
    world.expect_cold(job)
    assert job.cached == 32 and world.stats["restored_tokens"] == 32
    assert world.stats["computed_tokens"] == 3 * 33 + 1


def test_the_next_start_is_warm() -> None:
    store = SimulatedStore(64, room=64)
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


class TieredMachine(Machine):
    """All that `Machine` does, over stores that write and read when they like, find blocks damaged
    and are switched off. The executor looks at every slot that a row attends to, and outputs are
    compared with those of cold requests."""

    def below(self) -> dict[str, object]:
        choose = self.telling.choice
        count = choose([1, 1, 2])
        self.stores = tuple(
            SimulatedStore(choose([1, 3, 9, 50]), choose([1, 4, 50]), f"store{at}", slow=True)
            for at in range(count)
        )
        return {"stores": self.stores, "hourly_bytes": choose([None, None, 20])}

    @rule(data=st.data(), count=st.integers(1, 9))
    def go_on(self, data, count) -> None:
        data.draw(st.sampled_from(self.stores)).go_on(count)

    @rule(data=st.data())
    def damage(self, data) -> None:
        store = data.draw(st.sampled_from(self.stores))
        if store.published:
            store.damaged.add(data.draw(st.sampled_from(sorted(store.published))))

    @rule(data=st.data())
    def switch_off(self, data) -> None:
        if data.draw(st.integers(0, 9)) == 0:
            data.draw(st.sampled_from(self.stores)).working = False

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.slow = False
            store.go_on(1000)
        super().teardown()


@pytest.mark.parametrize("overlap", [False, True])
def test_machine(overlap: bool) -> None:
    machine = type("Tiered" + "Overlapped" * overlap, (TieredMachine,), {"overlap": overlap})
    case = machine.TestCase
    case.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
