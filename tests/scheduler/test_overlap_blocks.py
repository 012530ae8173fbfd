"""Blocks while steps are planned ahead: who keeps them, who gives them up, what enters the tree."""

import random

import pytest

from tests.scheduler.planned_ahead import ahead, ids, launched
from tests.scheduler.world import World


def test_nobody_is_preempted_before_the_step_under_way_says_who_ends() -> None:
    world = ahead(block_size=1, num_blocks=10, max_step_tokens=64)
    world.scheduler._running.reserve = 0.0
    short = world.submit(ids(4, 1), 2)
    long = world.submit(ids(4, 2), 6)
    launched(world), launched(world)
    world.land()
    assert world.stats["blocks_free"] == 0
    assert world.launch() is None, "the long one has no block for its next token"
    world.land()
    assert world.jobs[short].finish == "length"
    launched(world)
    world.drain()
    assert world.jobs[long].finish == "length" and world.stats["retractions"] == 0
    world.expect_cold(*world.jobs.values())


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_token_that_is_not_known_never_enters_the_tree(block_size) -> None:
    world = ahead(block_size=block_size)
    prompt = ids(7)
    rid = world.submit(prompt, 9)
    world.step()
    world.step()
    launched(world)
    sequence = world.scheduler.by_rid[rid]
    known = sequence.length
    assert sequence.computed == known + 1
    world.abort(rid)
    assert world.stats["tree_tokens"] == world.match([*prompt, *world.jobs[rid].output]) == known
    world.drain()
    world.expect_empty()


def test_a_sequence_that_finds_its_rest_cached_waits_for_scores_under_way() -> None:
    world = ahead(block_size=4, max_step_tokens=9)
    prompt = ids(6, 1)
    said = World().run(prompt, 4).output
    first = world.submit(prompt, 4)
    world.step()
    world.submit(ids(3, 2), 40)
    while world.stats["steps"] < 4:
        world.step()
    assert world.jobs[first].finish is None and len(world.flights) == 1
    # All but one of what it needs beside one decode row; then the first request ends, and leaves
    # that.
    scored = world.submit([*prompt, *said], 0, prompt_logprobs_from=0)
    assert launched(world).num_tokens == 9
    world.land()
    assert world.jobs[first].finish == "length"
    world.launch()
    assert world.jobs[scored].finish is None
    world.drain()
    (update,) = world.jobs[scored].updates
    assert update.prompt_scores is not None and len(update.prompt_scores.logprobs) == 9


def test_an_abort_tells_no_scores_while_some_are_under_way() -> None:
    world = ahead(block_size=4, max_step_tokens=8)
    rid = world.submit(ids(14), 9, prompt_logprobs_from=0)
    launched(world), launched(world)
    world.land()  # the first eight tokens' scores are there, the rest comes with the second step
    world.abort(rid)
    (update,) = world.jobs[rid].updates
    assert update.finish == "abort" and update.prompt_scores is None
    world.drain()
    world.expect_empty()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_preempted_sequence_takes_the_tokens_under_way_and_may_end_there(steps) -> None:
    for limit in (2, 3, 9):
        world = ahead(block_size=4)
        first, second = world.submit(ids(5, 1), 9), world.submit(ids(6, 2), limit)
        for _ in range(steps):
            launched(world)
        sequence = world.scheduler.by_rid[second]
        world.scheduler._running.preempt(sequence)
        world.scheduler.check()
        if steps == 1:
            launched(world)
            assert sequence in world.scheduler._running.preempted, "not before its token is there"
        world.land_all()
        assert len(world.jobs[second].output) == min(steps, limit)
        assert (world.jobs[second].finish == "length") == (limit == steps)
        world.drain()
        for rid in (first, second):
            world.expect_cold(world.jobs[rid])
        world.expect_empty()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_given_up_under_way_are_used_again_at_once(block_size) -> None:
    """Abort with two steps under way; what comes next adopts and overwrites their blocks."""
    dice = random.Random(block_size)
    world = ahead(block_size=block_size, num_blocks=64 // block_size, max_step_tokens=32)
    for turn in range(60):
        stem = [dice.randrange(3) for _ in range(dice.randrange(1, 9))]
        for _ in range(2):
            world.submit([*stem, dice.randrange(100)], dice.randrange(1, 30))
        for _ in range(dice.randrange(4)):
            world.step()
        if len(world.flights) < 2:
            world.launch()
        if world.open_rids():
            world.abort(dice.choice(world.open_rids()))
            if len(world.flights) < 2:
                world.launch()
        if turn % 3 == 0:
            world.scheduler.cache.flush()
    world.drain()
    for job in world.jobs.values():
        if job.finish != "abort":
            world.expect_cold(job)
    world.expect_empty()
