"""Updates in pieces, for requests that need no single tokens."""

import numpy as np
import pytest

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.wire.protocol import SamplingParams
from tests.scheduler.matchers import Script
from tests.scheduler.world import Job, World


def told(world: World, every: int, job: Job) -> list[EngineOutput]:
    """The updates of the same request, told `every` tokens at a time."""
    rid = len(world.jobs)
    world.jobs[rid] = again = Job(job.prompt, job.params, job.namespace)
    matcher = job.constrain() if job.constrain else None
    world.scheduler.add(
        EngineRequest(rid, np.array(job.prompt, np.int32), job.params, emit_every=every),
        matcher,
        jump_forward=job.jump,
    )
    world.drain()
    return again.updates


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 10])
def test_the_first_at_once_then_so_many_at_a_time_then_all(overlap, max_tokens) -> None:
    world = World(overlap=overlap)
    params = SamplingParams(max_tokens=max_tokens, seed=0, logprobs=True, top_logprobs=2)
    job = Job([1, 2, 3], params, "")
    single = told(world, 1, job)
    pieces = told(world, 4, job)
    assert [len(u.token_ids) for u in single] == [1] * max_tokens
    sizes = [len(u.token_ids) for u in pieces]
    assert sizes == [1, *([4] * ((max_tokens - 2) // 4)), *rest(max_tokens)]
    for updates in (single, pieces):
        assert [u.finish for u in updates[:-1]] == [None] * (len(updates) - 1)
        assert updates[0].facts is not None
        assert all(len(u.scores.logprobs) == len(u.token_ids) for u in updates)
    assert joined(pieces) == joined(single)


def rest(max_tokens: int) -> list[int]:
    """Return the tokens left for the end, which come with the last token."""
    return [(max_tokens - 2) % 4 + 1] if max_tokens > 1 else []


def joined(updates: list[EngineOutput]) -> tuple[list[int], list[float]]:
    tokens = [token for update in updates for token in update.token_ids]
    assert all(update.scores is not None for update in updates)
    return tokens, [value for u in updates for value in u.scores.logprobs.tolist()]  # type: ignore[union-attr]


def test_forced_tokens_are_counted_within_their_piece() -> None:
    world = World()
    job = Job([1], SamplingParams(max_tokens=12, seed=0), "", lambda: Script(3, 12, 100), jump=True)
    single, pieces = told(world, 1, job), told(world, 5, job)

    def places(updates: list[EngineOutput]) -> list[int]:
        found, start = [], 0
        for update in updates:
            found += [start + at for at in update.forced]
            start += len(update.token_ids)
        return found

    assert places(single) and places(pieces) == places(single)
    assert len(pieces) < len(single)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_tells_what_was_generated(overlap: bool, logprobs: bool) -> None:
    world = World(overlap=overlap)
    params = SamplingParams(max_tokens=50, seed=0, logprobs=logprobs)
    world.jobs[0] = Job([1], params, "")
    whole = [token for update in told(world, 1, world.jobs[0]) for token in update.token_ids]
    world.scheduler.add(EngineRequest(0, np.array([1], np.int32), params, emit_every=8))
    for _ in range(6):
        world.step()
    assert [len(u.token_ids) for u in world.jobs[0].updates] == [1]
    update = world.scheduler.abort(0)
    assert update is not None and update.finish == "abort"
    got = [*world.jobs[0].updates[0].token_ids, *update.token_ids]
    assert len(got) >= 4 and got == whole[: len(got)]
    assert update.scores is None or len(update.scores.logprobs) == len(update.token_ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("rate", "window"), [(3000.0, 0.05), (22.0, 0.15)])
def test_streams_are_told_together_and_no_more_often_than_asked(
    overlap: bool, rate: float, window: float
) -> None:
    """A step takes 5 virtual milliseconds and a bit. All together are told `rate` times a second,
    which is less than they ask for, at a multiple of their interval."""
    world = World(overlap=overlap, stream_rate=rate)
    params = SamplingParams(max_tokens=60, seed=0)
    when: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for rid in when:
        world.jobs[rid] = Job([rid, rid], params, "")
        ids = np.array([rid, rid], np.int32)
        world.scheduler.add(EngineRequest(rid, ids, params, emit_seconds=0.05))
        world.step()
    seen = dict.fromkeys(when, 0)
    while world.scheduler.has_work:
        world.step()
        for rid, job in world.jobs.items():
            if len(job.updates) > seen[rid]:
                seen[rid] = len(job.updates)
                when[rid].append(world.executor.clock())
    for rid, job in world.jobs.items():
        assert len(job.output) == 60 and len(job.updates[0].token_ids) == 1
        windows = [int(at / window) for at in when[rid][1:-1]]
        assert windows == sorted(set(windows)), "told twice in one window"
        assert 0.2 / window <= len(job.updates) <= 0.35 / window + 3
    assert when[0][2:-2] == when[1][2:-2] == when[2][2:-2]
