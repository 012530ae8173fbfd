"""A cache of int8 or int4: the runner with it, on the CPU."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, Olmo2Config, PreTrainedConfig, Qwen2Config, Qwen3Config

from rootlace.kernels.interface import KVCodes
from rootlace.kernels.reference.kv_cache import dequantise, mixed, quantise
from rootlace.kernels.weights import Dense
from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import balanced, load_weights
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import block_bytes, plan_of_rows, storage_dtype
from rootlace.runtime.model.options import check_kv_dtype
from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.kernels.native.layouts import codes_laid_out
from tests.model.checkpoints import SHAPE, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import native_library

SIZE = 16
SCORED = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, seed=0)
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
        exact = mixed(exact) if kind == 0 else exact
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
    exact[0] = mixed(exact[0])
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


@pytest.mark.parametrize("kv_dtype", BITS)
def test_integers_need_pairs_of_numbers(folder: Path, kv_dtype: KVDtype) -> None:
    config = ModelConfig.read(folder)
    odd = replace(config.spec, attention=replace(config.spec.attention, head_dim=31))
    check_kv_dtype("auto", replace(config, spec=odd))
    with pytest.raises(UnsupportedModel, match=f"head_dim 31: .* kv_dtype '{kv_dtype}'"):
        check_kv_dtype(kv_dtype, replace(config, spec=odd))


KINDS: dict[str, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,  # biases
    "qwen3": Qwen3Config,  # a norm of each head
    "olmo2": Olmo2Config,  # a norm of all heads together
}


@pytest.fixture(scope="module", params=KINDS)
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a few channels of keys are far larger than others, and queries smaller."""
    path = tmp_path_factory.mktemp("model")
    shape = SHAPE if request.param == "olmo2" else SHAPE | {"head_dim": 32}
    model = save(KINDS[request.param](**shape), path)
    large = [3, 7]
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            if request.param == "qwen2":
                attention.k_proj.bias.view(2, -1)[:, large] = 40.0
                for part in (attention.q_proj.weight, attention.q_proj.bias):
                    part.view(4, len(part) // 4, -1)[:, large] /= 40.0
                continue
            for norm, factor in ((attention.k_norm, 30.0), (attention.q_norm, 1 / 30.0)):
                norm.weight.view(-1, 16 if request.param == "olmo2" else 32)[:, large] *= factor
    model.save_pretrained(path)
    return path


def read_balanced(config: ModelConfig, *given: Any) -> ModelWeights:
    return balanced(load_weights(config, *given), config.spec.attention)


def logprobs(runner: ModelRunner) -> np.ndarray:
    ids = np.arange(3, 51, dtype=np.int32)
    samples = [SampleRow(0, SCORED, ids, len(ids))]
    scores = [PromptScoreRow(0, 0, ids[1:], 0)]
    plan = plan_of_rows([ids], SIZE, samples=samples, prompt_scores=scores)
    return runner.run(plan).prompt_scores[0].logprobs


def test_balanced_keys_change_no_score(uneven: Path) -> None:
    """Powers of two change no bit with a cache of floats."""
    config = ExecutorConfig(model=str(uneven), dtype="float32", kernels="reference")
    found = [
        logprobs(ModelRunner.load(config, CacheConfig(SIZE, 16), 64, 4, weights_of=weights_of))
        for weights_of in (load_weights, read_balanced)
    ]
    assert np.array_equal(*found)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_balanced_keys_lose_less(uneven: Path, kv_dtype: KVDtype) -> None:
    """Errors of the scores of rounded keys, beside scores in float64."""
    config = ModelConfig.read(uneven)
    dim, bits = config.spec.attention.head_dim, BITS[kv_dtype]
    x = torch.randn((64, 64), generator=torch.Generator().manual_seed(2))
    errors = []
    for weights_of in (load_weights, read_balanced):
        layer = weights_of(config, torch.float32, torch.device("cpu"), None).layers[0]
        assert isinstance(layer.qkv, Dense)
        inputs = x if layer.input_norm is None else x * layer.input_norm
        qkv = torch.nn.functional.linear(inputs, layer.qkv.matrix, layer.qkv.bias)
        q, k, _ = qkv.split((4 * dim, 2 * dim, 2 * dim), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            width = dim if len(layer.q_norm) == dim else None
            q, k = (
                (part.view(64, -1, width or part.shape[1]) * norm).view(64, -1)
                for part, norm in ((q, layer.q_norm), (k, layer.k_norm))
            )
        q, k = q.view(64, 4, dim), k.view(64, 2, dim)
        rounded = dequantise(quantise(mixed(k), bits), bits, 2, dim, torch.float32)
        exact, found = (
            torch.einsum("mhd,nhd->hmn", queries.double(), keys.double().repeat_interleave(2, 1))
            for queries, keys in ((q, k), (mixed(q), rounded))
        )
        errors.append(float((found - exact).abs().mean()))
    assert errors[1] < 0.6 * errors[0]


def test_adapters_read_keys_as_they_are() -> None:
    both = [ExecutorConfig(model="m", kv_dtype="int8", adapters=given) for given in ((), ("a=b",))]
    assert [kv_pool.balances_keys(one) for one in both] == [True, False]
