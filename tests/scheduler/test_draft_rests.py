"""Predictions without profit cost next to nothing. If all steps have drafts, one step now and then
runs without, to measure its time."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rootlace.runtime.cache.suffix_index import SuffixIndex
from rootlace.runtime.scheduler.drafter import Drafter
from rootlace.runtime.scheduler.speculation import DraftPace
from tests.scheduler.test_drafting import LENGTH, PROMPT, known
from tests.scheduler.world import World


def test_predictions_are_followed_ever_more_rarely_where_nothing_is_drafted() -> None:
    """And to the same place: where it gets cheaper, the rest of the output comes in drafts."""
    world = World(max_step_tokens=512)
    known(world, token=1e-2, step=1e-2)
    looks = 0
    follow = Drafter.follow

    def counted(prediction: Drafter, sequence: np.ndarray, length: int) -> None:
        nonlocal looks
        looks += 1
        follow(prediction, sequence, length)

    rid = world.submit(PROMPT, 4 * LENGTH, predict=list)
    with patch.object(Drafter, "follow", counted):
        while len(world.jobs[rid].output) < 2 * LENGTH:
            world.step()
    assert looks < LENGTH and not world.stats["drafted_tokens"]
    known(world, token=1e-5, step=1e-2)
    before = world.stats["steps"]
    world.drain()
    assert world.stats["steps"] - before < LENGTH
    assert world.stats["accepted_tokens"] > LENGTH
    world.expect_cold(world.jobs[rid])


def test_a_step_without_drafts_comes_now_and_then() -> None:
    pace = DraftPace()
    pace.note(4, 0, 30e-3)  # the first one was held up
    for _ in range(50):
        steps = 0
        while not pace.wants_none():
            pace.note(4, 20, 15e-3)
            steps += 1
        assert steps > 10
        pace.note(4, 0, 10e-3)
    fixed, token = pace.price(4)
    assert fixed + 20 * token == pytest.approx(4 * 5 / 10, rel=0.1)


def test_drafts_do_not_wait_for_a_step_without_prompts() -> None:
    """A step with prompts says nothing of the cost of drafts, and is not recorded."""
    pace = DraftPace()
    while not pace.wants_none():
        pace.note(4, 20, 15e-3)
    assert not pace.wants_none()


def test_a_step_that_takes_longer_is_believed_less_than_one_that_does_not() -> None:
    pace = DraftPace()
    for _ in range(20):
        pace.note(4, 0, 10e-3)
    for seconds in (20e-3, 20e-3, 10e-3, 10e-3):
        pace.note(4, 0, seconds)
    assert pace._steps[4] < 11e-3


@pytest.mark.parametrize("rows", [1, 4])
def test_texts_are_looked_at_rarely_where_that_saved_nothing_lately(rows: int) -> None:
    """Until a text comes back: then drafts pay for looks again."""
    world = World(
        overlap=True,
        vocab_size=100_000,
        num_blocks=1024,
        speculation_tokens=4096,
        max_step_tokens=512,
    )
    known(world, token=4e-3 / rows, step=1e-2)
    looks = 0
    find = SuffixIndex.find

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return find(*given)

    with patch.object(SuffixIndex, "find", counted):
        for at in range(2 * rows):
            world.submit([*PROMPT, at], 500, ignore_eos=True)
            if at % rows == rows - 1:
                begun, looks = world.stats["steps"], 0
                world.drain()
    steps = world.stats["steps"] - begun
    assert looks / rows < steps / 8 + 10 and not world.stats["drafted_tokens"]
    # Nothing was earned, and one text comes back.
    before = world.stats["steps"]
    world.submit([*PROMPT, 0], 500, ignore_eos=True)
    world.drain()
    assert world.stats["steps"] - before < 100 and world.stats["accepted_tokens"] > 400
    world.expect_cold(*world.jobs.values())


def test_one_row_of_a_batch_is_drafted_for_where_nothing_was_earned() -> None:
    """A repeated text gets its draft: searches of other rows do not end its wait."""
    world = World(
        overlap=True,
        vocab_size=100_000,
        num_blocks=2048,
        speculation_tokens=20_000,
        max_step_tokens=512,
    )
    known(world, token=1e-3, step=1e-2)
    for batch in range(2):
        for at in range(4):
            world.submit([*PROMPT, batch, at], 400, ignore_eos=True)
        world.drain()
    assert not world.stats["drafted_tokens"]
    rids = [
        world.submit([*PROMPT, 0 if at == 0 else 9, at], 400, ignore_eos=True) for at in range(4)
    ]
    before = world.stats["steps"]
    while world.jobs[rids[0]].finish is None:
        world.step()
    assert world.stats["steps"] - before < 100 and world.stats["accepted_tokens"] > 300
    world.drain()
    world.expect_cold(*(world.jobs[rid] for rid in rids))


def test_who_has_no_draft_while_texts_rest_misses_no_step() -> None:
    """A row that waited for a draft continues with the others."""
    world = World(overlap=True)
    known(world, token=1e-3, step=1e-2)
    rids = [world.submit([*PROMPT, at], 4 * LENGTH) for at in range(2)]
    while len(world.jobs[rids[0]].output) < 3:
        world.step()
    sequence = world.scheduler.by_rid[rids[0]]
    sequence.stands_by = True
    world.scheduler._drafting._rest = world.scheduler._drafting.requests = 100
    before = len(world.jobs[rids[0]].output)
    for _ in range(20):
        world.step()
    world.scheduler._drafting.requests = 0
    assert len(world.jobs[rids[0]].output) - before >= 18
    world.drain()


def test_a_batch_is_drafted_for_where_a_token_costs_most_of_what_it_saves() -> None:
    """A batch gets drafts as long as these are right, as for repeated texts."""
    world = World(vocab_size=100_000, num_blocks=1024, speculation_tokens=4096, max_step_tokens=512)
    known(world, token=1.5e-3, step=1e-2)  # 0.6 of what it saves to four rows
    for _ in range(2):
        before = world.stats["steps"], world.stats["accepted_tokens"]
        for at in range(4):
            world.submit([*PROMPT, at], 400, ignore_eos=True)
        world.drain()
    assert world.stats["accepted_tokens"] - before[1] > 800
    assert world.stats["steps"] - before[0] < 250
    world.expect_cold(*world.jobs.values())
