"""A cache stored in eight bits: the runner with it, on the CPU."""

from pathlib import Path

import numpy as np
import torch

from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.decoder.torch_decoder import ReferenceForward
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import block_bytes
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, configs, save
from tests.model.plans import Blocks, Row, Work, make_plan

SIZE = 8
SCORED = SamplingParams(temperature=0.0, seed=0, logprobs=True, top_logprobs=20)


def load(folder: Path, kv_dtype: str) -> ModelRunner:
    config = ExecutorConfig(model=str(folder), kv_dtype=kv_dtype)  # type: ignore[arg-type]
    return ModelRunner.load(config, CacheConfig(SIZE, 32), 64, 4)


def prompt(runner: ModelRunner) -> Row:
    """A prompt in chunks behind a copied block; its last token is not computed."""
    blocks = Blocks(32, SIZE)
    ids = np.random.default_rng(1).integers(3, SHAPE["vocab_size"], 43).tolist()
    first = Row(blocks, ids)
    runner.run(make_plan([Work(first, 20, None)]))
    runner.run(make_plan([Work(first, 16, None)]))
    row = Row(blocks, ids, computed=36, table=first.table[:4])
    row.reserve(43)
    copies = [(first.table[4], row.table[4], 4)]
    runner.run(make_plan([Work(row, 6, None)], copies))
    return row


@torch.inference_mode()
def test_what_is_stored_is_the_cache_of_float32_in_eight_bits(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    plain, runner = load(tmp_path, "auto"), load(tmp_path, "fp8_e4m3")
    assert runner.kv_cache.dtype == torch.float8_e4m3fn
    assert plain.dtype == runner.dtype == FLOAT32
    sizes = [block_bytes(one.config, SIZE, one.pool.dtype) for one in (plain, runner)]
    assert sizes[0] == 4 * sizes[1] == 4 * runner.kv_cache[:, :, 0].nbytes
    rows = [prompt(one) for one in (plain, runner)]
    steps = runner._steps
    assert isinstance(steps, PlainSteps) and isinstance(steps._forward, ReferenceForward)
    scales = steps._forward.decoder._scales
    for layer, scale in enumerate(scales):
        assert scale is not None
        for kind, factor in enumerate((scale.k, scale.v)):
            exact = plain.kv_cache[layer, kind, rows[0].table[:5]]
            stored = runner.kv_cache[layer, kind, rows[1].table[:5]].float() * factor[:, None]
            if not layer:  # what later layers store comes from what the ones before stored
                # Three bits of mantissa: 1 in 16 at most.
                assert ((stored - exact).abs() <= exact.abs() / 16 + 2**-9 * factor[:, None]).all()
            # The plain runner goes on from it.
            plain.kv_cache[layer, kind, rows[0].table[:5]] = stored
    last = []
    for one, row in zip((plain, runner), rows, strict=True):
        (scores,) = one.run(make_plan([Work(row, params=SCORED)])).scores
        assert scores is not None
        last.append(dict(zip(scores.top_ids[0].tolist(), scores.top_logprobs[0], strict=True)))
    common = last[0].keys() & last[1].keys()
    assert len(common) >= 15
    # But for the position just computed, which one of them stored exactly.
    assert max(abs(last[0][token] - last[1][token]) for token in common) < 0.1


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
