"""Requests with adapters: whose KV they share, and what a plan says of them."""

import pytest

from rootlace.wire.errors import InvalidRequest
from tests.scheduler.world import World

PROMPT = list(range(3, 25))


def test_a_prefix_is_shared_with_requests_of_the_same_adapter_and_no_others() -> None:
    world = World()
    who = [
        {"adapter": adapter, "namespace": namespace}
        for adapter in ("", "one", "two")
        for namespace in ("", "one", "two\0one")
    ]
    for one in who:
        assert world.run(PROMPT, 2, **one).cached == 0
    for one in who:
        assert world.run(PROMPT, 2, **one).cached == len(PROMPT) - 1


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs"])
def test_requests_that_wait_together_keep_apart(policy) -> None:
    world = World(policy=policy, max_step_tokens=16, overlap=True)
    rids = {
        world.submit([*PROMPT, 30 + at], 3, adapter=adapter): adapter
        for at in range(3)
        for adapter in ("", "one", "two")
    }
    world.drain()
    assert world.stats["computed_tokens"] >= 3 * len(PROMPT)
    world.expect_cold(*(world.jobs[rid] for rid in rids))


def test_a_plan_names_the_adapter_of_each_row() -> None:
    world = World()
    for at, adapter in enumerate(("", "two", "one")):
        world.submit([40 + at, 3, 4], 4, adapter=adapter)
    wanted = {40: -1, 41: 1, 42: 0}
    for _ in range(3):
        plan = world.step()
        assert plan is not None
        firsts = [int(sample.token_ids[0]) for sample in plan.samples]
        assert plan.adapters.tolist() == [wanted[first] for first in firsts]
    world.drain()
    world.submit([5, 6], 2)
    plan = world.step()
    assert plan is not None and not len(plan.adapters)


def test_an_adapter_that_is_not_loaded() -> None:
    world = World()
    with pytest.raises(InvalidRequest, match="'three' is not loaded: there are one, two"):
        world.submit(PROMPT, 2, adapter="three")
    assert not world.jobs
