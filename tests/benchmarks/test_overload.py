"""Overload: what is offered beyond what can be done is refused, and the rest is done in time."""

import asyncio

import pytest

from benchmarks.overload.goodput import Fate, Goodput, goodput_of, goodput_over_best
from benchmarks.overload.simulated import Load, Simulation, capacity
from benchmarks.overload.sustainable import CLOSE, sustainable
from rootlace.runtime.contracts.plan import StepPlan, StepResult


@pytest.mark.parametrize("load", [Load(1500, 16, timeout=4.0), Load(600, 16, False, 3.0, 1)])
def test_goodput_stays_when_three_times_as_much_is_offered(load: Load) -> None:
    """On a simulated clock, through the real scheduler. Before anything has ended, nobody knows how
    long it takes: so there are a few late ones."""
    sustained = capacity(load)
    found = {factor: Simulation(load, factor * sustained, 20).run() for factor in (0.5, 1, 2, 3)}
    best = max(one.good for one in found.values())
    assert best > 0.75 * sustained
    for factor in (2, 3):
        assert found[factor].good >= 0.9 * best
        assert found[factor].late < 0.06
        assert found[factor].refused_p50 < load.timeout / 5
    assert found[0.5].refused == found[0.5].late == 0


def test_fates_are_counted() -> None:
    fates = [Fate("in time", 1.0), Fate("in time", 3.0), Fate("late", 5.0), Fate("refused", 0.1)]
    found = goodput_of(fates, 2.0)
    assert (found.offered, found.good) == (2.0, 1.0)
    assert (found.late, found.refused, found.failed) == (0.25, 0.25, 0.0)
    assert (found.answered_p50, found.refused_p99) == (2.0, 0.1)


def test_the_highest_load_is_compared_with_those_before_and_only_if_it_is_an_overload() -> None:
    def load(good: int) -> Goodput:
        return goodput_of([Fate("in time", 1.0)] * good, 1.0)

    assert goodput_over_best(40.0, [load(20), load(40), load(30)]) == 0.75
    assert goodput_over_best(40.0, [load(20), load(40), load(74)]) is None
    assert goodput_over_best(40.0, [load(40)]) is None


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("first", [3.0, 32.0, 500.0])
def test_the_sustainable_rate_is_found_from_above_and_from_below(first: float, slow: bool) -> None:
    async def offer(rate: float) -> Goodput:
        """Of a server that answers 75 a second."""
        fates = [Fate("in time" if at < 750 else "refused", 1.0) for at in range(round(10 * rate))]
        if slow and rate > 50:
            fates = [Fate("in time", 4.0) for _ in fates]  # the queue grows
        return goodput_of(fates, 10.0)

    rate, trials = asyncio.run(sustainable(offer, first, 4.0))
    most = 50 if slow else 75
    assert most / CLOSE < rate <= most / 0.98
    assert len(trials) < 12


class Paused(Simulation):
    """One step takes half a minute, as where the machine stands still."""

    paused_until = 0.0

    def _computed(self, plan: StepPlan) -> StepResult:
        result = super()._computed(plan)
        if self._now > 10 and not self.paused_until:
            self._now += 30.0
            self.paused_until = self._now
        return result


@pytest.mark.parametrize("load", [Load(600, 16, False, 3.0, 1), Load(300, 48, timeout=5.0)])
def test_who_comes_after_a_pause_of_the_machine_is_not_refused_for_it(load: Load) -> None:
    """What ran meanwhile took long, and says nothing of what comes."""
    simulation = Paused(load, capacity(load) / 2, 60)
    simulation.run()
    later = simulation._arrivals > simulation.paused_until + 1
    assert later.sum() > 100
    assert {simulation._fates[number].kind for number in later.nonzero()[0]} == {"in time"}
