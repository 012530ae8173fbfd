"""A model's memory, as the doctor foresees it and as the executor then has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.doctor import ceilings, report
from rootlace.runtime.doctor.machine import read_machine
from rootlace.runtime.doctor.report import examine
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SIDE", 32)
    monkeypatch.setattr(ceilings, "ATTENDED", 32)
    monkeypatch.setattr(report, "SECONDS", 0.0)
    monkeypatch.setattr(report, "READ_BYTES", 1 << 16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def settings(model: Path | str = "", **more: object) -> ExecutorConfig:
    return replace(ExecutorConfig(str(model), device="cpu", threads=1), **more)


def test_a_machine_without_a_model() -> None:
    told: list[tuple[str, float]] = []
    found = examine(settings(), lambda what, share: told.append((what, share)))
    assert found.model is None and found.gpu is None
    assert set(found.measured.product_rates) == {"float32", "bfloat16"}
    rates = [rate for by in found.measured.product_rates.values() for rate in by.values()]
    assert min(*rates, found.measured.read_bandwidth) > 0
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("memory", [None, 1 << 20])
def test_the_executor_takes_what_was_foreseen(
    model: Path, kernels: str, memory: int | None
) -> None:
    executor = settings(model, kernels=kernels, kv_memory_bytes=memory)
    found = examine(executor, lambda *_: None).model
    runner = ModelRunner.load(executor, CacheConfig(), max_step_tokens=64, max_running=4)
    assert found is not None and found.forecast is not None
    assert found.kernels == runner.kernels
    assert found.dtype == "float32" and runner.dtype == torch.float32
    assert found.context_length == runner.context_length
    assert found.memory.cache_tokens == runner.num_blocks * runner.block_size
    assert found.memory.cache == runner.kv_cache.nbytes


def test_a_model_that_does_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(read_machine(), memory_available=100_000)
    monkeypatch.setattr(report, "read_machine", lambda: small)
    found = examine(settings(model), lambda *_: None).model
    assert found is not None and not found.memory.fits and found.forecast is None


def test_kernels_that_cannot_run_the_model(model: Path) -> None:
    found = examine(settings(model, kv_dtype="fp8_e4m3"), lambda *_: None).model
    assert found is not None and found.kernels == "reference"
    assert any("float8" in reason or "native" in reason for reason in found.why_not_better)


def test_what_serving_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such model folder"):
        examine(settings(tmp_path / "nothing"), lambda *_: None)
    with pytest.raises(InvalidRequest, match="npu"):
        examine(replace(settings(), device="npu"), lambda *_: None)
