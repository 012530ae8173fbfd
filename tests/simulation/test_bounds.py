"""The bounds against brute-force search and against the scheduler's results."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ideal_cache import IdealCache
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.engine import Machine, all_policies, parse_policy
from rootlace.runtime.simulation.study import clairvoyant_bound, infinite_bound, replay
from rootlace.runtime.simulation.trace import Load, Workload
from tests.simulation.traces import token_trace

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=5)


def _workload(prompts: list[list[int]], **options: float) -> Workload:
    return Workload(token_trace(prompts, **options), Load(granularity=1))


@settings(max_examples=80, deadline=None)
@given(PROMPTS)
def test_infinite_bound_is_the_best_order_of_a_cache_that_forgets_nothing(prompts) -> None:
    def served_in(order) -> float:
        ideal = IdealCache()
        for prompt in order:
            ideal.submit(prompt)
        return ideal.cached_tokens / ideal.prompt_tokens

    best = max(served_in(order) for order in itertools.permutations(prompts))
    assert infinite_bound(_workload(prompts)) == pytest.approx(best)


def _best_choices(prompts: list[list[int]], capacity: int) -> float:
    """Return the best hit rate over all prefix-closed sets of kept tokens."""
    paths = [tuple(tuple(prompt[: end + 1]) for end in range(len(prompt))) for prompt in prompts]

    @cache
    def hits(turn: int, kept: frozenset) -> int:
        if turn == len(paths):
            return 0
        path = paths[turn]
        found = 0
        while found < len(path) - 1 and path[found] in kept:
            found += 1
        others = [token for token in kept if token not in path]
        best = 0
        for count in range(min(len(others), capacity - len(path)) + 1):
            for beside in itertools.combinations(others, count):
                held = set(beside) | set(path)
                if any(token[:-1] not in held for token in held if len(token) > 1):
                    continue
                best = max(best, hits(turn + 1, frozenset(held)))
        return found + best

    return hits(0, frozenset()) / sum(map(len, prompts))


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(0, 4))
def test_clairvoyant_bound_is_what_the_best_choices_reach(prompts, spare) -> None:
    capacity = max(map(len, prompts)) + spare
    assert clairvoyant_bound(_workload(prompts), capacity) == pytest.approx(
        _best_choices(prompts, capacity)
    )


def test_a_case_by_hand() -> None:
    """Room for 5 tokens: A (3) and B (2), then C (3) takes the place of one; A is used sooner."""
    a, b, c = [1, 2, 3], [4, 5], [6, 7, 8]
    workload = _workload([a, b, c, [*a, 9], b])
    # Beside C fit two tokens of A (room for 5), three (for 6), or A and one of B (for 7).
    assert clairvoyant_bound(workload, 5) == pytest.approx(2 / 14)
    assert clairvoyant_bound(workload, 6) == pytest.approx(3 / 14)
    assert clairvoyant_bound(workload, 7) == pytest.approx(4 / 14)
    assert clairvoyant_bound(workload, 100) == infinite_bound(workload) == pytest.approx(4 / 14)
    assert clairvoyant_bound(workload, 3) == 0.0  # the fourth prompt does not fit and is left out


def _random_prompts(dice: random.Random, count: int) -> list[list[int]]:
    stems = [[dice.randrange(50) for _ in range(12)] for _ in range(4)]
    return [
        dice.choice(stems)[: dice.randint(1, 12)]
        + [dice.randrange(50) for _ in range(dice.randint(1, 8))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [policy.name for policy in all_policies()])
def test_no_policy_is_better(seed: int, policy: str) -> None:
    dice = random.Random(seed)
    workload = _workload(_random_prompts(dice, 60), outputs=3, gap=dice.choice([0.0, 1.0, 4.0]))
    capacity = 16 * dice.choice([4, 8, 40])
    cost = StepCost(step=1.0, prefill=0.1, max_step_tokens=dice.choice([8, 64]))
    outcome = replay(workload, parse_policy(policy), Machine(capacity, cost, max_running=4))
    assert len(outcome.admitted) == len(workload)
    rate = outcome.cached.sum() / workload.prompt_units.sum()
    assert 0 < rate <= infinite_bound(workload)
    if not outcome.retractions:
        assert rate <= clairvoyant_bound(workload, capacity, outcome.admitted)


def test_bounds_count_those_who_were_served() -> None:
    workload = _workload([[1, 2, 3], [1, 2, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]])
    served = np.array([1, 0])
    assert infinite_bound(workload, served) == pytest.approx(2 / 6)
    assert clairvoyant_bound(workload, 4, served) == pytest.approx(2 / 6)
    assert clairvoyant_bound(workload, 4) == pytest.approx(2 / 6)
    assert clairvoyant_bound(workload, 2) == 0.0
