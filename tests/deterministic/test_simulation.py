"""Runtimes and clients on a virtual clock, with faults: a fixed slice of `make simulate`."""

from collections.abc import Callable
from typing import Any

import pytest

from rootlace.runtime.engine.client.cache_orders import PinnedPrompts
from rootlace.runtime.engine.client.restarts import MAX_GUILTY
from rootlace.runtime.offload import slot_store
from rootlace.runtime.scheduler import request as request_state
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.server.branch import Branch, Deadline
from tests.deterministic import shared
from tests.deterministic.cli import short
from tests.deterministic.run import run
from tests.deterministic.scenario import Fault, Program, Scenario, Shape, draw
from tests.deterministic.shrink import shrink


# The last row: a 20 ms delay becomes four seconds, in which nothing runs.
@pytest.mark.parametrize("seed", [*range(4), 5184])
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
        # The engine is silent, or its loop stalls, for longer than permitted.
        ((Fault(0.02, "suspend", 0.99),), 1),
        ((Fault(0.02, "stick", 0.99),), 1),
        # The next engine stalls while it loads.
        ((Fault(0.02, "kill"), Fault(0.15, "suspend", 0.99)), 2),
        # The whole machine stood still for a minute, so no process was silent.
        ((Fault(0.02, "jump", 0.99),), 0),
    ],
)
def test_what_is_only_a_pause(fault: tuple[Fault, ...], deaths: int) -> None:
    result = run(Scenario(0, Shape(clients=1), (STORY,), fault))
    assert not result.failure, short(result.failure)
    assert result.deaths == deaths + 1  # the last engine ends with its world


def test_a_timeout_that_nobody_looks_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_on(_: Branch, work: Callable[[], Any], deadline: Deadline) -> Any:
        return await work()

    monkeypatch.setattr(Branch, "_in_time", run_on)
    asked = ("generate", 1, {"max_tokens": 40, "temperature": 0.0, "timeout": 0.02})
    story = Program(0, 0.5, (*STORY.actions[:2], asked, ("wait", 1)))
    result = run(Scenario(0, Shape(clients=1), (story,), (Fault(0.4, "suspend", 0.1),)))
    assert "its time was over" in result.failure


def _ask(client: int, start: float, **options: Any) -> Program:
    """Generate a few tokens behind a prompt in its own `namespace`."""
    opened = {name: options.pop(name) for name in ("namespace",) if name in options}
    ask = {"max_tokens": 40, "temperature": 0.0, **options}
    words = options.pop("words", "the red cat sat on the mat and saw the other cat")
    text = ("append", 1, (("text", words),))
    return Program(
        client, start, (("open", 1, None, opened), text, ("generate", 1, ask), ("wait", 1))
    )


def test_namespaces_that_share_one_tree_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    two = (_ask(0, 0.0), _ask(0, 2.0, namespace="other"))
    assert not run(Scenario(0, Shape(clients=1), two, ())).failure
    monkeypatch.setattr(request_state, "kv_namespace", lambda namespace, adapter: "")
    assert "were cached in 'other'" in run(Scenario(0, Shape(clients=1), two, ())).failure


def test_timeouts_that_are_all_refused_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tuple(_ask(at % 2, 0.001 * at, timeout=20.0) for at in range(12))
    scenario = Scenario(0, Shape(clients=2, running=3), many, ())
    assert not run(scenario).failure
    monkeypatch.setattr(Scheduler, "_duration", lambda scheduler, sequence: 1e9)
    assert "far less than its timeout" in run(scenario).failure


def test_pins_that_are_not_set_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(0, Shape(clients=1), (_ask(0, 0.0, pin=True),), (Fault(3.0, "kill"),))
    assert not run(scenario).failure
    monkeypatch.setattr(PinnedPrompts, "pin_again", lambda *_: None)
    assert "is gone" in run(scenario).failure


def test_handed_blocks_that_nobody_checks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(clients=2, replicas=2, prefill=1)
    asked = tuple(_ask(0, at, words=f"{at} the cats sat on " * 9, max_tokens=4) for at in range(9))
    scenario = Scenario(0, shape, asked, ())
    sound = run(scenario)
    assert not sound.failure and sound.handed
    monkeypatch.setattr(shared, "TORN", 1.0)
    assert not run(scenario).failure
    monkeypatch.setattr(slot_store, "checksum", lambda key, block: 1)
    monkeypatch.setattr(shared, "checksum", lambda key, block: 1)
    assert run(scenario).failure


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_client_that_goes_on_killing_engines_is_stopped(replicas: int) -> None:
    def killing(client: int, start: float) -> Program:
        ask = ("generate", 1, {"max_tokens": 2, "temperature": 0.0})
        text = ("append", 1, (("text", "the cat "), ("poison",)))
        return Program(client, start, (("open", 1, None, {}), text, ask, ("wait", 1)))

    killers = [killing(1, 10.0 * at) for at in range(12)]
    stories = [Program(0, 5.0 * at, STORY.actions) for at in range(24)]
    result = run(Scenario(0, Shape(clients=2, replicas=replicas), (*killers, *stories)))
    assert not result.failure, short(result.failure)
    assert result.deaths <= 2 * MAX_GUILTY + replicas


def test_shrinking_leaves_what_is_needed() -> None:
    scenario = draw(3, programs=12)

    def fails(some: Scenario) -> bool:
        verbs = [action[0] for program in some.programs for action in program.actions]
        return verbs.count("generate") >= 2 and any(f.kind == some_fault for f in some.faults)

    some_fault = scenario.faults[0].kind
    small, _ = shrink(scenario, fails)
    assert fails(small)
    assert small.size == 3
