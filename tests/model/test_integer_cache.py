"""A cache of int8 or int4: the runner with it, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from rootlace.kernels.reference.kv_codes import quantise
from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.refusals import check_kv_dtype
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv.pool import block_bytes, storage_dtype
from rootlace.wire.errors import UnsupportedModel
from tests.model.checkpoints import SHAPE, save
from tests.model.plans import Blocks, Row, Work, make_plan

SIZE = 16
BITS: dict[KVDtype, int] = {"int8": 8, "int4": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(LlamaConfig(**SHAPE, head_dim=32), path)
    return path


def load(folder: Path, kv_dtype: KVDtype, kernels: str = "reference") -> ModelRunner:
    config = ExecutorConfig(model=str(folder), kv_dtype=kv_dtype, kernels=kernels)  # type: ignore[arg-type]
    return ModelRunner.load(config, CacheConfig(SIZE, 16), 64, 4)


def first_prompt(runner: ModelRunner) -> Row:
    row = Row(Blocks(16, SIZE), list(range(3, 43)))
    runner.run(make_plan([Work(row, 21, None)]))
    runner.run(make_plan([Work(row, 19, None)]))
    return row


@pytest.mark.parametrize("kv_dtype", BITS)
def test_what_is_stored_is_the_cache_of_float32_in_integers(
    folder: Path, kv_dtype: KVDtype
) -> None:
    plain, runner = load(folder, "auto"), load(folder, kv_dtype)
    block = block_bytes(runner.config, SIZE, storage_dtype(kv_dtype, runner.dtype))
    assert runner.kv_cache.nbytes == 16 * block
    assert (runner.num_blocks, runner.block_size) == (16, SIZE)
    tables = [first_prompt(one).table for one in (plain, runner)]
    for kind in (0, 1):
        exact = plain.kv_cache[0, kind, tables[0]].flatten(0, 1)[:40]
        stored = runner.kv_cache[0, kind, tables[1]].flatten(0, 1)[:40, 0]
        assert torch.equal(stored, quantise(exact, BITS[kv_dtype]))


def test_memory_given_holds_more_blocks(folder: Path) -> None:
    counts = []
    for kv_dtype in ("auto", "int8", "int4"):
        config = ExecutorConfig(model=str(folder), kv_dtype=kv_dtype, kv_memory_bytes=1 << 20)  # type: ignore[arg-type]
        counts.append(ModelRunner.load(config, CacheConfig(SIZE), 64, 4).num_blocks)
    # A slot's keys in a layer: 2 heads of 32 numbers, or of as many codes and a word, rounded up.
    slots = (2 * 32 * 4, 2 * (32 + 4) + 8, 2 * (16 + 4) + 8)
    assert counts == [(1 << 20) // (3 * 2 * SIZE * slot) for slot in slots]


def test_int4_needs_pairs_of_numbers(folder: Path) -> None:
    config = ModelConfig.read(folder)
    odd = replace(config.spec, attention=replace(config.spec.attention, head_dim=31))
    check_kv_dtype("int8", replace(config, spec=odd))
    with pytest.raises(UnsupportedModel, match="head_dim 31: numbers of kv_dtype 'int4'"):
        check_kv_dtype("int4", replace(config, spec=odd))
