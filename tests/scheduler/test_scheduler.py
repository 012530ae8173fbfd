"""Promises of the scheduler, one per test."""

import dataclasses
import itertools
import random

import msgspec
import numpy as np
import pytest

from rootlace.wire.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
)
from tests.scheduler.matchers import Digits
from tests.scheduler.world import World
from tests.simulated_executor import BadPlan, history_hash, made_up_logprobs

BLOCK_SIZES = pytest.mark.parametrize("block_size", [1, 4, 16])


def ids(count: int, seed: int = 0, vocab: int = 100) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


# ---------------------------------------------------------------- sharing


@BLOCK_SIZES
def test_sixty_requests_compute_their_common_prefix_once_in_one_step(block_size) -> None:
    world = World(block_size=block_size, num_blocks=4000, max_step_tokens=4096, vocab_size=1000)
    prefix = ids(101)
    rids = [world.submit([*prefix, 200 + i, 300 + i, 400], 3) for i in range(60)]
    plan = world.step()
    assert plan is not None
    assert plan.num_rows == 60
    assert plan.num_tokens == len(prefix) + 60 * 3  # every distinct token once
    assert world.stats["computed_tokens"] == len(prefix) + 60 * 3
    if block_size > 1:
        assert len(plan.duplicate_tokens), "the partial block is written by this very step"
    world.drain()
    for rid in rids:
        world.expect_cold(world.jobs[rid])
        assert world.jobs[rid].cached == (0 if rid == rids[0] else len(prefix))
    world.expect_empty()


@BLOCK_SIZES
def test_equal_prompts_compute_only_their_last_token_again(block_size) -> None:
    world = World(block_size=block_size)
    prompt = ids(32)
    for _ in range(5):
        world.submit(prompt, 2)
    plan = world.step()
    assert plan is not None and plan.num_tokens == 32 + 4
    world.drain()
    assert len({tuple(job.output) for job in world.jobs.values()}) == 1


def test_a_cut_chunk_makes_others_wait_for_it() -> None:
    world = World(block_size=4, max_step_tokens=30)
    prefix = ids(100)
    for i in range(4):
        world.submit([*prefix, i], 2)
    world.drain()
    assert world.stats["computed_tokens"] == len(prefix) + 4
    assert world.stats["cached_tokens"] == 3 * len(prefix)


@BLOCK_SIZES
def test_a_next_turn_matches_all_tokens_but_the_last(block_size) -> None:
    world = World(block_size=block_size)
    history = ids(21)
    for turn in range(4):
        job = world.run(history, 6)
        assert job.cached == (len(history) - 4 if turn else 0)
        history = history + job.output + ids(3, turn + 1)
    assert world.stats["copies"] == 0, "the only reader adopts the partial block"
    assert world.stats["nodes"] == 1, "one conversation is one edge"


def test_chained_forks_of_partial_blocks_within_a_step() -> None:
    world = World(block_size=16, max_step_tokens=500)
    base = ids(40)
    world.run(base[:5], 1)
    for cut in (7, 9, 11, 20, 35, 38):
        world.submit([*base[:cut], 1, 2, 3, cut], 4)
        world.submit([*base[:cut], 1, 2, 9, cut], 4)
        world.submit([*base[:cut], 1, 2, 9, cut, 5], 4)
    plan = world.step()
    assert plan is not None and len(plan.copies) and len(plan.duplicate_tokens)
    world.drain()
    world.expect_cold(*world.jobs.values())
    world.expect_empty()


def test_namespaces_share_nothing() -> None:
    world = World()
    prompt = ids(20)
    assert world.run(prompt, namespace="a").cached == 0
    assert world.run(prompt, namespace="b").cached == 0
    assert world.run(prompt, namespace="a").cached == len(prompt) - 1
    assert world.match(prompt) == 0


def test_without_cache_nothing_is_kept() -> None:
    world = World(enabled=False)
    prompt = ids(20)
    for _ in range(2):
        assert world.run(prompt).cached == 0
        assert world.stats["blocks_free"] == world.stats["blocks_total"]
    world.expect_cold(world.jobs[1])


# ---------------------------------------------------------------- rows and budget


def test_decode_goes_first_and_chunks_fill_the_budget() -> None:
    world = World(max_step_tokens=10, block_size=4)
    first = world.submit(ids(5, 1), 8)
    world.step()
    world.submit(ids(25, 2), 2)
    sizes = []
    while world.scheduler.has_work:
        plan = world.step()
        assert plan is not None and plan.num_tokens <= 10
        assert plan.num_rows <= 2
        sizes.append(plan.num_tokens)
    assert sizes[:3] == [10, 10, 8]  # 9 + 9 + 7 prompt tokens beside one decode row
    world.expect_cold(world.jobs[first])


def test_rows_that_share_a_node_are_neighbours() -> None:
    world = World(block_size=4, num_blocks=1000, max_step_tokens=1000)
    groups = [ids(20, seed) for seed in range(4)]
    order = [(group, i) for i in range(5) for group in range(4)]
    for group, i in order:
        world.submit([*groups[group], i, i + 1], 5)
    world.step()
    plan = world.step()
    assert plan is not None and plan.num_rows == 20
    firsts = plan.block_tables[:, 0].tolist()
    changes = sum(a != b for a, b in itertools.pairwise(firsts))
    assert changes == 3


# ---------------------------------------------------------------- order of admission


def overtakings(admitted: list[int], everyone: int) -> list[int]:
    """Count, for each arrival number, the later requests admitted before it."""
    place = {number: at for at, number in enumerate(admitted)}
    return [sum(place[j] < place[i] for j in range(i + 1, everyone)) for i in range(everyone)]


@pytest.mark.parametrize("policy", ["lpm", "dfs", "fcfs"])
@pytest.mark.parametrize("bound", [0, 1, 5])
def test_nobody_is_overtaken_more_often_than_the_bound(policy, bound) -> None:
    world = World(
        policy=policy,
        max_overtaken=bound,
        max_delay=0.0,
        max_running=1,
        num_blocks=600,
        max_step_tokens=64,
    )
    warm = ids(30)
    world.run(warm, 1)
    random_state = random.Random(bound)
    first = len(world.jobs)
    count = 60
    for i in range(count):
        cold = random_state.random() < 0.3
        world.submit([99 - i, *ids(10, i)] if cold else [*warm[: 5 + i % 20], i], 1)
    world.drain()
    admitted = sorted(
        range(first, first + count),
        key=lambda rid: next(
            u.facts.queued for u in world.jobs[rid].updates if u.facts is not None
        ),
    )
    worst = max(overtakings([rid - first for rid in admitted], count))
    assert worst <= (0 if policy == "fcfs" else bound)
    if policy == "lpm" and bound:
        assert worst == bound, "the load does overtake"


def test_lpm_prefers_what_is_cached_and_dfs_groups() -> None:
    for policy, expected in (("lpm", [2, 1, 3]), ("fcfs", [1, 2, 3]), ("dfs", [2, 1, 3])):
        world = World(policy=policy, max_running=1)
        world.run([5] * 20, 1)
        rids = [world.submit([50, 1], 1), world.submit([5] * 20 + [7], 1), world.submit([60], 1)]
        ended = []
        while world.scheduler.has_work:
            world.step()
            ended += [r for r in rids if world.jobs[r].finish and r not in ended]
        assert ended == expected, policy


def test_a_full_queue_refuses() -> None:
    world = World(max_waiting=2)
    world.submit([1])
    world.submit([2])
    with pytest.raises(Overloaded, match="at most 2 requests may wait"):
        world.submit([3])
    world.drain()
    assert world.stats["requests_refused"] == 1


# ---------------------------------------------------------------- too few blocks


@pytest.mark.parametrize("block_size", [1, 4])
def test_preemption_makes_progress_and_changes_nothing(block_size) -> None:
    world = World(block_size=block_size, num_blocks=48 // block_size, max_step_tokens=64)
    for i in range(8):
        world.submit([i, *ids(5, i)], 30)
    finished: list[int] = []
    while world.scheduler.has_work:
        running = world.scheduler._running.sequences
        oldest = running[0].rid if running else None
        world.step()
        finished += [r for r, job in world.jobs.items() if job.finish and r not in finished]
        running = world.scheduler._running.sequences
        assert oldest is None or oldest in finished or running[0].rid == oldest
    assert world.stats["retractions"] > 0
    for job in world.jobs.values():
        world.expect_cold(job)
        assert job.cached == 0, "its own tokens, computed again or not, are not cached ones"
    world.expect_empty()


def test_a_lone_sequence_may_use_the_whole_pool() -> None:
    world = World(block_size=4, num_blocks=8)
    base = ids(30)
    for cut in (30, 17, 10, 5):  # branches inside blocks keep partial blocks of each other
        job = world.run([*base[:cut], 1], 100)
        assert len(job.prompt) + len(job.output) == 8 * 4 + 1
        assert job.finish == "length"
        world.expect_cold(job)
    world.expect_empty()


def test_eviction_trims_from_the_end_and_only_as_needed() -> None:
    world = World(block_size=4, num_blocks=16)
    old, new = ids(32, 1), ids(24, 2)
    world.run(old, 0)
    world.run(new, 0)
    world.run(ids(16, 3), 0)  # takes the 2 free blocks and 2 of the oldest
    assert world.match(old) == 24
    assert world.match(new) == 24
    assert world.stats["evicted_blocks"] == 2


def test_programs_decide_what_is_evicted_first() -> None:
    world = World(block_size=4, num_blocks=12)
    live, closed, plain = ids(16, 1), ids(16, 2), ids(16, 3)
    world.run(live, 0, program="live")
    world.run(plain, 0)
    world.run(closed, 0, program="closed")  # the latest use, but its program ends
    world.scheduler.cache.release_program("closed")
    world.run(ids(8, 4), 0)
    assert (world.match(live), world.match(plain), world.match(closed)) == (16, 16, 8)
    world.run(ids(16, 5), 0)
    assert (world.match(live), world.match(plain), world.match(closed)) == (16, 8, 0)
    world.scheduler.cache.release_program("live")
    world.run(ids(8, 6), 0)
    assert world.match(live) < 16


# ---------------------------------------------------------------- endings


def test_stop_tokens_and_min_tokens() -> None:
    world = World(vocab_size=5)
    free = world.cold([1, 2], world.run([1, 2], 30).params).output
    stop = free[3]
    job = world.run([1, 2], 30, stop_token_ids=(stop,))
    assert job.finish == "stop" and job.updates[-1].matched == stop
    assert job.output == free[: free.index(stop) + 1]
    job = world.run([1, 2], 30, stop_token_ids=(stop,), min_tokens=10)
    assert stop not in job.output[:10]
    world.expect_cold(job)


def test_max_tokens_zero_computes_the_prompt_and_nothing_twice() -> None:
    world = World()
    prompt = ids(20)
    job = world.run(prompt, 0)
    assert (job.finish, job.output, job.cached) == ("length", [], 0)
    steps = world.stats["steps"]
    job = world.run(prompt, 0)
    assert (job.finish, job.output, job.cached) == ("length", [], 20)
    assert world.stats["steps"] == steps


def test_the_last_token_of_a_prompt_that_is_only_scored_is_not_computed() -> None:
    world = World()
    for length in (9, 1):
        before = world.stats["computed_tokens"]
        job = world.run(ids(length), 0, prompt_logprobs_from=0)
        assert world.stats["computed_tokens"] - before == length - 1
        (update,) = job.updates
        assert job.finish == "length" and len(update.prompt_token_scores()) == length


def test_limits_of_context_and_pool() -> None:
    world = World(context_length=20)
    assert len(world.run(ids(15), 100).output) == 5
    assert len(world.run(ids(19), 100).output) == 1
    assert world.run(ids(20), 0).finish == "length"
    for prompt, max_tokens in ((ids(20), 1), (ids(21), 0)):
        with pytest.raises(ContextLengthExceeded):
            world.submit(prompt, max_tokens)
    small = World(num_blocks=2, block_size=4)
    assert len(small.run(ids(8), 5).output) == 1
    with pytest.raises(ContextLengthExceeded):
        small.submit(ids(9), 1)


def test_bad_requests_are_refused_and_change_nothing() -> None:
    world = World(vocab_size=10)
    for prompt in ([], [10], [-1]):
        with pytest.raises(InvalidRequest):
            world.submit(prompt)
    world.submit([1])
    world.jobs.clear()
    with pytest.raises(InvalidRequest, match="in use"):
        world.submit([2])


def test_resuming_gives_the_same_tokens() -> None:
    world = World()
    prompt = ids(10)
    whole = world.run(prompt, 12).output
    resumed = World()
    rid = resumed.submit(prompt, 12, output=whole[:5])
    resumed.drain()
    assert resumed.jobs[rid].output == whole[5:]
    rid = resumed.submit(prompt, 12, output=whole)
    resumed.drain()
    assert resumed.jobs[rid].output == [] and resumed.jobs[rid].finish == "length"


@pytest.mark.parametrize("first", [0, 1, 7, 19, 25])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_scores_come_whole_from_chunks_and_cache(first, max_tokens) -> None:
    world = World(max_step_tokens=6, block_size=4)
    prompt = ids(20)
    for _ in range(2):  # cold, then warm
        world.submit(ids(9, 5), 9)  # company
        rid = world.submit(prompt, max_tokens, prompt_logprobs_from=first, top_logprobs=2)
        world.drain()
        job = world.jobs[rid]
        assert job.prompt_targets == prompt[first:]
        scored = [u for u in job.updates if u.prompt_scores is not None]
        targets = np.array(prompt[max(first, 1) :], np.int32)
        if not len(targets):
            assert not scored
            continue
        (update,) = scored
        assert update is job.updates[0] and update.prompt_scores is not None
        before = history_hash(np.array(prompt))[len(prompt) - len(targets) - 1 : -1]
        logprobs = [score.logprob for score in update.prompt_token_scores()]
        assert logprobs == [None] * (not first) + update.prompt_scores.logprobs.tolist()
        assert np.array_equal(update.prompt_scores.logprobs, made_up_logprobs(before, targets))
        assert update.prompt_scores.top_ids.shape == (len(targets), 2)


def test_constraints_mask_and_end() -> None:
    world = World(num_blocks=12, block_size=4)
    matchers = [Digits(9) for _ in range(4)]
    rids = [world.submit(ids(8, i), 30, constrain=lambda m=m: m) for i, m in enumerate(matchers)]
    world.drain()
    for rid, matcher in zip(rids, matchers, strict=True):
        job = world.jobs[rid]
        assert job.output == matcher.seen and job.finish == "stop" and len(job.output) == 9
        assert all(token < 10 for token in job.output)
    assert world.run([1], 5, constrain=lambda: Digits(0)).finish == "stop"
    broken = Digits(3)
    broken.advance = lambda token_id: False  # type: ignore[method-assign]
    rid = world.submit([1], 5, constrain=lambda: broken)
    world.drain()
    assert (
        world.jobs[rid].finish == "error"
        and world.jobs[rid].updates[-1].code == "constraint_not_met"
    )


# ---------------------------------------------------------------- faults


def test_a_failed_step_ends_its_requests_and_nobody_else_notices() -> None:
    world = World(max_step_tokens=8, block_size=4)
    world.run(ids(12, 9), 2)
    early = [world.submit(ids(20, i), 4) for i in range(3)]
    world.step()
    world.fail(InternalError("out of memory"))
    failed = [rid for rid in early if world.jobs[rid].finish == "error"]
    assert failed and len(failed) < len(early)
    assert world.jobs[failed[0]].updates[-1].error == "out of memory"
    assert world.match(ids(12, 9)) == 0, "what is in memory is doubtful"
    world.drain()
    for rid in set(early) - set(failed):
        world.expect_cold(world.jobs[rid])
    world.expect_empty()


def test_abort_at_any_time_frees_everything() -> None:
    world = World(max_step_tokens=8, block_size=4, max_running=2)
    rids = [world.submit(ids(20, i), 6) for i in range(3)]
    assert world.scheduler.abort(999) is None
    world.step()
    plan = world.scheduler.plan()
    assert plan is not None
    for rid in rids:
        world.abort(rid)
        assert world.jobs[rid].finish == "abort"
    assert world.scheduler.commit(plan, world.executor.run(plan)) == []
    assert world.match(ids(20, 0)) == 16, "what was computed stays"
    world.expect_empty()


# ---------------------------------------------------------------- the verifier itself


def test_the_simulated_memory_notices_bad_plans() -> None:
    def spoilt(**change):  # type: ignore[no-untyped-def]
        world = World(block_size=4)
        world.run(ids(10), 3)
        world.submit([*ids(6), 1, 2], 4)
        plan = world.scheduler.plan()
        assert plan is not None and len(plan.copies) == 1
        fields = {name: make(plan) for name, make in change.items()}
        world.executor.run(msgspec.structs.replace(plan, **fields))

    spoilt()
    for change in (
        {"copies": lambda p: p.copies[:0]},
        {"copies": lambda p: p.copies - [[0, 0, 1]]},
        {"slots": lambda p: p.slots + 1},
        {"token_ids": lambda p: p.token_ids + 1},
        {"block_tables": lambda p: p.block_tables + 1},
    ):
        with pytest.raises(BadPlan):
            spoilt(**change)


def test_a_queue_that_is_never_empty_remembers_only_who_waits() -> None:
    world = World(max_running=64, max_step_tokens=512)
    scheduler = world.scheduler
    scheduler.config = dataclasses.replace(scheduler.config, check_invariants=False)
    for _ in range(60):
        while scheduler._waiting.count < 100:
            world.submit([len(world.jobs) % 7] * 9, 1)
        world.step()
        assert len(next(iter(scheduler._waiting._queues.values()))._rotation) <= 300
    assert len(world.jobs) > 3000
