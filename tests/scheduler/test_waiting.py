"""The queue: who learns of a computed prompt, and how far requests may be overtaken."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.scheduler.queue import REFRESHED, Patience, PromptOrder, WaitingQueue, work_of
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import SamplingParams


def _sequence(number: int, prompt: list[int], namespace: str = "") -> RequestState:
    ids = np.array(prompt, np.int32)
    request = EngineRequest(number, ids, SamplingParams(max_tokens=4, seed=0), namespace=namespace)
    return RequestState(request, None, number, jumps=False, arrived=0.0, max_length=1 << 20)


# ---------------------------------------------------------------- patience


def _play(dice: random.Random, most: int, delay: float) -> None:
    """A queue that admits at random as far as it may, with the bounds recomputed from scratch."""
    patience = Patience(most, delay)
    waiting: list[int] = []
    work: dict[int, int] = {}
    allowed: dict[int, float] = {}
    with_me: dict[int, set[int]] = {}
    overtakers: dict[int, list[int]] = {}
    arrived = 0
    for _ in range(200):
        if not waiting or dice.random() < 0.5:
            allowed[arrived] = delay * sum(work[n] for n in waiting)
            with_me[arrived] = {*waiting, arrived}
            overtakers[arrived] = []
            work[arrived] = dice.randrange(100)
            patience.arrives(arrived, work[arrived])
            waiting.append(arrived)
            arrived += 1
        elif dice.random() < 0.2:
            renewed = dice.choice(waiting)
            work[renewed] = dice.randrange(100)
            patience.renew(renewed, work[renewed])
        elif dice.random() < 0.1:
            aborted = dice.choice(waiting)
            waiting.remove(aborted)
            patience.leaves(aborted, waiting[0] if waiting else None)
        else:
            head = waiting[0]
            spent = [work[n] for n in overtakers[head]]
            exhausted = len(spent) >= most and sum(spent) >= allowed[head]
            assert patience.is_exhausted(head) == exhausted
            chosen = head if exhausted else dice.choice(waiting)
            if chosen != head:
                patience.overtakes(chosen)
            for each in waiting[: waiting.index(chosen)]:
                overtakers[each].append(chosen)
            waiting.remove(chosen)
            patience.leaves(chosen, waiting[0] if waiting else None)
            # The promise: its own bounds, or those of one that was there when it came.
            for each in waiting:
                before = [work[n] for n in overtakers[each][:-1]]
                limit = max(allowed[other] for other in with_me[each])
                assert not before or len(before) < most or sum(before) < limit


@pytest.mark.parametrize(("most", "delay"), [(0, 0.0), (3, 0.0), (0, 0.5), (2, 0.25), (5, 4.0)])
def test_nobody_is_delayed_beyond_the_bounds(most: int, delay: float) -> None:
    for seed in range(20):
        _play(random.Random(seed), most, delay)


def test_work() -> None:
    assert work_of(100, 0) == 8 * work_of(100, 100)
    assert work_of(100, 60) == work_of(40, 0) + work_of(60, 60)


# ---------------------------------------------------------------- order of prompts

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(PROMPTS, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_neighbours_share_less_the_further_they_are(prompts, probe) -> None:
    order = PromptOrder()
    sequences = [_sequence(number, prompt) for number, prompt in enumerate(prompts)]
    for sequence in sequences:
        order.add(sequence)
    before, behind = map(list, order.neighbours(_sequence(99, probe)))
    assert sorted(before + behind) == list(range(len(prompts)))

    def shared(number: int) -> int:
        same = 0
        for a, b in zip(prompts[number], probe, strict=False):
            if a != b:
                break
            same += 1
        return same

    for side in (before, behind):
        lengths = [shared(number) for number in side]
        assert lengths == sorted(lengths, reverse=True)
    for number in range(0, len(prompts), 2):
        order.remove(number)
    before, behind = map(list, order.neighbours(_sequence(99, probe)))
    assert sorted(before + behind) == list(range(1, len(prompts), 2))


def test_depth_first_goes_around() -> None:
    order = PromptOrder()
    for number, prompt in enumerate([[5], [1, 2], [1], [3]]):
        order.add(_sequence(number, prompt))
    assert order.following() == 2
    order.go_to(3)
    order.remove(3)
    assert order.following() == 0
    order.go_to(0)
    order.remove(0)
    assert order.following() == 2


# ---------------------------------------------------------------- longest prefix


def test_who_shares_a_computed_prompt_learns_of_it_at_once() -> None:
    """Even in a queue so long that its turn in the rotation is far."""
    cached: dict[int, int] = {}
    queue = WaitingQueue("lpm", 1 << 30, 0.0, lambda sequence: cached.get(sequence.number, 0))
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
    queue = WaitingQueue("lpm", 1 << 30, 0.0, lambda sequence: 0)
    for number, namespace in enumerate(["a", "b", "a"]):
        queue.add(_sequence(number, [1, 2, 3, number], namespace))
    first = queue.peek()
    assert first is not None
    queue.take(first)
    queue.computed(first)
    assert queue._estimates == {1: 0, 2: 3}


@pytest.mark.parametrize("policy", ["lpm", "dfs", "fcfs"])
def test_nothing_is_left_behind(policy) -> None:
    dice = random.Random(1)
    queue = WaitingQueue(policy, 3, 0.1, lambda sequence: dice.randrange(3))
    for round_ in range(3):
        for number in range(50):
            queue.add(_sequence(100 * round_ + number, [dice.randrange(3) for _ in range(4)]))
        while (following := queue.peek()) is not None:
            queue.refresh()
            if dice.random() < 0.2:
                queue.remove(dice.choice(list(queue)))
                continue
            queue.take(following)
            queue.computed(following)
        assert not len(queue) and not queue._estimates and not queue._prompts._keys
        patience = queue._patience
        assert not (patience._work or patience._allowed or patience._delays)
        assert patience._waiting == patience._delay == 0 and not patience._overtakers
