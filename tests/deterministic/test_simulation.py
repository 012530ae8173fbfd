"""Runtimes and clients on a virtual clock, with faults: a fixed slice of `make simulate`."""

from __future__ import annotations

import pytest

from tests.deterministic.cli import short
from tests.deterministic.run import run
from tests.deterministic.scenario import Fault, Program, Scenario, Shape, draw
from tests.deterministic.shrink import shrink


@pytest.mark.parametrize("seed", range(6))
def test_what_is_promised_holds_whatever_happens(seed: int) -> None:
    result = run(draw(seed, programs=20))
    assert not result.failure, short(result.failure)
    assert result.operations > 50


def test_a_world_is_the_same_every_time() -> None:
    first, again = (run(draw(7, programs=15)) for _ in range(2))
    assert first == again


def test_an_engine_that_dies_is_only_a_pause() -> None:
    program = Program(
        0,
        0.0,
        (
            ("open", 1, None, {}),
            ("append", 1, (("text", "the red cat"),)),
            ("generate", 1, {"max_tokens": 40, "temperature": 1.0, "seed": 5, "stream": True}),
            ("wait", 1),
        ),
    )
    quiet = Scenario(0, Shape(clients=1), (program,))
    faulty = Scenario(0, Shape(clients=1), (program,), (Fault(0.02, "kill"),))
    results = [run(quiet), run(faulty)]
    assert [result.failure for result in results] == ["", ""]
    assert results[1].deaths == 2 and results[0].deaths == 1  # the last one is the end of the world


def test_shrinking_leaves_what_is_needed() -> None:
    scenario = draw(3, programs=12)

    def fails(some: Scenario) -> bool:
        verbs = [action[0] for program in some.programs for action in program.actions]
        return verbs.count("generate") >= 2 and any(f.kind == some_fault for f in some.faults)

    some_fault = scenario.faults[0].kind
    small, _ = shrink(scenario, fails)
    assert fails(small)
    assert small.size == 3
