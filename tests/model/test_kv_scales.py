"""Scales of an fp8 KV cache: calibrated against transformers' own cache, or from the checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rootlace.kernels.interface import KVScales
from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.executor import torch_setup as module
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.wire.errors import UnsupportedModel
from tests.model.checkpoints import configs, save

CPU = torch.device("cpu")
LAYERS, KV_HEADS = 3, 2


def found_scales(folder: Path) -> tuple[KVScales, ...]:
    config = ModelConfig.read(folder)
    executor = ExecutorConfig(kv_dtype="fp8_e4m3")
    with torch.inference_mode():
        weights = load_weights(config, torch.float32, CPU)
        return module.kv_scaling(ModelSetup(config, executor, CacheConfig(), FLOAT32), weights)


def add_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-sliding", "llama-mqa"])
def test_calibration_sees_what_transformers_caches(name: str, tmp_path: Path) -> None:
    reference = save(configs()[name], tmp_path)
    vocab = reference.config.vocab_size
    tokens = np.random.default_rng(module.CALIBRATION_SEED).integers(0, vocab, 256)
    tokens[0] = reference.config.bos_token_id
    with torch.inference_mode():
        cache = reference(torch.from_numpy(tokens)[None], use_cache=True).past_key_values
    for index, scales in enumerate(found_scales(tmp_path)):
        layer = cache.layers[index]
        for values, scale in ((layer.keys, scales.k), (layer.values, scales.v)):
            assert scale.dtype == torch.float32 and scale.shape == values.shape[1:2]
            assert torch.equal(scale.log2(), scale.log2().round()), "a power of two"
            wanted = values[0].abs().amax(dim=(1, 2)) * module.HEADROOM / 448.0
            assert (scale >= wanted * (1 - 1e-5)).all()
            if name != "mistral-sliding":  # there transformers keeps the last tokens alone
                assert (scale < 2 * wanted * (1 + 1e-5)).all()


def test_a_short_context_is_calibrated_too(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    config = ModelConfig.read(tmp_path)
    weights = load_weights(config, torch.float32, CPU)
    executor = ExecutorConfig(context_length=5)
    setup = ModelSetup(config, executor, CacheConfig(), FLOAT32)
    scales = module.calibrate(setup, weights)
    assert all((layer.k > 0).all() and (layer.v > 0).all() for layer in scales)


def test_a_head_of_zeros_has_a_scale(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    name = "model.layers.1.self_attn.v_proj.weight"
    add_tensors(tmp_path, {name: torch.zeros_like(load_file(tmp_path / "model.safetensors")[name])})
    assert found_scales(tmp_path)[1].v.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (KV_HEADS,), (KV_HEADS, 1, 1)])
def test_scales_of_the_checkpoint(
    keys: str, values: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    save(configs()["llama"], tmp_path)
    stored = {}
    for index in range(LAYERS):
        for kind, name in enumerate((keys, values)):
            scale = torch.full(shape, 0.25 + index + 0.125 * kind)
            stored[f"model.layers.{index}.{name}"] = scale.to(torch.bfloat16)
    add_tensors(tmp_path, stored)
    for index, scales in enumerate(found_scales(tmp_path)):
        assert scales.k.tolist() == [0.25 + index] * KV_HEADS
        assert scales.v.tolist() == [0.375 + index] * KV_HEADS
        assert scales.k.dtype == torch.float32


def test_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    names = [f"model.layers.{index}.self_attn.kv_scale" for index in range(LAYERS)]
    add_tensors(tmp_path, {name: torch.tensor(0.5) for name in names})
    for scales in found_scales(tmp_path):
        assert scales.k.tolist() == scales.v.tolist() == [0.5] * KV_HEADS


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(5), "shape"),
        (torch.tensor(0.0), "positive"),
        (torch.tensor(float("nan")), "positive"),
        (None, "missing"),
    ],
)
def test_faulty_scales_are_named(scale: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    stored = {
        f"model.layers.{index}.self_attn.{kind}_proj.{kind}_scale": torch.tensor(0.5)
        for index in range(LAYERS)
        for kind in "kv"
    }
    name = "model.layers.1.self_attn.v_proj.v_scale"
    if scale is None:
        del stored[name]
    else:
        stored[name] = scale
    add_tensors(tmp_path, stored)
    with pytest.raises(UnsupportedModel, match=name) as error:
        found_scales(tmp_path)
    assert message in str(error.value)


def test_a_checkpoint_whose_cache_alone_is_quantized_is_read(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    only_cache = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    for found, fits in (
        ({**only_cache, "config_groups": {}}, True),
        (only_cache, True),
        ({**only_cache, "config_groups": {"group_0": {}}}, False),
        ({"quant_method": "compressed-tensors"}, False),
    ):
        config["quantization_config"] = found
        (tmp_path / "config.json").write_text(json.dumps(config))
        if fits:
            assert ModelConfig.read(tmp_path).spec.num_layers == LAYERS
        else:
            with pytest.raises(UnsupportedModel, match="quantization_config"):
                ModelConfig.read(tmp_path)
