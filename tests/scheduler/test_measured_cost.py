"""Cost of steps, recovered from steps of known cost."""

import random

import numpy as np
import pytest

from rootlace.runtime.contracts.plan import StepCost, StepPlan
from rootlace.runtime.scheduler.pacing import MeasuredCost, ServicePace
from rootlace.runtime.simulation.engine import time_step

NONE = np.empty(0, np.int64)


def plan(chunks: list[tuple[int, int]], contexts: list[int]) -> StepPlan:
    """`chunks`: how many tokens, and where they end; `contexts`: of rows that decode."""
    counts = [count for count, _ in chunks] + [1] * len(contexts)
    ends = np.array([end for _, end in chunks] + contexts, np.int32)
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int32)
    return StepPlan(0, NONE, NONE, NONE, starts, ends, NONE, NONE, NONE, NONE)


def note(measured: MeasuredCost, done: StepPlan, seconds: float) -> None:
    work, _ = measured.forecast(done)
    measured.note(work, seconds)


def seconds(cost: StepCost, chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    """Return the seconds of a step by the simulator's formula."""
    counts = np.array([count for count, _ in chunks], np.int64)
    ends = np.array([end for _, end in chunks], np.int64)
    ones = np.ones(len(contexts), np.int64)
    return time_step(cost, counts, ends, ones, np.array(contexts, np.int64)).total


@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_a_known_cost_is_found(scale: float) -> None:
    dice = random.Random(1)
    cost = StepCost(
        3e-3 * scale, 2e-4 * scale, 5e-4 * scale, 1e-7 * scale, 2e-8 * scale, max_step_tokens=2048
    )
    measured = MeasuredCost(2048)
    for _ in range(300):
        chunks = [
            (count, count + dice.randrange(3000))
            for count in (dice.randrange(2, 600) for _ in range(dice.randrange(3)))
        ]
        contexts = [dice.randrange(10, 4000) for _ in range(dice.randrange(30))]
        noise = dice.uniform(0.97, 1.03)
        note(measured, plan(chunks, contexts), seconds(cost, chunks, contexts) * noise)
    found = measured.cost
    for work in (([(512, 512)], []), ([], [100] * 16), ([(100, 3000)], [2000] * 8)):
        assert seconds(found, *work) == pytest.approx(seconds(cost, *work), rel=0.08)


def test_steps_of_one_kind_give_a_cost_that_can_be_used() -> None:
    measured = MeasuredCost(64)
    assert measured.cost.step > 0
    for _ in range(50):
        note(measured, plan([], [100, 100]), 0.01)
    found = measured.cost
    assert seconds(found, [], [100, 100]) == pytest.approx(0.01, rel=0.02)
    assert found.prefill > 0, "it is not taken to cost nothing"
    for _ in range(50):
        note(measured, plan([], []), 0.01)
    note(measured, plan([(8, 8)], [1]), 0.01)
    for _ in range(50):
        note(measured, plan([(8, 8)], []), 1e-9)  # less than anything costs
    assert measured.cost.step + measured.cost.prefill > 0


@pytest.mark.parametrize("whole", [True, False])
def test_requests_without_outputs_are_no_measure_of_others(whole: bool) -> None:
    """Such requests were cancelled before the first token, or ask for scores alone."""
    pace = ServicePace()
    pace.note(0.001, 1, 0, whole=whole)
    pace.note(10.0, 1, 500, whole=True)
    assert pace.seconds(1, 500) > 10
    pace.note(3600.0, 1, 500, whole=True)  # the machine stood still
    assert pace.seconds(1, 500) < 100
