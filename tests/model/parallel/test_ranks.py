"""Two processes give the results of one: the embedded model, float32."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rootlace.runtime.assets import demo_model
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import ExecutorLost
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.parallel.ranks import LeadingSteps
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness, Outcome
from tests.scheduler.matchers import Script
from tests.waiting import eventually

TOLERANCE = 1e-4
"""Tolerance of log-probabilities: sums are cut in two places."""
LENGTH = 12
SHARED = np.random.default_rng(0).integers(3, 300, 30).tolist()


def load(tensor_parallel: int, kernels: Literal["auto", "reference"] = "auto") -> ModelRunner:
    return ModelRunner.load(
        ExecutorConfig(
            model=str(demo_model()),
            dtype="float32",
            kernels=kernels,
            threads=tensor_parallel,
            tensor_parallel=tensor_parallel,
        ),
        CacheConfig(16, 96),
        max_step_tokens=64,
        max_running=8,
    )


@dataclass(frozen=True)
class Pair:
    """The same model in this process alone, and on two ranks."""

    alone: ModelRunner
    divided: ModelRunner

    def steps(self) -> LeadingSteps:
        steps: object = self.divided._steps
        assert isinstance(steps, LeadingSteps)
        return steps


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    threads = torch.get_num_threads()
    pair = Pair(load(1), load(2))
    yield pair
    pair.steps().workers.close()
    torch.set_num_threads(threads)


@pytest.fixture
def reference() -> Iterator[ModelRunner]:
    """Yield two ranks with torch's decoder, as without a compiler."""
    threads = torch.get_num_threads()
    runner = load(2, "reference")
    yield runner
    steps: object = runner._steps
    assert isinstance(steps, LeadingSteps)
    steps.workers.close()
    torch.set_num_threads(threads)


def add_all(harness: Harness, vocab: int, only: int | None = None) -> list[int]:
    """Add greedy, seeded and constrained requests with log-probabilities, or one of them. Two
    prompts begin alike."""
    rids = []
    for at, prompt in enumerate(([*SHARED, 7, 8], [*SHARED, 9], SHARED[:5] * 9)):
        params = SamplingParams(
            max_tokens=LENGTH,
            temperature=0.0 if at == 0 else 0.9,
            top_p=0.95,
            seed=at,
            logprobs=True,
            top_logprobs=3,
            ignore_eos=True,
        )
        matcher = Script(at, LENGTH, vocab) if at == 2 else None
        if only in (None, at):
            rids.append(harness.add(prompt, params, matcher=matcher, jump=True))
    harness.finish()
    return rids


def run(runner: ModelRunner) -> list[Outcome]:
    """All requests in chunks, twice, the second time from the cache."""
    harness = Harness(runner, block_size=16, max_step_tokens=64)
    rids = [rid for _ in range(2) for rid in add_all(harness, runner.vocab_size)]
    assert harness.outcomes[rids[3]].cached_tokens > 0
    return [harness.outcomes[rid] for rid in rids]


def test_the_same_tokens_and_nearly_the_same_log_probabilities(pair: Pair) -> None:
    check_alike(run(pair.alone), run(pair.divided))


def test_ranks_of_the_reference(pair: Pair, reference: ModelRunner) -> None:
    assert reference.kernels == "reference"
    check_alike(run(pair.alone), run(reference))


def check_alike(alone: list[Outcome], divided: list[Outcome]) -> None:
    for one, two in zip(alone, divided, strict=True):
        assert not two.error
        assert two.token_ids == one.token_ids
        assert np.abs(np.subtract(two.logprobs, one.logprobs)).max() < TOLERANCE
        for (ids, values), (other_ids, others) in zip(two.top, one.top, strict=True):
            assert ids == other_ids
            assert np.abs(np.subtract(values, others)).max() < TOLERANCE


def test_the_same_bits_in_any_company_and_from_the_cache(pair: Pair) -> None:
    """Prompts by themselves, whole; where native kernels can be had."""
    if pair.divided.kernels != "native":
        pytest.skip("the reference's bits depend on the number of rows")
    together = run(pair.divided)
    for at in range(3):
        harness = Harness(pair.divided, block_size=16, enabled=False)
        (rid,) = add_all(harness, pair.divided.vocab_size, only=at)
        alone = harness.outcomes[rid]
        for found in (together[at], together[at + 3]):
            assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


def test_a_pool_has_half_of_each_slot_in_each_process(pair: Pair) -> None:
    whole, half = pair.alone.kv_cache, pair.divided.kv_cache
    assert pair.divided.num_blocks == pair.alone.num_blocks == 96
    assert half.nbytes * 2 == whole.nbytes


@pytest.mark.parametrize(
    "more, cache, said",
    [
        ({"kv_dtype": "fp8_e4m3"}, {}, "fp8_e4m3"),
        ({}, {"disk": "somewhere"}, "cache_disk"),
        ({}, {"host_gb": 1.0}, "cache_host_gb"),
        ({"tensor_parallel": 4}, {}, "num_heads 6 is not a multiple of 4"),
    ],
)
def test_what_is_not_divided_is_refused_by_name(
    more: dict[str, Any], cache: dict[str, Any], said: str
) -> None:
    config = ExecutorConfig(**({"model": str(demo_model()), "tensor_parallel": 2} | more))
    with pytest.raises(InvalidRequest, match=said):
        ModelRunner.load(config, CacheConfig(16, 8, **cache), 64, 4)


def test_one_rank_computes_as_if_there_were_none_other(pair: Pair) -> None:
    assert type(pair.alone._steps) is PlainSteps


def test_the_death_of_a_rank_is_the_executors(pair: Pair) -> None:
    """The last test with these processes: noticed while there is nothing to do, and in a step."""
    steps = pair.steps()
    (worker,) = steps.workers.pids()
    assert not pair.divided.prepare()
    os.kill(worker, signal.SIGKILL)

    def noticed() -> bool:
        try:
            steps.prepare()
        except ExecutorLost:
            return True
        return False

    eventually(noticed)
    with pytest.raises(ExecutorLost):
        run(pair.divided)
