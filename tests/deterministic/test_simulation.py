"""Runtimes and clients on a virtual clock, with faults: a fixed slice of `make simulate`."""

from __future__ import annotations

import pytest

from tests.deterministic.cli import short
from tests.deterministic.run import run
from tests.deterministic.scenario import Fault, Program, Scenario, Shape, draw
from tests.deterministic.shrink import shrink


@pytest.mark.parametrize("seed", range(4))
def test_what_is_promised_holds_whatever_happens(seed: int) -> None:
    result = run(draw(seed, programs=12))
    assert not result.failure, short(result.failure)
    assert result.operations > 30


def test_a_world_is_the_same_every_time() -> None:
    first, again = (run(draw(7, programs=10)) for _ in range(2))
    assert first == again


STORY = Program(
    0,
    0.0,
    (
        ("open", 1, None, {}),
        ("append", 1, (("text", "the red cat"),)),
        ("generate", 1, {"max_tokens": 40, "temperature": 1.0, "seed": 5, "stream": True}),
        ("wait", 1),
    ),
)


@pytest.mark.parametrize(
    ("fault", "deaths"),
    [
        ((), 0),
        ((Fault(0.02, "kill"),), 1),
        ((Fault(0.02, "die", 0.1),), 1),
        # The engine is silent, or its loop stands still, for longer than it may.
        ((Fault(0.02, "suspend", 0.99),), 1),
        ((Fault(0.02, "stick", 0.99),), 1),
        # Nobody ran for a minute, so nobody was silent.
        ((Fault(0.02, "jump", 0.99),), 0),
    ],
)
def test_what_is_only_a_pause(fault: tuple[Fault, ...], deaths: int) -> None:
    result = run(Scenario(0, Shape(clients=1), (STORY,), fault))
    assert not result.failure, short(result.failure)
    assert result.deaths == deaths + 1  # the last engine ends with its world


def test_shrinking_leaves_what_is_needed() -> None:
    scenario = draw(3, programs=12)

    def fails(some: Scenario) -> bool:
        verbs = [action[0] for program in some.programs for action in program.actions]
        return verbs.count("generate") >= 2 and any(f.kind == some_fault for f in some.faults)

    some_fault = scenario.faults[0].kind
    small, _ = shrink(scenario, fails)
    assert fails(small)
    assert small.size == 3
