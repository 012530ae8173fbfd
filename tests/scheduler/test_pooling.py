"""Requests for a vector: what of them may be cached, and that nothing they ask for is lost."""

import numpy as np
import pytest

from rootlace.runtime.contracts.messages import Pooling
from rootlace.runtime.scheduler.request import Limits
from rootlace.wire.errors import InternalError, InvalidRequest
from tests.scheduler.world import Job, World
from tests.simulated_executor import history_hash, made_up_states


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 100, count)]


def wanted(prompt: list[int], pooling: Pooling) -> np.ndarray:
    states = made_up_states(history_hash(np.array(prompt))).astype(np.float64)
    return (states.mean(axis=0) if pooling == "mean" else states[-1]).astype(np.float32)


def check(job: Job, pooling: Pooling) -> None:
    (update,) = job.updates
    assert (update.finish, update.token_ids) == ("length", ())
    assert update.vector is not None and update.vector.dtype == np.float32
    assert np.allclose(update.vector, wanted(job.prompt, pooling), rtol=1e-6)


def test_a_cached_prefix_serves_the_last_state_and_never_the_mean() -> None:
    world = World()
    prompt = ids(22)
    world.run(prompt, 2)
    for pooling, cached in (("last", 21), ("mean", 0)):
        job = world.run(prompt, 0, pooling=pooling)
        check(job, pooling)
        assert job.cached == cached
    computed = world.stats["computed_tokens"]
    assert world.run(prompt, 2).cached == 21  # what the mean computed is cached once
    assert world.stats["computed_tokens"] == computed + 1


@pytest.mark.parametrize("overlap", [False, True])
def test_vectors_are_whole_when_chunked_preempted_and_computed_again(overlap) -> None:
    world = World(num_blocks=14, max_step_tokens=7, overlap=overlap)
    jobs: list[tuple[int, Pooling]] = []
    for seed in range(9):
        prompt = ids(10, seed % 2) + ids(4 + 2 * seed, 9 + seed)
        pooling: Pooling = ("mean", "last", "none")[seed % 3]  # type: ignore[assignment]
        jobs.append(
            (world.submit(prompt, 14 if pooling == "none" else 0, pooling=pooling), pooling)
        )
    for _ in range(4):
        world.step()
    world.fail(InternalError("injected"))
    world.drain()
    done = [(world.jobs[rid], pooling) for rid, pooling in jobs if pooling != "none"]
    whole = [(job, pooling) for job, pooling in done if job.finish != "error"]
    assert len(whole) >= 4
    for job, pooling in whole:
        check(job, pooling)


def test_states_that_are_not_numbers_end_that_request_alone() -> None:
    world = World()
    first, second = (world.submit(ids(6, seed), 0, pooling="mean") for seed in (1, 2))
    plan = world.scheduler.plan()
    assert plan is not None
    result = world.executor.run(plan)
    result.pooled[0][3] = np.nan
    world.take(world.scheduler.commit(plan, result))
    finishes = {world.jobs[rid].finish for rid in (first, second)}
    assert finishes == {"error", "length"}


@pytest.mark.parametrize(
    ("labels", "pooling", "max_tokens", "why"),
    [
        (None, "labels", 0, "no head that scores"),
        (0, "labels", 0, "no head that scores"),
        (0, "none", 4, "it has no head"),
        (3, "none", 4, "scores 3 labels"),
        (None, "mean", 1, "neither samples"),
    ],
)
def test_what_a_model_does_not_have_is_refused(labels, pooling, max_tokens, why) -> None:
    world = World()
    world.scheduler._limits = Limits(100, 100, 100, labels)
    with pytest.raises(InvalidRequest, match=why):
        world.submit(ids(3), max_tokens, pooling=pooling)
