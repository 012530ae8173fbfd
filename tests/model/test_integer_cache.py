"""A cache of int8 or int4: the runner with it, on the CPU."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig

from rootlace.kernels.interface import KVCodes
from rootlace.kernels.reference.kv_cache import mixed, quantise
from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import block_bytes, storage_dtype
from rootlace.runtime.model.options import check_kv_dtype
from rootlace.wire.errors import UnsupportedModel
from tests.kernels.native.layouts import codes_laid_out
from tests.model.checkpoints import SHAPE, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import native_library

SIZE = 16
BITS: dict[KVDtype, int] = {"int8": 8, "int4": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(LlamaConfig(**SHAPE, head_dim=32), path)
    return path


@pytest.fixture(scope="module")
def of_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of four groups each where integers have 4 bits."""
    path = tmp_path_factory.mktemp("model")
    save(LlamaConfig(**SHAPE, head_dim=128), path)
    return path


def load(
    folder: Path,
    kv_dtype: KVDtype,
    kernels: Literal["native", "reference"] = "reference",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> ModelRunner:
    config = ExecutorConfig(model=str(folder), dtype=dtype, kv_dtype=kv_dtype, kernels=kernels)
    return ModelRunner.load(config, CacheConfig(SIZE, 16), 64, 4)


def first_prompt(runner: ModelRunner) -> Row:
    row = Row(Blocks(16, SIZE), list(range(3, 51)))
    runner.run(make_plan([Work(row, 21, None)]))
    runner.run(make_plan([Work(row, 27, None)]))
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
        exact = plain.kv_cache[0, kind, tables[0]].flatten(0, 1)
        stored = runner.kv_cache[0, kind, tables[1]].flatten(0, 1)[:, 0]
        exact = mixed(exact) if kind == 0 and kv_dtype == "int4" else exact
        assert torch.equal(stored, quantise(exact, BITS[kv_dtype]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", BITS)
def test_native_kernels_store_the_same_bytes(
    of_groups: Path, kv_dtype: KVDtype, dtype: Literal["float32", "bfloat16"]
) -> None:
    native_library()
    runners = [load(of_groups, one, "native", dtype) for one in ("auto", kv_dtype)]
    assert [one.kernels for one in runners] == ["native", "native"]
    tables = [first_prompt(one).table for one in runners]
    plain, stored = (one.kv_cache[0][:, table] for one, table in zip(runners, tables, strict=True))
    # Each as the rows of its slots: keys are in panels of 16 slots, values in pairs for bfloat16.
    step = 4 // plain.element_size()
    keys = plain[0].reshape(-1, 2, 1, 128 // step, 16, step).permute(0, 2, 4, 1, 3, 5)
    values = plain[1].reshape(-1, 2, SIZE // step, 128, step).permute(0, 2, 4, 1, 3)
    codes = KVCodes(BITS[kv_dtype], 2)
    exact = [part.reshape(-1, 2, 128) for part in (keys, values)]
    exact[0] = mixed(exact[0]) if kv_dtype == "int4" else exact[0]
    rows = [quantise(part, codes.bits).view(-1, SIZE, 1, stored.shape[4]) for part in exact]
    used = SIZE * 2 * (128 + 4 if kv_dtype == "int8" else 64 + 4 * 4)
    for found, wanted in zip(stored, codes_laid_out(rows[0], rows[1], codes, 128), strict=True):
        assert torch.equal(found.flatten(1)[:, :used], wanted.flatten(1)[:, :used])


def test_memory_given_holds_more_blocks(of_groups: Path) -> None:
    counts = []
    for kv_dtype in ("auto", "int8", "int4"):
        config = ExecutorConfig(model=str(of_groups), kv_dtype=kv_dtype, kv_memory_bytes=1 << 20)  # type: ignore[arg-type]
        counts.append(ModelRunner.load(config, CacheConfig(SIZE), 64, 4).num_blocks)
    # A slot's keys in a layer: 2 heads of 128 numbers, or of as many codes and words, rounded up.
    slots = (2 * 128 * 4, 2 * (128 + 4) + 8, 2 * (64 + 4 * 4))
    assert counts == [(1 << 20) // (3 * 2 * SIZE * slot) for slot in slots]


def test_int4_needs_pairs_of_numbers(folder: Path) -> None:
    config = ModelConfig.read(folder)
    odd = replace(config.spec, attention=replace(config.spec.attention, head_dim=31))
    check_kv_dtype("int8", replace(config, spec=odd))
    with pytest.raises(UnsupportedModel, match="head_dim 31: numbers of kv_dtype 'int4'"):
        check_kv_dtype("int4", replace(config, spec=odd))
