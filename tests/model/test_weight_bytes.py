"""Forecast memory of quantised weights, compared with the memory of weights that are read."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rootlace.kernels.native.linear import Packed, Packer
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.kernels.weights import Dense, Weight
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.model.checkpoints import configs, save
from tests.model.gguf.converting import convert
from tests.model.quantised_checkpoints import WEIGHTS, gptq, quantised
from tests.model.test_quantised_checkpoints import FORMATS
from tests.model.weight_sizes import num_bytes
from tests.native import native_library


def sizes(config: ModelConfig) -> tuple[int, int]:
    """Return the forecast for a head that shares the embedding's memory if possible, and for a
    separate one."""
    shared, apart = (
        weight_bytes(config, FLOAT32, "none", head_apart=apart) for apart in (False, True)
    )
    return shared, apart


def taken(config: ModelConfig) -> int:
    """Without the shapes that packed weights have in their files, 16 bytes for each."""
    return num_bytes(load_weights(config, torch.float32, torch.device("cpu")))


def ends(config: ModelConfig) -> int:
    return math.prod((config.spec.vocab_size, config.spec.hidden_size)) * 4


@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_a_dense_head(tmp_path: Path, name: str) -> None:
    """A head has its own memory if it is not tied, or if kernels pack it."""
    quantised(configs()[name], tmp_path, *FORMATS["ct-int4"]())
    config = ModelConfig.read(tmp_path / "quantised")
    shared, apart = sizes(config)
    assert shared == pytest.approx(taken(config), rel=0.01)
    assert apart - shared == (ends(config) if name == "llama-tied" else 0)


@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_a_gguf_file(tmp_path: Path, name: str) -> None:
    """The embedding is dense, and where the head is tied, that has the codes besides; native
    kernels look its rows up in the file."""
    save(configs()[name], tmp_path / "hf")
    config = ModelConfig.read(convert(tmp_path / "hf", tmp_path / "m.gguf", "Q8_0"))
    shared, apart = sizes(config)
    assert shared == taken(config) and apart == shared - ends(config)


def test_what_latents_are_multiplied_by_is_dense(tmp_path: Path) -> None:
    """Steps read its numbers, which are then made once."""
    quantised(configs()["deepseek_v3"], tmp_path, *FORMATS["fp8"](), modules=("kv_b_proj",))
    config = ModelConfig.read(tmp_path / "quantised")
    weights = load_weights(config, torch.float32, torch.device("cpu"))
    assert all(isinstance(layer.kv_up, Dense) for layer in weights.layers)
    shared, _ = sizes(config)
    assert shared == pytest.approx(num_bytes(weights), rel=0.02)


def test_experts_whose_columns_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels have these experts dense: the forecast counts packed weights."""
    native_library()
    packed = [0]

    pack = Packer.pack

    def counted(packer: Packer, weight: Weight, *, gated: bool = False) -> Packed:
        found = pack(packer, weight, gated=gated)
        packed[0] += sum(
            getattr(part, "nbytes", 0) for part in msgspec.structs.asdict(found).values()
        )
        return found

    config = configs()["qwen3_moe"]
    config.hidden_size = config.moe_intermediate_size = 192  # whole panels on every processor
    quantised(config, tmp_path, *gptq(4, 32, order=True))
    read = ModelConfig.read(tmp_path / "quantised")
    monkeypatch.setattr(Packer, "pack", counted)
    executor = ExecutorConfig(model=str(read.path), kernels="native", dtype="bfloat16")
    ModelRunner.load(executor, CacheConfig(16, 4), 64, 4)
    shared, apart = (
        weight_bytes(read, BFLOAT16, "none", head_apart=apart) for apart in (False, True)
    )
    embedding = read.spec.vocab_size * read.spec.hidden_size * 2
    assert apart == pytest.approx(packed[0] + embedding, rel=0.02)
    assert shared < apart / 2  # what the reference kernels have


def test_a_quantised_embedding_with_a_head_of_its_own(tmp_path: Path) -> None:
    settings, write = FORMATS["ct-w8a8"]()
    modules = ("_proj", "lm_head", "embed_tokens")
    quantised(configs()["llama"], tmp_path, settings | {"ignore": []}, write, modules=modules)
    config = ModelConfig.read(tmp_path / "quantised")
    shared, apart = sizes(config)
    assert shared == apart == pytest.approx(taken(config), rel=0.01)


def test_sizes_do_not_compare_embedding_and_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading makes this comparison, and warns once."""
    quantised(configs()["llama-tied"], tmp_path, *FORMATS["ct-int4"]())
    packed = tmp_path / "quantised"
    stored = {name: tensor.clone() for name, tensor in load_file(packed / WEIGHTS).items()}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, packed / WEIGHTS)
    config = ModelConfig.read(packed)
    _, apart = sizes(config)
    assert not caplog.text
    assert apart == pytest.approx(taken(config), rel=0.01)
    assert caplog.text.count("they are not tied") == 1
