"""Streams are told now and then; what is held back until then must never be stuck, nor go out
without what belongs to it."""

import pytest

from tests.scheduler.matchers import Script
from tests.scheduler.world import World

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
NEVER = 1e9
"""Seconds: nothing is told because it is time."""


def forcing_at_once(length: int, forcing: int) -> int:
    """A seed of a script that begins with forced tokens."""
    return next(seed for seed in range(100) if Script(seed, length, 100, forcing).forced_tokens())


@OVERLAP
@pytest.mark.parametrize("cut", [False, True])
def test_what_is_forced_from_the_start_comes_with_the_prompts_scores(overlap, cut) -> None:
    """The first update has cached tokens and the prompt's scores, so it waits for the prompt's last
    chunk, `cut` or not."""
    world = World(overlap=overlap, max_step_tokens=4 if cut else 64)
    seed = forcing_at_once(20, 6)
    world.run(list(range(9)), 1)
    job = world.run(
        list(range(14)),
        30,
        constrain=lambda: Script(seed, 20, 100, 6),
        emit_seconds=NEVER,
        prompt_logprobs_from=10,
    )
    assert job.forced[0] == 0 and job.cached == 9
    assert job.prompt_targets == [10, 11, 12, 13]
    world.expect_cold(job)


@OVERLAP
def test_a_stop_token_is_told_together_with_the_end(overlap: bool) -> None:
    """Readers that show text leave out the stop token, which they know by the end."""
    world = World(overlap=overlap)
    seed = forcing_at_once(3, 10)
    tokens = world.run([1, 2], 9, constrain=lambda: Script(seed, 3, 100, 10)).output
    job = world.run(
        [3, 4],
        9,
        constrain=lambda: Script(seed, 3, 100, 10),
        stop_token_ids=(tokens[-1],),
        emit_seconds=NEVER,
    )
    (update,) = job.updates
    assert update.token_ids == tuple(tokens)
    assert update.finish == "stop" and update.matched == tokens[-1]


@OVERLAP
@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_are_told_early_have_their_scores(overlap: bool, seed: int) -> None:
    """Forced tokens are scored a step later; prompts that come meanwhile have all be told."""
    world = World(overlap=overlap, max_step_tokens=8)
    for rid in range(6):
        world.submit(
            [rid, *range(5)],
            30,
            constrain=lambda rid=rid: Script(10 * seed + rid, 25, 100, 6),  # type: ignore[misc]
            emit_seconds=NEVER,
            logprobs=True,
        )
        for _ in range(4):
            world.step()
    world.drain()
    world.expect_cold(*world.jobs.values())
    assert max(len(job.updates) for job in world.jobs.values()) > 2, "nothing was told early"


@OVERLAP
def test_who_waits_for_blocks_has_been_told_all(overlap: bool) -> None:
    """A preempted stream may wait until another one ends."""
    world = World(block_size=4, num_blocks=12, overlap=overlap)
    world.scheduler._running.reserve = 0.0
    for rid in range(2):
        world.submit([rid, 7, 8], 40, emit_seconds=NEVER)
    waited = 0
    while world.scheduler.has_work:
        world.step()
        # One planned ahead hears of it with the step behind.
        if len(world.flights) == overlap and world.scheduler._running.preempted:
            world.step()
            for sequence in world.scheduler._running.preempted:
                waited += 1
                assert sequence.emitted == sequence.length
    assert waited > 5
    world.expect_cold(*world.jobs.values())


@OVERLAP
@pytest.mark.parametrize("seed", range(4))
def test_from_whatever_was_told_a_request_goes_on_to_the_same_end(overlap, seed) -> None:
    """An engine dies: the next one is given what was told, at any time."""

    def constrain() -> Script:
        return Script(seed, 25, 100, 4)

    def world() -> World:
        made = World(overlap=overlap, max_step_tokens=8)
        made.submit([5, 6, 7], 60)  # others keep it company, and their prompts have it told early
        for _ in range(3):
            made.step()
        return made

    first = world()
    rid = first.submit(
        [1, 2, 3], 30, constrain=constrain, emit_seconds=0.02, logprobs=True, prompt_logprobs_from=0
    )
    job = first.jobs[rid]
    while job.finish is None:
        first.step()
        if len(first.jobs) < 6:
            first.submit([40 + len(first.jobs), *range(6)], 3)
    first.expect_cold(job)
    told: list[int] = []
    for update in job.updates[:-1]:
        told += update.token_ids
        again = world()
        other = again.run(
            [1, 2, 3], 30, constrain=constrain, emit_seconds=0.02, logprobs=True,
            prompt_logprobs_from=0, output=told,
        )  # fmt: skip
        assert other.output == job.output[len(told) :]
        assert other.logprobs == job.logprobs[len(told) :]
        assert other.finish == job.finish and not other.prompt_targets
