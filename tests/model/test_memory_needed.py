"""Models that do not fit are refused before loading, with choices that would fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.executor import runner
from rootlace.runtime.model.executor.cpu_setup import why_not_native
from rootlace.runtime.model.executor.refusals import check_memory
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import MainMemory, block_bytes
from rootlace.wire.errors import InvalidRequest
from tests.model.checkpoints import configs, save
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.read(make_tiny_model(tmp_path_factory.mktemp("memory") / "model"))


def refusal(
    config: ModelConfig, available: int, cache: CacheConfig, dtype: str = "float32", **given: Any
) -> str | None:
    """Return the refusal; None if the model fits."""
    executor = ExecutorConfig(model=str(config.path), dtype=dtype, **given)
    setup = ModelSetup(config, executor, cache, np.dtype(dtype))
    try:
        check_memory(setup, available, head_apart=True)
    except InvalidRequest as error:
        return str(error)
    return None


def weights_of(config: ModelConfig, dtype: np.dtype[Any], quantize: Any) -> int:
    return weight_bytes(config, dtype, quantize, head_apart=True)


def test_what_fits_is_not_refused(config: ModelConfig) -> None:
    cache = CacheConfig()
    block = block_bytes(config, cache.block_size, FLOAT32)
    exact = weights_of(config, FLOAT32, "none") + block
    assert refusal(config, exact, cache) is None
    assert refusal(config, exact - 1, cache) is not None
    exact = weights_of(config, FLOAT32, "int4") + 3 * block
    assert refusal(config, exact, CacheConfig(num_blocks=3), quantize="int4") is None
    assert refusal(config, exact - 1, CacheConfig(num_blocks=3), quantize="int4") is not None


def test_what_would_fit_is_said(config: ModelConfig) -> None:
    cache = CacheConfig()
    block = block_bytes(config, cache.block_size, FLOAT32)
    needed = {
        "dtype bfloat16": weights_of(config, BFLOAT16, "none") + block // 2,
        "quantize int8": weights_of(config, FLOAT32, "int8") + block,
        "quantize int4": weights_of(config, FLOAT32, "int4") + block,
    }
    for available in (*needed.values(), min(needed.values()) - 1):
        said = refusal(config, available, cache) or ""
        assert str(config.path) in said
        for way, bytes_ in needed.items():
            assert (way in said) == (bytes_ <= available), (way, said)
    assert "nothing that can be chosen" in (refusal(config, 0, cache) or "")
    said = refusal(config, needed["quantize int4"], cache, quantize="int8") or ""
    assert "quantize int4" in said and "quantize int8" not in said


def test_a_cache_that_is_too_large(config: ModelConfig) -> None:
    block = block_bytes(config, 16, FLOAT32)
    most = weights_of(config, FLOAT32, "none") + 50 * block
    said = refusal(config, most, CacheConfig(num_blocks=90)) or ""
    assert "a smaller KV cache, kv_dtype int8, kv_dtype int4" in said
    said = refusal(config, most, CacheConfig(), kv_memory_bytes=90 * block) or ""
    assert "a smaller KV cache" in said and "kv_dtype" not in said


def test_nothing_is_loaded(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "main_memory", lambda: MainMemory(1 << 30, 1000))
    executor = ExecutorConfig(model=str(config.path), device="cpu")

    def load(*_: Any) -> Any:
        raise AssertionError("weights are loaded")

    with pytest.raises(InvalidRequest, match="memory are free"):
        ModelRunner.load(executor, CacheConfig(), 64, 4, weights_of=load)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_tied_head_is_counted_once_where_it_is_the_embedding(
    tmp_path: Path, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` means the reference kernels for a model that the native ones lack."""
    wide = configs()["llama-tied"]
    wide.head_dim = 258
    save(wide, tmp_path)
    config = ModelConfig.read(tmp_path)
    assert config.spec.tied_embeddings and why_not_native(config, FLOAT32, 16) is not None
    block = block_bytes(config, 16, FLOAT32)
    needed = weight_bytes(config, FLOAT32, "none", head_apart=False) + block
    free = MainMemory(1 << 30, needed)
    monkeypatch.setattr(runner, "main_memory", lambda: free)
    executor = ExecutorConfig(model=str(tmp_path), device="cpu", dtype="float32", kernels=kernels)
    ModelRunner.load(executor, CacheConfig(16, 1), 64, 4)
    free = MainMemory(1 << 30, needed - 1)
    with pytest.raises(InvalidRequest, match="memory are free"):
        ModelRunner.load(executor, CacheConfig(16, 1), 64, 4)
