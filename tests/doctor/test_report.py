"""A model's memory, as the doctor foresees it and as the executor then has it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.native.library import NativeOutOfMemory
from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.doctor import report
from rootlace.runtime.doctor.ceilings import read_machine
from rootlace.runtime.doctor.report import examine
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.cli.test_doctor import make_quick
from tests.model.checkpoints import configs
from tests.model.eagle_heads import save_head_for
from tests.model.quantised_checkpoints import gptq, quantised
from tests.model.weight_sizes import num_bytes
from tests.native import native_library
from tests.tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def settings(model: Path | str = "", **more: object) -> ExecutorConfig:
    return dataclasses.replace(ExecutorConfig(str(model), device="cpu", threads=1), **more)


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
    assert found.dtype == "float32" and runner.dtype == FLOAT32
    assert found.context_length == runner.context_length
    assert found.memory.cache_tokens == runner.num_blocks * runner.block_size
    assert found.memory.cache == runner.kv_cache.nbytes


def test_a_draft_model_takes_its_part(model: Path) -> None:
    native_library()
    alone = settings(model, kv_memory_bytes=1 << 20)
    for executor in (alone, dataclasses.replace(alone, draft_model=str(model))):
        found = examine(executor, lambda *_: None).model
        runner = ModelRunner.load(executor, CacheConfig(), max_step_tokens=64, max_running=4)
        assert found is not None
        assert found.memory.cache_tokens == runner.num_blocks * runner.block_size
        both = 1 + bool(executor.draft_model)
        assert found.memory.cache == both * runner.kv_cache.nbytes
        assert found.memory.weights == both * report.weight_bytes(
            runner.config, FLOAT32, "none", head_apart=True
        )


def test_a_head_takes_its_part(model: Path, tmp_path: Path) -> None:
    native_library()
    head = save_head_for(model, tmp_path / "head")
    alone = settings(model, kv_memory_bytes=1 << 20, dtype="float32")
    for quantize in ("none", "int8"):
        executor = dataclasses.replace(alone, draft_model=str(head), quantize=quantize)
        found = examine(executor, lambda *_: None).model
        runner = ModelRunner.load(executor, CacheConfig(), max_step_tokens=64, max_running=4)
        assert found is not None
        assert found.memory.cache_tokens == runner.num_blocks * runner.block_size
        token = 4 * (2 * 4 * 8 + 32)  # keys, values and a feature
        beside = runner.num_blocks * runner.block_size * token
        assert found.memory.cache == runner.kv_cache.nbytes + beside
        apart = report.weight_bytes(runner.config, FLOAT32, quantize, head_apart=True)
        stored = (head / "model.safetensors").stat().st_size  # of float32
        assert stored / 4 < found.memory.weights - apart < stored


def test_an_embedding_of_a_heads_own(model: Path, tmp_path: Path) -> None:
    """It takes memory where it is not of the model's type."""
    native_library()
    weights = []
    for dtype in ("float32", "bfloat16"):
        for embeds in (False, True):
            head = save_head_for(model, tmp_path / "head", embeds=embeds)
            executor = settings(model, draft_model=str(head), dtype=dtype)
            found = examine(executor, lambda *_: None).model
            assert found is not None
            weights.append(found.memory.weights)
    assert weights[1] == weights[0]
    config = json.loads((model / "config.json").read_text())
    assert weights[3] - weights[2] == 2 * config["vocab_size"] * config["hidden_size"]


def test_a_draft_model_with_other_tokens(model: Path, tmp_path: Path) -> None:
    native_library()
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"another": 0}}}')
    with pytest.raises(InvalidRequest, match="it has another tokenizer"):
        examine(settings(model, draft_model=str(tmp_path)), lambda *_: None)


def test_a_model_that_does_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(read_machine(), memory_available=100_000)
    monkeypatch.setattr(report, "read_machine", lambda: small)
    found = examine(settings(model), lambda *_: None).model
    assert found is not None and not found.memory.fits and found.forecast is None


def test_kernels_that_cannot_run_the_model(model: Path) -> None:
    found = examine(settings(model, kv_dtype="fp8_e4m3"), lambda *_: None).model
    assert found is not None and found.kernels == "reference"
    assert any("float8" in reason or "native" in reason for reason in found.why_not_better)


def test_quantised_weights_take_what_is_stored(tmp_path: Path) -> None:
    quantised(configs()["llama"], tmp_path, *gptq(4, 32))
    folder = tmp_path / "quantised"
    found = examine(settings(folder, dtype="float32"), lambda *_: None).model
    loaded = load_weights(ModelConfig.read(folder), torch.float32, torch.device("cpu"))
    assert found is not None and found.forecast is None
    # Zero points become offsets, which take more.
    assert abs(found.memory.weights - num_bytes(loaded)) < 0.15 * num_bytes(loaded)
    dense = load_weights(ModelConfig.read(tmp_path / "dense"), torch.float32, torch.device("cpu"))
    assert found.memory.weights < 0.5 * num_bytes(dense)
    # Without its weights, too, but for the order of columns.
    (folder / "model.safetensors").unlink()
    foreseen = examine(settings(folder, dtype="float32"), lambda *_: None).model
    assert foreseen is not None
    assert 0.95 * found.memory.weights < foreseen.memory.weights < found.memory.weights


def test_rounded_weights_take_less(model: Path) -> None:
    dense = examine(settings(model), lambda *_: None).model
    asked = dataclasses.replace(settings(model), quantize="int4")
    found = examine(asked, lambda *_: None).model
    assert dense is not None and found is not None and found.forecast is None
    assert found.memory.weights < dense.memory.weights


def test_what_serving_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such folder"):
        examine(settings(tmp_path / "nothing"), lambda *_: None)
    with pytest.raises(InvalidRequest, match="npu"):
        examine(dataclasses.replace(settings(), device="npu"), lambda *_: None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"context_length": 10_000_000}, "context_length 10000000 is not between 1 and"),
        ({"kernels": "native", "kv_dtype": "fp8_e4m3"}, "kernels 'native'"),
        ({"draft_model": "MODEL", "kernels": "reference"}, "served with native kernels only"),
    ],
)
def test_what_serving_refuses_of_a_sound_model(
    model: Path, asked: dict[str, object], said: str
) -> None:
    if asked.get("draft_model"):
        asked = {**asked, "draft_model": str(model)}
    executor = settings(model, **asked)
    with pytest.raises(InvalidRequest, match=said) as refused:
        ModelRunner.load(executor, CacheConfig(), max_step_tokens=64, max_running=4)
    with pytest.raises(InvalidRequest) as foreseen:
        examine(executor, lambda *_: None)
    assert str(foreseen.value) == str(refused.value)


@pytest.mark.parametrize(
    ("failing", "error", "left_out"),
    [
        ("product_rates", RuntimeError("can't allocate memory\nand more"), "bfloat16 products"),
        ("read_bandwidth", OSError(12, "Cannot allocate memory"), "reading memory"),
        ("attention_rate", NativeOutOfMemory("std::bad_alloc"), "attention"),
        ("read_bandwidth", MemoryError(), "reading memory: MemoryError"),
    ],
)
def test_what_there_is_no_memory_to_measure(
    model: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception, left_out: str
) -> None:
    if failing == "attention_rate":
        native_library()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(report, failing, fail)
    found = examine(settings(model), lambda *_: None)
    lines = [line for line in found.not_measured if line.startswith(left_out)]
    assert len(lines) == 1 and "and more" not in lines[0]
    assert str(error).split("\n")[0] in lines[0]
    assert found.model is not None and found.model.memory.fits
    assert found.model.forecast is None and found.model.ceilings is None


def test_no_more_memory_is_read_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def read(threads: int, seconds: float, size: int, library: object) -> float:
        sizes.append(size)
        return 1.0

    short = replace(read_machine(), memory_available=1000)
    monkeypatch.setattr(report, "read_machine", lambda: short)
    monkeypatch.setattr(report, "read_bandwidth", read)
    examine(settings(), lambda *_: None)
    assert sizes == [250]


def test_compiling_is_no_other_programs_load(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    choose, load = report.choose_on_cpu, report.ForeignLoad
    monkeypatch.setattr(
        report, "choose_on_cpu", lambda *given: order.append("compiling") or choose(*given)
    )
    monkeypatch.setattr(report, "ForeignLoad", lambda: order.append("load") or load())
    examine(settings(), lambda *_: None)
    assert order == ["compiling", "load"]
