"""The embedded model with its cache in eight bits: how far answers move, and that what is cached
does not change them."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.engine.demo import prompts_about
from tests.engine.harness import Harness, Outcome, greedy
from tests.model.plans import Blocks, Row, Work, make_plan

QUESTIONS = ["Where does Mara live?", "How old is Mara?", "What is her job?", "Hello!"]
NEW_TOKENS = 12
BLOCK_SIZE = 16


def load(
    folder: Path, dtype: Literal["float32", "bfloat16"], kv_dtype: Literal["auto", "fp8_e4m3"]
) -> ModelRunner:
    executor = ExecutorConfig(model=str(folder), dtype=dtype, device="cpu", kv_dtype=kv_dtype)
    return ModelRunner.load(
        executor, CacheConfig(BLOCK_SIZE, 2048 // BLOCK_SIZE), max_step_tokens=512, max_running=16
    )


def prompts(folder: Path) -> list[list[int]]:
    return prompts_about(QUESTIONS, folder)


def answers(harness: Harness, asked: list[list[int]]) -> list[Outcome]:
    rids = [harness.add(prompt, greedy(NEW_TOKENS, logprobs=True)) for prompt in asked]
    harness.finish()
    return [harness.outcomes[rid] for rid in rids]


@pytest.mark.slow
def test_warm_answers_are_the_cold_ones(demo_model: Path) -> None:
    """Also in other chunks. Keys that differ in the last place may be stored as neighbours, so
    log-probabilities are near, not equal."""
    runner, asked = load(demo_model, "float32", "fp8_e4m3"), prompts(demo_model)
    harness = Harness(runner, block_size=BLOCK_SIZE)
    cold = answers(harness, asked)
    warm = answers(harness, asked)
    chunked = answers(Harness(runner, block_size=BLOCK_SIZE, max_step_tokens=48), asked)
    assert warm[1].cached_tokens == len(asked[1]) - 1
    for first, *others in zip(cold, warm, chunked, strict=True):
        for other in others:
            assert other.token_ids == first.token_ids
            assert other.logprobs == pytest.approx(first.logprobs, abs=0.05)


def test_answers_stay_likely(demo_model: Path) -> None:
    """Compare outputs of a cache in the model's dtype with their likelihood under an fp8 cache.
    Three bits of mantissa are coarse for heads of 32 numbers: single tokens move, most do not."""
    wide = load(demo_model, "bfloat16", "auto")
    asked = prompts(demo_model)
    written = [answer.token_ids for answer in answers(Harness(wide, block_size=BLOCK_SIZE), asked)]
    exact = scores(wide, asked, written)
    found = scores(load(demo_model, "bfloat16", "fp8_e4m3"), asked, written)
    assert -exact.mean() < 0.2
    assert exact.mean() - found.mean() < 0.3, "perplexity grows by less than a third"
    assert np.abs(np.exp(found) - np.exp(exact)).mean() < 0.08


def scores(runner: ModelRunner, asked: list[list[int]], written: list[list[int]]) -> np.ndarray:
    """Log-probabilities of all tokens of the answers."""
    blocks = Blocks(runner.num_blocks, BLOCK_SIZE)
    work = [
        Work(Row(blocks, prompt + answer), params=None, score_from=len(prompt))
        for prompt, answer in zip(asked, written, strict=True)
    ]
    found = runner.run(make_plan(work)).prompt_scores
    return np.concatenate([score.logprobs for score in found])
