"""Trial steps that measure memory, and the memory left for the KV cache."""

from pathlib import Path

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import GRAPH_BYTES, SPARE_SHARE, kv_bytes, trial_steps
from tests.model.checkpoints import SHAPE, configs, save
from tests.simulated_executor import SimulatedExecutor

GIB = 1 << 30


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "context", "size"),
    [(64, 8, 256, 16), (64, 8, 16, 4), (5, 8, 256, 1), (300, 4, 100, 16), (7, 1, 3, 2)],
)
def test_trial_steps_are_steps(max_tokens: int, max_rows: int, context: int, size: int) -> None:
    """Trial steps are well formed for any limits, and as large as these allow."""
    plans, blocks = trial_steps(99, max_tokens, max_rows, context, size)
    for plan in plans:
        executor = SimulatedExecutor(blocks, size, verify=True, vocab_size=99)
        executor.run(plan)  # raises BadPlan
        assert plan.num_tokens <= max_tokens and plan.num_rows <= max_rows
        assert plan.context_len.max() <= context
    assert plans[0].num_tokens == min(max_tokens, max_rows * context)
    assert max(len(plan.samples) for plan in plans) == min(max_rows, max_tokens)
    decoding = plans[2:-2]
    rows = min(max_rows, max_tokens)
    assert all(plan.num_tokens == plan.num_rows for plan in decoding)
    # So that there is one for every tile, and one for every way to sample.
    assert [plan.num_rows for plan in decoding] == [rows, *(n for n in (2, 4) if n < rows)]
    asked = [plan.samples[0].params for plan in plans]
    assert {(p.temperature > 0, p.top_k > 0) for p in asked} >= {(False, False), (True, True)}
    assert [(plan.num_rows, plan.num_tokens > 1) for plan in plans[-2:]] == [
        (1, max_tokens > 1),
        (1, False),
    ]


def test_trial_steps_run(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    plans, blocks = trial_steps(SHAPE["vocab_size"], 40, 6, 64, 8)
    runner = ModelRunner.load(ExecutorConfig(model=str(tmp_path)), CacheConfig(8, blocks), 40, 6)
    for plan in plans:
        result = runner.run(plan)
        assert (result.token_ids >= 0).all() and len(result.token_ids) == len(plan.samples)
        for scores in result.prompt_scores:
            assert np.isfinite(scores.logprobs).all()


def test_the_cache_gets_what_is_left() -> None:
    total, free, step = 140 * GIB, 120 * GIB, 4 * GIB
    plain = kv_bytes(free, total, step, 0)
    assert plain == int(116 * GIB - SPARE_SHARE * total)
    with_graphs = kv_bytes(free, total, step, 35)
    assert with_graphs == plain - 35 * GRAPH_BYTES - step // 4
    assert kv_bytes(GIB, total, step, 0) < 0
