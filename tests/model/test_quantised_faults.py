"""Faults of quantised checkpoints' tensors are named; what the log says of those that run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.model.checkpoints import configs, save
from tests.model.quantised_checkpoints import WEIGHTS, awq, edit, fp8, gptq, quantised
from tests.model.test_quantised_checkpoints import FORMATS

CPU = torch.device("cpu")

Q_PROJ = "model.layers.1.self_attn.q_proj"
ZEROS = f"{Q_PROJ}.weight_zero_point"
Stored = dict[str, torch.Tensor]
FAULTS: dict[str, tuple[str, Callable[[Stored], object], list[str]]] = {
    "missing scales": (
        "gptq",
        lambda stored: stored.pop(f"{Q_PROJ}.scales"),
        ["missing", f"{Q_PROJ}.scales"],
    ),
    "another group": (
        "awq",
        lambda stored: stored.update({f"{Q_PROJ}.scales": torch.ones(4, 64)}),
        [f"{Q_PROJ}.scales", "[4, 64]", "[2, 64]"],
    ),
    "another type": (
        "gptq",
        lambda stored: stored.update({f"{Q_PROJ}.qweight": torch.zeros(8, 64)}),
        [f"{Q_PROJ}.qweight", "F32", "I32"],
    ),
    "a group that is not there": (
        "gptq",
        lambda stored: stored[f"{Q_PROJ}.g_idx"].fill_(2),
        [Q_PROJ, "group of columns"],
    ),
    "eight bits without scales": (
        "fp8",
        lambda stored: stored.pop(f"{Q_PROJ}.weight_scale_inv"),
        [f"{Q_PROJ}.weight", "F8_E4M3"],
    ),
    "zero points of symmetric weights": (
        "ct-int4",
        lambda stored: stored.update(
            {f"{Q_PROJ}.weight_zero_point": torch.ones(64, 2, dtype=torch.int8)}
        ),
        [f"{Q_PROJ}.weight_zero_point", "symmetric"],
    ),
    # Zero points are int32 that are packed, or int8 that are not.
    "int32 that are not packed": (
        "ct-int4-zeros",
        lambda stored: stored.update({ZEROS: torch.full((64, 2), 3, dtype=torch.int32)}),
        [ZEROS, "int32 [64, 2]", "int32 [8, 2]", "int8 [64, 2]"],
    ),
    "int8 of the packed shape": (
        "ct-int4-zeros",
        lambda stored: stored.update({ZEROS: torch.ones(8, 2, dtype=torch.int8)}),
        [ZEROS, "int8 [8, 2]"],
    ),
    "zero points with a fraction": (
        "ct-w8a8-zeros",
        lambda stored: stored.update({ZEROS: torch.full((64, 1), 0.75)}),
        [ZEROS, "not integers of eight bits"],
    ),
    "zero points without a number": (
        "ct-w8a8-zeros",
        lambda stored: stored.update({ZEROS: torch.full((64, 1), float("nan"))}),
        [ZEROS, "not integers of eight bits"],
    ),
    "another shape": (
        "ct-int4",
        lambda stored: stored[f"{Q_PROJ}.weight_shape"].copy_(torch.tensor([64, 63])),
        [f"{Q_PROJ}.weight_shape", "[64, 63]"],
    ),
    "what no format has": (
        "awq",
        lambda stored: stored.update({f"{Q_PROJ}.g_idx": torch.zeros(64, dtype=torch.int32)}),
        ["does not have", f"{Q_PROJ}.g_idx"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_tensors_are_named(tmp_path: Path, name: str) -> None:
    form, damage, words = FAULTS[name]
    settings, write = FORMATS[form]()
    quantised(configs()["llama"], tmp_path, settings, write)
    packed = tmp_path / "quantised"
    stored = {name: tensor.clone() for name, tensor in load_file(packed / WEIGHTS).items()}
    damage(stored)
    save_file(stored, packed / WEIGHTS)
    with pytest.raises(UnsupportedModel) as caught:
        load_weights(ModelConfig.read(packed), torch.float32, CPU).resident()
    for word in words:
        assert word in str(caught.value)


def test_a_shape_that_cannot_be_packed(tmp_path: Path) -> None:
    """A head of 199 tokens is no multiple of eight."""
    quantised(configs()["llama"], tmp_path, *awq(32))
    packed = tmp_path / "quantised"
    stored = {name: tensor.clone() for name, tensor in load_file(packed / WEIGHTS).items()}
    stored["lm_head.qweight"] = torch.zeros(64, 25, dtype=torch.int32)
    save_file(stored, packed / WEIGHTS)
    with pytest.raises(UnsupportedModel, match=r"lm_head .* 199 is not a multiple of 8"):
        load_weights(ModelConfig.read(packed), torch.float32, CPU)


def test_quantised_weights_that_nothing_says_of(tmp_path: Path) -> None:
    quantised(configs()["llama"], tmp_path, *fp8((32, 32)))
    packed = tmp_path / "quantised"
    edit(packed, quantization_config=None)
    with pytest.raises(UnsupportedModel, match="weight_scale_inv"):
        load_weights(ModelConfig.read(packed), torch.float32, CPU)


# ------------------------------------------------------------ the log


def load(folder: Path, **settings: Any) -> ModelRunner:
    executor = ExecutorConfig(model=str(folder), **settings)
    return ModelRunner.load(executor, CacheConfig(4, 16), 64, 4)


def test_the_log_says_what_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that are quantised, activations that are not, kernels that are not the fastest."""
    settings, write = FORMATS["ct-w8a8"]()
    quantised(configs()["llama"], tmp_path, settings, write)
    packed = tmp_path / "quantised"
    with caplog.at_level(logging.INFO):
        load(packed)
    assert "quantised weights (compressed-tensors)" in caplog.text
    assert "activations are not rounded to int8" in caplog.text


def test_the_log_says_that_nothing_is_quantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(configs()["llama"], tmp_path)
    edit(tmp_path, quantization_config=gptq(4, 32)[0])
    load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    assert "says GPTQ, but all weights are dense" in caplog.text


def test_kernels_that_do_not_know_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels run, and the log names the reason; a request for native kernels is refused."""
    monkeypatch.setattr("rootlace.runtime.model.executor.cpu_setup.KINDS", frozenset({"dense"}))
    quantised(configs()["llama"], tmp_path, *gptq(4, 32))
    packed = tmp_path / "quantised"
    assert load(packed).kernels == "reference"
    assert "no products of int4 weights" in caplog.text
    with pytest.raises(InvalidRequest, match="no products of int4 weights"):
        load(packed, kernels="native")
