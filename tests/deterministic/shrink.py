"""Shrink a failing scenario: leave out all parts without which it fails alike."""

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from tests.deterministic.scenario import Scenario

T = TypeVar("T")


def shrink(
    scenario: Scenario, fails: Callable[[Scenario], bool], runs: int = 400
) -> tuple[Scenario, int]:
    """Return the smallest scenario found in `runs` runs, and the number of runs."""
    left = runs

    def still(candidate: Scenario) -> bool:
        nonlocal left
        if left <= 0:
            return False
        left -= 1
        return fails(candidate)

    before = None
    while before != scenario and left > 0:
        before = scenario
        scenario = _fewer_programs(scenario, still)
        scenario = _fewer_faults(scenario, still)
        for at in range(len(scenario.programs)):
            scenario = _shorter(scenario, at, still)
    return scenario, runs - left


def _fewer_programs(scenario: Scenario, still: Callable[[Scenario], bool]) -> Scenario:
    found = _fewer(scenario.programs, lambda some: still(replace(scenario, programs=some)))
    return replace(scenario, programs=found)


def _fewer_faults(scenario: Scenario, still: Callable[[Scenario], bool]) -> Scenario:
    found = _fewer(scenario.faults, lambda some: still(replace(scenario, faults=some)))
    return replace(scenario, faults=found)


def _shorter(scenario: Scenario, at: int, still: Callable[[Scenario], bool]) -> Scenario:
    """Return the scenario with fewer actions of one program."""

    def having(actions: tuple[object, ...]) -> Scenario:
        programs = list(scenario.programs)
        programs[at] = replace(programs[at], actions=actions)
        return replace(scenario, programs=tuple(programs))

    return having(_fewer(scenario.programs[at].actions, lambda some: still(having(some))))


def _fewer(items: tuple[T, ...], holds: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return the items that are necessary for the failure: halves are left out, then quarters, ...
    (Zeller's delta debugging, complements only)."""
    chunk = max(len(items) // 2, 1)
    while items:
        at = 0
        while at < len(items):
            fewer = items[:at] + items[at + chunk :]
            if holds(fewer):
                items = fewer
            else:
                at += chunk
        if chunk == 1:
            return items
        chunk = max(chunk // 2, 1)
    return items
