"""What is cached of latent attention: one vector of a token in each layer, and nothing else."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import open_checkpoint
from rootlace.runtime.model.decoder import native_decoder
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import block_bytes
from rootlace.wire.errors import UnsupportedModel
from tests.model.checkpoints import LATENT, SHAPE, configs, save


def test_the_latent_is_what_is_cached(tmp_path: Path) -> None:
    save(configs()["deepseek_v2"], tmp_path)
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    executor = ExecutorConfig(model=str(tmp_path), kernels="reference")
    cache = ModelRunner.load(executor, CacheConfig(4, 16), 64, 4).kv_cache
    assert cache.shape == (SHAPE["num_hidden_layers"], 1, 16, 4, 1, width)
    config = ModelConfig.read(tmp_path)
    assert block_bytes(config, 4, FLOAT32) * 16 == cache.nbytes
    in_eight_bits = ExecutorConfig(model=str(tmp_path), kernels="reference", kv_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModel, match="kv_lora_rank: its cache is not stored in few"):
        ModelRunner.load(in_eight_bits, CacheConfig(4, 16), 64, 4)


def test_the_native_decoder_says_what_is_too_long(tmp_path: Path) -> None:
    save(configs()["deepseek_v2"], tmp_path)
    spec = ModelConfig.read(tmp_path).spec
    assert native_decoder.why_not(spec, FLOAT32, 16) is None
    long = replace(spec, attention=replace(spec.attention, head_dim=1026))
    why = native_decoder.why_not(long, FLOAT32, 16)
    assert why == "attention.head_dim 1026 is not supported"


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    save(configs()["deepseek_v3"], tmp_path)
    file, config = tmp_path / "model.safetensors", ModelConfig.read(tmp_path)
    stored = load_file(file)
    save_file(stored | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, file)
    assert "model.layers.3.eh_proj.weight" not in open_checkpoint(config).expected
    save_file(stored | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, file)
    with pytest.raises(UnsupportedModel, match=r"does not have: model\.layers\.4"):
        open_checkpoint(config)
