"""Priorities, pins and deadlines: who comes first, what is refused, and why."""

from functools import partial

import pytest

from rootlace.wire.errors import ContextLengthExceeded, InvalidRequest, PinRefused
from rootlace.wire.sampling import Cache, Handling
from tests.scheduler.matchers import Script
from tests.scheduler.world import World


def _order(world: World, rids: list[int]) -> list[int]:
    """Return the requests in the order of their first tokens."""
    seen: list[int] = []
    while world.scheduler.has_work:
        world.step()
        seen += [rid for rid in rids if rid not in seen and world.jobs[rid].updates]
    return seen


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs"])
def test_higher_priorities_come_first_within_the_seconds_they_are_worth(policy: str) -> None:
    world = World(policy=policy, max_running=1, priority_seconds=10.0)
    rids = []
    for priority, wait in ((0, 1.0), (-1, 5.0), (2, 17.0), (1, 0.0)):
        rids.append(world.submit([1, 2, 3, len(rids)], 1, handling=Handling(priority)))
        world.executor._host += wait
    # They came at 0, 1, 6 and 23, and so count as if they had come at 0, 11, -14 and 13.
    assert _order(world, rids) == [rids[2], rids[0], rids[1], rids[3]]
    assert not world.scheduler._waiting._queues


def test_an_aborted_request_leaves_its_queue() -> None:
    world = World(max_running=1)
    first = world.submit([1], 8)
    world.step()
    waiting = [world.submit([2], 1, handling=Handling(n)) for n in (3, 3, -3)]
    assert world.stats["waiting"] == 3
    for rid in (first, *waiting):
        world.abort(rid)
    assert world.stats["waiting"] == 0 and not world.scheduler.has_work


def test_of_running_requests_the_lowest_priority_is_preempted() -> None:
    world = World(num_blocks=8)
    world.scheduler._running.reserve = 0.0
    for n, priority in enumerate((0, -1, 1)):
        world.submit([n] * 4, 16, handling=Handling(priority))
        world.step()
    while not world.scheduler._running.preempted:
        world.step()
    # Without priorities it would be the youngest.
    assert [s.rid for s in world.scheduler._running.preempted] == [1]
    world.drain()


def test_a_pin_holds_its_prompt_and_no_more_than_its_share() -> None:
    world = World(num_blocks=16, context_length=40, max_pinned=0.5)
    pinned = Handling(cache=Cache(pin=True, ttl=60.0))
    world.run([1] * 18, 3, handling=pinned)
    for n in range(2, 8):
        world.run([n] * 24, 3)
    assert world.match([1] * 18) == 18 and world.stats["blocks_pinned"] == 5
    with pytest.raises(PinRefused, match="for 4 more pinned blocks: at most 8 of 16 "):
        world.submit([9] * 14, 1, handling=pinned)
    world.run([1] * 18, 3, handling=pinned)  # pinned already
    world.executor._host += 61.0
    world.run([9] * 14, 1, handling=pinned)
    assert [pin.tokens for pin in world.scheduler.kv.retention.pins.all()] == [14]
    world.expect_empty()


def test_refusals_do_not_tell_what_others_pinned_or_asked_for() -> None:
    pinned, texts = Handling(cache=Cache(pin=True)), set()
    for others, waits in ((20, 9), (28, 17)):
        world = World(num_blocks=16, context_length=1000)
        world.run([1] * others, 1, handling=pinned)
        world.submit([2] * waits, 4)
        with pytest.raises(PinRefused) as no_pin:
            world.submit([3] * 24, 1, handling=pinned)
        with pytest.raises(ContextLengthExceeded, match="beside the pinned prompts") as no_room:
            world.submit([3] * 60, 1)
        with pytest.raises(ContextLengthExceeded, match="at most 64 fit") as never:
            world.submit([3] * 65, 1)
        texts.add((str(no_pin.value), str(no_room.value), str(never.value)))
    assert len(texts) == 1


def test_a_client_has_no_more_pins_than_it_may() -> None:
    world, pinned = World(), Handling(cache=Cache(pin=True))
    for client, prompt in (("a", 1), ("a", 1), ("b", 2), ("b", 3)):
        world.run([prompt] * 8, 1, handling=pinned, client=client, max_pins=ord(client) - 96)
    with pytest.raises(PinRefused, match="may have 1 pins at a time"):
        world.submit([4] * 8, 1, handling=pinned, client="a", max_pins=1)
    tried = Handling(cache=Cache(pin="try"))
    world.run([4] * 8, 1, handling=tried, client="a", max_pins=1)
    assert len(world.scheduler.kv.retention.pins) == 3


def test_pins_leave_room_for_the_requests_that_are_there() -> None:
    world = World(num_blocks=16, context_length=1000, max_pinned=1.0)
    long = world.submit([1] * 8, 40)
    with pytest.raises(PinRefused, match="at most 16 of 16"):  # not how long that request is
        world.submit([2] * 24, 1, handling=Handling(cache=Cache(pin=True)))
    world.run([2] * 12, 1, handling=Handling(cache=Cache(pin=True)))
    # Who comes later ends where the pool does: there are 13 blocks beside the pinned ones.
    late = world.run([3] * 8, 100)
    assert len(late.output) == 13 * 4 + 1 - 8 and late.finish == "length"
    assert len(world.jobs[long].output) == 40


@pytest.mark.parametrize("prompt", [16, 18])
def test_a_pinned_prompt_is_part_of_what_its_request_may_come_to(prompt: int) -> None:
    world = World(num_blocks=16, context_length=1000, max_pinned=0.5)
    rid = world.submit([1] * prompt, 1000, handling=Handling(-1, cache=Cache(pin=True)))
    world.step()
    assert world.stats["pins"] == 1
    world.submit([2] * 8, 1000, handling=Handling(1))
    while not world.scheduler._running.preempted:
        world.step()
    world.drain()
    run = world.jobs[rid]
    # Of a prompt that ends within a block, the pin and the request have that block each.
    assert len(run.output) == 16 * 4 + 1 - prompt - (4 if prompt % 4 else 0)
    assert run.finish == "length" and world.stats["pins"] == 1


def test_a_pin_that_became_impossible_ends_its_request_with_the_reason() -> None:
    world = World(num_blocks=16, max_pinned=0.5)
    pinned = Handling(cache=Cache(pin=True))
    one = world.submit([1] * 20, 1, handling=pinned)
    other = world.submit([2] * 20, 1, handling=pinned)
    world.drain()
    assert world.jobs[one].finish == "length"
    assert world.jobs[other].updates[-1].code == "pin_refused"
    assert len(world.scheduler.kv.retention.pins) == 1
    with pytest.raises(InvalidRequest, match="switched off"):
        World(enabled=False).submit([1], handling=pinned)


def test_what_failed_steps_lose_is_no_longer_pinned() -> None:
    world = World()
    world.run([1] * 8, 1, handling=Handling(cache=Cache(pin=True, ttl=5.0)))
    world.submit([2] * 8, 1)
    world.fail(InvalidRequest("injected"))
    assert world.stats["pins"] == world.stats["blocks_pinned"] == 0
    world.expect_empty()


def test_who_goes_on_after_a_failed_step_is_pinned_again() -> None:
    world = World(num_blocks=8)
    world.scheduler._running.reserve = 0.0
    for n, handling in enumerate((Handling(), Handling(-1, cache=Cache(pin=True)), Handling(1))):
        world.submit([n] * 4, 16, handling=handling)
        world.step()
    while not world.scheduler._running.preempted:
        world.step()
    assert world.stats["pins"] == 1
    world.fail(InvalidRequest("injected"))
    assert world.stats["pins"] == 0
    world.drain()
    assert world.stats["pins"] == 1 and world.match([1] * 4) == 4


def test_when_there_are_as_many_pins_as_may_be_one_can_be_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rootlace.runtime.scheduler.kv_manager.MAX_PINS", 1)
    world, pinned = World(), Handling(cache=Cache(pin=True))
    world.run([1] * 8, 1, handling=pinned)
    (pin,) = world.scheduler.kv.retention.pins.all()
    until = pin.until
    renewed = world.run([1] * 8, 1, handling=pinned)
    assert renewed.finish == "length" and {
        one.facts.pin for one in renewed.updates if one.facts
    } == {pin.id}
    assert pin.until > until
    tried = world.run([2] * 8, 1, handling=Handling(cache=Cache(pin="try")))
    found = {one.facts.pin for one in tried.updates if one.facts}
    assert tried.finish == "length" and found == {""}
    with pytest.raises(PinRefused):
        world.submit([2] * 8, 1, handling=pinned)


def test_a_time_to_live_ends_what_the_request_added() -> None:
    world = World()
    world.run([1] * 8, 1)
    world.run([1] * 8 + [2] * 8, 4, handling=Handling(cache=Cache(ttl=5.0)))
    world.executor._host += 6.0
    assert world.stats["tree_tokens"] == 8
    assert world.match([1] * 8 + [2] * 8) == 8


def test_a_deadline_that_has_no_room_for_the_prompts_before_it_is_refused() -> None:
    """Requests in time are begun nevertheless."""
    world = World(num_blocks=1024, max_step_tokens=128, policy="fcfs", context_length=4000)
    world.run([1] * 600, 1)  # now it knows its pace
    pace = world.scheduler.pace.seconds(1)
    assert pace > 0
    long = world.submit([2] * 1000, 1)
    world.step()
    late = world.submit([9] * 10, 1, handling=Handling(timeout=500 * pace))
    in_time = world.submit([8] * 10, 1, handling=Handling(timeout=4000 * pace))
    world.step()
    assert world.jobs[late].updates[-1].code == "deadline_impossible"
    assert world.jobs[long].finish is None
    world.drain()
    assert world.jobs[in_time].finish == world.jobs[long].finish == "length"


def test_what_waits_and_would_be_late_is_refused_before_it_is_begun() -> None:
    """Its turn comes too late, since the request before it generates more than any earlier one."""
    world = World(max_running=1)
    for _ in range(8):
        world.run([1] * 8, 4)
    began = world.executor.clock()
    world.run([2] * 8, 4)
    taken = world.executor.clock() - began
    world.submit([3] * 8, 120)
    world.step()
    late = world.submit([4] * 8, 4, handling=Handling(timeout=20 * taken))
    while world.jobs[late].finish is None:
        world.step()
    assert world.jobs[late].finish == "error"
    assert world.jobs[late].updates[-1].code == "deadline_impossible"
    assert world.executor.clock() - began < 21 * taken and world.stats["running"] == 1
    world.drain()
    # With nobody beside it, a request is always tried.
    world.submit([5] * 8, 4, handling=Handling(timeout=1e-6))
    world.drain()


def test_what_a_constraint_may_end_soon_is_not_taken_to_last_as_long_as_others() -> None:
    world = World(vocab_size=32)
    for _ in range(8):
        world.run([1] * 8, 60)
    world.submit([3] * 8, 60)
    world.step()
    began = world.executor.clock()
    world.step()
    soon = Handling(timeout=20 * (world.executor.clock() - began))
    long = world.submit([4] * 8, 60, handling=soon)
    yes_or_no = world.submit([4] * 8, 60, constrain=partial(Script, 1, 3, 32), handling=soon)
    world.drain()
    assert world.jobs[long].updates[-1].code == "deadline_impossible"
    assert world.jobs[yes_or_no].finish in ("stop", "length")


def test_deadlines_far_away_do_not_keep_what_has_ended() -> None:
    world = World()
    for n in range(300):
        world.run([n % 7, 1, 2], 1, handling=Handling(timeout=1e6))
    assert len(world.scheduler._waiting._deadlines) < 100
