"""Drafts of what was predicted: the output is what it is without, and comes in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.plan import MAX_DRAFTED
from rootlace.runtime.scheduler.pace import DraftPace
from tests.scheduler.matchers import Script, Stepped
from tests.scheduler.world import Job, World

Predict = Callable[[list[int]], list[int]]
PROMPT = [4, 5, 6]
LENGTH = 40


def edited(cold: list[int]) -> list[int]:
    """What the output changes: a token, two that it leaves out, one that it puts in."""
    return [*cold[:10], 99, *cold[11:20], 98, 97, *cold[20:25], *cold[26:]]


def told(job: Job) -> tuple[int, int]:
    return sum(u.accepted for u in job.updates), sum(u.rejected for u in job.updates)


def ran(world: World, predict: Predict, **options: Any) -> tuple[Job, int]:
    """The request, which is as it should be, and its steps."""
    before = world.stats["steps"]
    job = world.run(PROMPT, LENGTH, predict=predict, **options)
    world.expect_cold(job)
    return job, int(world.stats["steps"] - before)


@pytest.mark.parametrize("overlap", [False, True])
def test_fewer_steps(overlap: bool) -> None:
    world = World(overlap=overlap)
    job, steps = ran(world, list)
    assert steps <= (12 if overlap else 6)
    assert told(job)[1] == 0 < told(job)[0]
    job, steps = ran(world, edited, logprobs=True)
    assert steps < 20
    accepted, rejected = told(job)
    assert accepted > LENGTH // 2 and rejected > 0
    stats = world.stats
    assert (
        stats["accepted_tokens"]
        < stats["drafted_tokens"]
        == sum(told(job)) + sum(told(world.jobs[0]))
    )
    world.expect_empty()


def test_what_does_not_come_is_not_drafted_for_long() -> None:
    job, _ = ran(World(), lambda cold: [90] * 200)
    accepted, rejected = told(job)
    assert rejected <= 24 and not accepted


predictions = st.lists(
    st.one_of(
        st.tuples(st.just("right"), st.integers(0, LENGTH), st.integers(0, LENGTH)),
        st.tuples(st.just("wrong"), st.integers(0, 99), st.integers(1, 3)),
    ),
    max_size=6,
)


def assembled(parts: list[tuple[str, int, int]], cold: list[int], vocab: int = 100) -> list[int]:
    found: list[int] = []
    for kind, a, b in parts:
        found += cold[a : a + b] if kind == "right" else [a % vocab] * b
    return found


@settings(max_examples=40)
@given(
    parts=st.lists(predictions, min_size=1, max_size=3),
    overlap=st.booleans(),
    stops=st.booleans(),
    min_tokens=st.sampled_from([0, 15]),
    max_tokens=st.sampled_from([1, 2, 17, LENGTH]),
    blocks=st.sampled_from([(4, 256), (4, 14), (1, 45), (16, 5)]),
    penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
)
def test_the_output_is_what_it_is_without(
    parts: list[list[tuple[str, int, int]]],
    overlap: bool,
    stops: bool,
    min_tokens: int,
    max_tokens: int,
    blocks: tuple[int, int],
    penalty: float,
    seed: int,
) -> None:
    world = World(overlap=overlap, block_size=blocks[0], num_blocks=blocks[1])
    for part in parts:
        world.submit(
            [*PROMPT, seed],
            max_tokens,
            predict=partial(assembled, part),
            stop_token_ids=tuple(range(9)) if stops else (),
            min_tokens=min(min_tokens, max_tokens),
            frequency_penalty=penalty,
            logprobs=True,
            top_logprobs=1,
        )
    world.drain()
    for job in world.jobs.values():
        world.expect_cold(job)
    world.expect_empty()


@settings(max_examples=40)
@given(
    parts=predictions,
    script=st.integers(0, 5),
    forcing=st.sampled_from([0, 3, 7]),
    automata=st.booleans(),
    overlap=st.booleans(),
    jump=st.booleans(),
    logprobs=st.booleans(),
    stepped=st.booleans(),
)
def test_constrained(
    parts: list[tuple[str, int, int]],
    script: int,
    forcing: int,
    automata: bool,
    overlap: bool,
    jump: bool,
    logprobs: bool,
    stepped: bool,
) -> None:
    kind = Stepped if stepped else Script
    world = World(overlap=overlap, automata=automata, vocab_size=7, spot_seconds=1e9)
    ran(
        world,
        partial(assembled, parts, vocab=7),
        constrain=lambda: kind(script, 30, 7, forcing),
        jump=jump,
        logprobs=logprobs,
    )
    world.expect_empty()


def test_a_constrained_row_is_drafted_along_its_constraint() -> None:
    """Forced text that was predicted is on the draft's way."""
    world = World(vocab_size=7, spot_seconds=1e9)
    job, steps = ran(world, list, constrain=lambda: Script(1, 30, 7, 3))
    assert job.forced and steps <= 8 and told(job)[1] <= 1
    checked, _ = ran(World(vocab_size=7), list, constrain=lambda: Script(1, 30, 7, 3, True))
    assert told(checked) == (0, 0)  # what may be taken back is not drafted


@pytest.mark.parametrize(("rows", "drafts"), [(4, True), (16, False)])
def test_a_full_batch_is_not_slowed_down(rows: int, drafts: bool) -> None:
    """A step takes as long as ten drafted tokens: shared by many rows, it is not worth one."""
    world = World(max_step_tokens=512)
    known(world, token=1e-3, step=1e-2)
    for at in range(rows):
        world.submit([*PROMPT, at], LENGTH, predict=list)
    world.drain()
    assert (world.stats["drafted_tokens"] > 0) == drafts


def test_drafts_come_back_when_a_full_batch_has_gone() -> None:
    """Whose next token is planned ahead has no draft: who waits for one must hear of the price."""
    world = World(overlap=True, max_step_tokens=512)
    known(world, token=1e-3, step=1e-2)
    for at in range(32):
        world.submit([*PROMPT, at], LENGTH, predict=list)
    world.submit([*PROMPT, 32], 8 * LENGTH, predict=list)
    while len(world.scheduler._by_rid) > 1:
        world.step()
    before = world.stats["drafted_tokens"]
    world.drain()
    assert world.stats["drafted_tokens"] > before


def known(world: World, token: float, step: float) -> None:
    """What tokens and steps cost."""
    drafting = world.scheduler._drafting
    drafting.pace._steps = {1: step}
    drafting.pace._tokens, drafting.pace._seconds = 1e6, 1e6 * token
    drafting.note = lambda plan, seconds: None  # type: ignore[method-assign]


def test_a_step_has_so_many_drafted_tokens_at_most() -> None:
    world = World(max_step_tokens=512)
    known(world, token=1e-9, step=1.0)
    for at in range(9):
        world.submit([*PROMPT, at], LENGTH, predict=list)
    most = 0
    while world.scheduler.has_work:
        plan = world.step()
        if plan is not None:
            most = max(most, len(plan.samples) - plan.num_rows)
    assert 9 * (MAX_DRAFTED // 9) - 9 <= most <= MAX_DRAFTED
    for job in world.jobs.values():
        world.expect_cold(job)


def test_it_goes_on_behind_what_another_engine_generated() -> None:
    world = World()
    (cold,) = [world.run(PROMPT, LENGTH).output]
    rid = world.submit(PROMPT, LENGTH, output=cold[:20], predict=list)
    before = world.stats["steps"]
    world.drain()
    assert world.jobs[rid].output == cold[20:]
    assert world.stats["steps"] - before <= 5


def test_what_a_drafted_token_costs() -> None:
    pace = DraftPace()
    assert pace.price(16) == 1.0
    for _ in range(40):
        pace.note(8, 0, 10e-3)
        pace.note(8, 10, 12e-3)
        pace.note(2, 0, 9e-3)
    assert pace.price(8) == pytest.approx(8 * 0.2 / 10, rel=0.25)
    assert pace.price(2) == pytest.approx(2 * 0.2 / 9, rel=0.25)
    assert pace.price(3) == pytest.approx(pace.price(2) * 3 / 2)
    before = pace.price(8)
    pace.note(8, 10, 9.0)  # held up
    assert pace.price(8) < 1.5 * before
    for _ in range(20):  # it costs too much
        pace.note(8, 10, 90e-3)
    assert pace.price(8) > 1
    for _ in range(600):
        pace.note(8, 0, 10e-3)
    assert pace.price(8) < 0.9  # which is tried again
    for _ in range(99):  # steps without drafts are held up, now and then for long
        pace.note(8, 0, 90e-3)
        pace.note(8, 10, 12e-3)
    assert pace.price(8) >= 8 / 64
