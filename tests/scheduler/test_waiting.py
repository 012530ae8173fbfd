"""The queue: who learns of a computed prompt, and how far requests may be overtaken."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.config import SchedulerConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.scheduler.queue import REFRESHED, ClientQueue, WaitingQueue, work_of
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import SamplingParams
from rootlace.wire.sampling import Handling


def _sequence(number: int, prompt: list[int], namespace: str = "") -> RequestState:
    ids = np.array(prompt, np.int32)
    request = EngineRequest(number, ids, SamplingParams(max_tokens=4, seed=0), namespace=namespace)
    return RequestState(request, None, number, jumps=False, arrived=0.0, max_length=1 << 20)


def _queue(policy: str, most: int, delay: float, estimate) -> ClientQueue:
    config = SchedulerConfig(policy=policy, max_overtaken=most, max_delay=delay)  # type: ignore[arg-type]
    return ClientQueue(config, estimate)


# ---------------------------------------------------------------- ageing


def _play(dice: random.Random, policy: str, most: int, delay: float) -> None:
    """Play a queue whose estimates change at random; the bounds are recomputed from scratch."""
    cached: dict[int, int] = {}
    queue = _queue(policy, most, delay, lambda sequence: cached[sequence.number])
    waiting: list[RequestState] = []
    allowed: dict[int, float] = {}
    with_me: dict[int, set[int]] = {}
    overtakers: dict[int, list[int]] = {}

    def work(number: int) -> int:
        return queue.requests[number].work

    spent: dict[int, int] = {}
    for number in range(200):
        if not waiting or dice.random() < 0.5:
            length = dice.randrange(1, 30)
            cached[number] = dice.randrange(length + 1)
            new = _sequence(number, [dice.randrange(3) for _ in range(length)])
            queue.add(new)
            allowed[number] = delay * sum(work(one.number) for one in waiting)
            with_me[number] = {*(one.number for one in waiting), number}
            overtakers[number] = []
            waiting.append(new)
        elif dice.random() < 0.2:
            renewed = dice.choice(waiting)
            cached[renewed.number] = dice.randrange(renewed.length + 1)
            queue.refresh()
        elif dice.random() < 0.1:
            aborted = dice.choice(waiting)
            waiting.remove(aborted)
            queue.remove(aborted)
        else:
            head = waiting[0].number
            before = [spent[n] for n in overtakers[head]]
            chosen = queue.peek()
            assert chosen is not None
            if len(before) >= most and sum(before) >= allowed[head]:
                assert chosen is waiting[0]
            for one in waiting[: waiting.index(chosen)]:
                overtakers[one.number].append(chosen.number)
            if policy == "dfs" and len(waiting) > 1 and queue.requests[chosen.number].key:
                queue._renew(chosen.number, cached[chosen.number])
            spent[chosen.number] = work(chosen.number)
            waiting.remove(chosen)
            queue.take(chosen)
            # The promise: its own bounds, or those of one that was there when it came.
            for one in waiting:
                earlier = [spent[n] for n in overtakers[one.number][:-1]]
                limit = max(allowed[other] for other in with_me[one.number])
                assert not earlier or len(earlier) < most or sum(earlier) < limit


@pytest.mark.parametrize("policy", ["lpm", "dfs"])
@pytest.mark.parametrize(("most", "delay"), [(0, 0.0), (3, 0.0), (0, 0.5), (2, 0.25), (5, 4.0)])
def test_nobody_is_delayed_beyond_the_bounds(policy: str, most: int, delay: float) -> None:
    for seed in range(20):
        _play(random.Random(seed), policy, most, delay)


def test_work() -> None:
    assert work_of(100, 0) == 8 * work_of(100, 100)
    assert work_of(100, 60) == work_of(40, 0) + work_of(60, 60)


# ---------------------------------------------------------------- order of prompts

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=12)


@settings(max_examples=80, deadline=None)
@given(PROMPTS)
def test_depth_first_admits_in_the_order_of_the_prompts_and_goes_around(prompts) -> None:
    queue = _queue("dfs", 1 << 30, 0.0, lambda sequence: 0)
    for number, prompt in enumerate(prompts):
        queue.add(_sequence(number, prompt))
    taken = []
    while queue.requests:
        following = queue.peek()
        assert following is not None
        queue.take(following)
        taken.append(prompts[following.number])
    assert taken == sorted(prompts)


def test_depth_first_goes_on_behind_the_last_one() -> None:
    queue = _queue("dfs", 1 << 30, 0.0, lambda sequence: 0)
    for number, prompt in enumerate([[5], [1, 2], [3]]):
        queue.add(_sequence(number, prompt))
    queue.take(_first(queue, 1))
    queue.add(_sequence(3, [1]))
    for expected in (2, 0, 3):
        queue.take(_first(queue, expected))


def _first(queue: ClientQueue, expected: int) -> RequestState:
    found = queue.peek()
    assert found is not None and found.number == expected
    return found


# ---------------------------------------------------------------- longest prefix


def test_who_shares_a_computed_prompt_learns_of_it_at_once() -> None:
    """Even in a queue so long that its turn in the rotation is far."""
    cached: dict[int, int] = {}
    queue = _queue("lpm", 1 << 30, 0.0, lambda sequence: cached.get(sequence.number, 0))
    many = 20 * REFRESHED
    for number in range(many):
        queue.add(_sequence(number, [number % 7, *range(100, 120), number]))
    first = queue.peek()
    assert first is not None and first.number == 0
    queue.take(first)
    queue.refresh()
    # Prompt 0 is computed now: those that begin with its 21 tokens find them in the tree.
    family = range(7, many, 7)
    cached = dict.fromkeys(family, 21)
    queue.computed(first)
    served = []
    while len(served) < len(family):
        following = queue.peek()
        assert following is not None
        served.append(following.number)
        queue.take(following)
    assert served == list(family)


def test_other_namespaces_learn_nothing() -> None:
    queue = _queue("lpm", 1 << 30, 0.0, lambda sequence: 0)
    for number, namespace in enumerate(["a", "b", "a"]):
        queue.add(_sequence(number, [1, 2, 3, number], namespace))
    first = queue.peek()
    assert first is not None
    queue.take(first)
    queue.computed(first)
    assert {number: one.estimate for number, one in queue.requests.items()} == {1: 0, 2: 3}


@pytest.mark.parametrize("policy", ["lpm", "dfs", "fcfs"])
def test_nothing_is_left_behind(policy) -> None:
    dice = random.Random(1)
    queue = _queue(policy, 3, 0.1, lambda sequence: dice.randrange(3))
    for round_ in range(3):
        for number in range(50):
            queue.add(_sequence(100 * round_ + number, [dice.randrange(3) for _ in range(4)]))
        while queue.requests and (following := queue.peek()) is not None:
            queue.refresh()
            if dice.random() < 0.2:
                queue.remove(dice.choice([one.sequence for one in queue.requests.values()]))
                continue
            queue.take(following)
            queue.computed(following)
        assert not queue.requests and not queue._prompts and not queue._overtakers
        assert queue._work == queue._delay == 0


def test_a_deferred_request_is_offered_again() -> None:
    for policy in ("lpm", "dfs", "fcfs"):
        config = SchedulerConfig(policy=policy)  # type: ignore[arg-type]
        queue = WaitingQueue(config, lambda sequence: 0)
        for number in range(3):
            queue.add(_sequence(number, [number]))
        first = queue.peek()
        assert first is not None and first.number == 0
        queue.defer(first)
        following = queue.peek()
        assert following is None if policy == "dfs" else following and following.number == 1
        queue.restore([first])
        assert queue.peek() is first


def test_a_request_that_was_deferred_and_left_alone_is_offered_by_its_prefix() -> None:
    queue = WaitingQueue(SchedulerConfig(), lambda sequence: 0)
    first, second = _sequence(0, [0]), _sequence(1, [1])
    queue.add(first)
    queue.add(second)
    queue.defer(first)
    assert queue.peek() is second
    queue.take(second)
    queue.restore([first])
    queue.add(_sequence(2, [2]))
    assert queue.peek() is first


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs"])
def test_offering_deferred_requests_again_takes_no_memory(policy: str) -> None:
    queue = _queue(policy, 16, 0.25, lambda sequence: 1)
    waiting = [_sequence(number, [number, 2, 3]) for number in range(3)]
    for one in waiting:
        queue.add(one)
    for _ in range(100):
        queue.deferred.update(one.number for one in waiting[:2])
        assert queue.peek() in (None, waiting[2])
        queue.restore()
    assert queue.peek() is not None and len(queue._heap) <= len(waiting)


@given(st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_whose_turn_it_is_follows_from_arrivals_and_clocks(dice: random.Random) -> None:
    """The heaps agree with a look at all queues."""
    queue = WaitingQueue(SchedulerConfig(priority_seconds=3.0), lambda sequence: 0)
    waiting: list[RequestState] = []
    for number in range(120):
        if not waiting or dice.random() < 0.55:
            ids = np.zeros(dice.randrange(1, 40), np.int32)
            request = EngineRequest(
                number,
                ids,
                SamplingParams(max_tokens=4, seed=0),
                client=dice.choice("abcdef"),
                origin=dice.choice([(), ("1",), ("2",), ("1", "x"), ("1", "y")]),
                handling=Handling(priority=dice.randrange(3)),
            )
            arrived = float(number)
            new = RequestState(
                request, None, number, jumps=False, arrived=arrived, max_length=1 << 20
            )
            queue.add(new)
            waiting.append(new)
        elif dice.random() < 0.2:
            gone = waiting.pop(dice.randrange(len(waiting)))
            queue.remove(gone)
            gone.outputs = dice.randrange(50)
            queue.ended(gone)
        if waiting and dice.random() < 0.5:
            taken = queue.peek()
            assert taken is not None
            first = {
                priority: min(
                    one.first.arrived for (of, _), one in queue._queues.items() if of == priority
                )
                for priority, _ in queue._queues
            }
            turn = min(first, key=lambda priority: (first[priority] - 3.0 * priority, -priority))
            level = queue._turns
            assert taken.request.handling.priority == turn
            for depth, name in enumerate(taken.place):
                before = taken.place[:depth]
                names = {p[depth] for of, p in queue._queues if of == turn and p[:depth] == before}
                places = [level.places[level.by_end[turn], one] for one in names]
                assert level.places[level.by_end[turn], name] == min(places)
                level = level.below[name]
            queue.take(taken)
            waiting.remove(taken)
            heaps = queue._turns.heaps
            kept = sum(map(len, queue._arrivals.values())) + sum(map(len, heaps.values()))
            assert kept <= 4 * queue.count + 3 * 1200
