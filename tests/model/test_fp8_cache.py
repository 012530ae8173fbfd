"""A cache stored in eight bits: the runner with it, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rootlace.protocol import SamplingParams
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.kv_pool import block_bytes
from rootlace.runtime.model.runner import ModelRunner
from tests.model.checkpoints import SHAPE, configs, reference_logprobs, save
from tests.model.plans import Blocks, Row, Work, make_plan

SIZE = 8
SCORED = SamplingParams(temperature=0.0, seed=0, logprobs=True, top_logprobs=20)


def logprobs(folder: Path, kv_dtype: str) -> tuple[ModelRunner, list[int], list[np.ndarray]]:
    """A prompt in chunks, a copied block, a few given tokens: log-probabilities of the best 20."""
    runner = ModelRunner.load(
        ExecutorConfig(model=str(folder), kv_dtype=kv_dtype),  # type: ignore[arg-type]
        CacheConfig(SIZE, 32),
        64,
        4,
    )
    blocks = Blocks(32, SIZE)
    ids = np.random.default_rng(1).integers(3, SHAPE["vocab_size"], 43).tolist()
    first = Row(blocks, ids)
    runner.run(make_plan([Work(first, 20, None)]))
    runner.run(make_plan([Work(first, 16, None)]))
    row = Row(blocks, list(ids), computed=36, table=first.table[:4])
    row.reserve(43)
    copies = [(first.table[4], row.table[4], 4)]
    found = []
    for token in (5, 9, 11, 7):
        (scores,) = runner.run(make_plan([Work(row, params=SCORED)], copies)).scores
        assert scores is not None
        every = np.full(SHAPE["vocab_size"], np.nan)
        every[scores.top_ids[0]] = scores.top_logprobs[0]
        found.append(every)
        row.token_ids.append(token)
        copies = []
    return runner, row.token_ids, found


def test_an_fp8_cache_is_near_and_a_quarter_as_large(tmp_path: Path) -> None:
    model = save(configs()["llama"], tmp_path)
    plain, ids, exact = logprobs(tmp_path, "auto")
    runner, again, found = logprobs(tmp_path, "fp8_e4m3")
    assert ids == again
    assert runner.kv_cache.dtype == torch.float8_e4m3fn
    assert (plain.dtype, runner.dtype) == (torch.float32, torch.float32)
    sizes = [block_bytes(one.config, SIZE, one.kv_cache.dtype) for one in (plain, runner)]
    assert sizes[0] == 4 * sizes[1] == 4 * runner.kv_cache[:, :, 0].nbytes
    expected = reference_logprobs(model, ids).numpy()
    for step, (near, ours) in enumerate(zip(found, exact, strict=True)):
        truth = expected[42 + step]
        assert np.nanmax(np.abs(ours - truth)) < 1e-4
        error = np.abs(near - truth)
        # Three bits of mantissa: 6 % of a key or value at most, averaged over many of them.
        assert 1e-4 < np.nanmax(error) < 1.5 and np.nanmean(error) < 0.3


def test_memory_given_holds_more_blocks(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    counts = []
    for kv_dtype in ("auto", "fp8_e4m3"):
        config = ExecutorConfig(
            model=str(tmp_path),
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            kv_memory_bytes=1 << 20,
        )
        counts.append(ModelRunner.load(config, CacheConfig(SIZE), 64, 4).num_blocks)
    assert counts[1] // 4 == counts[0]
