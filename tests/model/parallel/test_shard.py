"""Shards that the tests of the families do not have: heads of keys that several ranks have, weights
of codes, adapters; and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rootlace.kernels.codes import Codes
from rootlace.kernels.reference.layers import dequantise
from rootlace.kernels.weights import CODES, Quantised, Scheme, columns_of
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.parallel.shard import Shard, why_not
from rootlace.wire.errors import UnsupportedModel
from tests.model import lora
from tests.model.checkpoints import SHAPE, configs, reference_logprobs, save
from tests.model.parallel.local_ranks import CPU, divided_logprobs
from tests.model.quantised_checkpoints import quantised
from tests.model.test_quantised_checkpoints import FORMATS, matrix

TOKENS = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], 13).tolist()


THREE = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}


def spec_of(name: str, folder: Path, **changes: int) -> ModelSpec:
    config: PreTrainedConfig = configs()[name]
    config.update(changes)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return ModelConfig.read(folder).spec


@pytest.mark.parametrize("name", ["llama-biased", "olmo2-biased"])
def test_a_head_of_keys_of_several_ranks(name: str, tmp_path: Path) -> None:
    """Four ranks, of which two or four have the same; where heads are normed together, too."""
    expected = reference_logprobs(save(configs()[name], tmp_path), TOKENS)
    found = divided_logprobs(ModelConfig.read(tmp_path), 4, TOKENS, 5)
    assert (found - expected).abs().max() < 1e-4


def test_every_row_and_column_is_some_ranks(tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path)
    shards = [Shard(spec, rank, 2) for rank in range(2)]
    assert sorted(row for one in shards for row in one.rows("qkv", 128) or ()) == [*range(128)]
    assert shards[1].rows("qkv", 128) == [*range(32, 64), *range(80, 96), *range(112, 128)]
    assert [one.columns("down", 96) for one in shards] == [range(48), range(48, 96)]
    assert [one.adds_bias("down") for one in shards] == [True, False]
    assert all(one.adds_bias("gate_up") for one in shards)
    assert [one.vocabulary for one in shards] == [range(100), range(100, 199)]


@pytest.mark.parametrize(
    "name, changes, count, said",
    [
        ("llama", {}, 3, "attention.num_heads 4 is not a multiple of 3"),
        ("llama", {"intermediate_size": 97}, 2, "mlp.inner_size 97"),
        ("qwen3_moe", {"moe_intermediate_size": 33}, 2, "experts.inner_size 33"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 7}, 2, "experts.shared_size 7"),
        ("llama", THREE, 2, "num_kv_heads 3 is no"),
    ],
)
def test_what_cannot_be_divided(
    name: str, changes: dict[str, int], count: int, said: str, tmp_path: Path
) -> None:
    assert said in str(why_not(spec_of(name, tmp_path, **changes), count))


def test_of_layers_with_experts_alone_the_dense_size_does_not_count(tmp_path: Path) -> None:
    assert why_not(spec_of("olmoe", tmp_path), 2) is None
    spec = spec_of("olmoe", tmp_path)
    assert why_not(replace(spec, mlp=replace(spec.mlp, inner_size=7)), 2) is None


@pytest.mark.parametrize("codes", CODES)
def test_columns_of_codes(codes: Codes) -> None:
    """Units may span several groups."""
    torch.manual_seed(0)
    kind = CODES[codes]
    values = torch.randint(0, 100, (3, 96 // kind.in_byte)).to(kind.dtype)
    scales = torch.randint(1, 50, (3, 6)).to(torch.int8)
    units = torch.rand(3, 2) + 0.5
    weight = Quantised(
        *(Scheme(codes, 16, offsets=True), values, scales, scales.flip(1)),
        units=units,
        offset_units=units * 2,
    )
    whole = dequantise(weight)
    for columns in (range(48), range(48, 96), range(32, 64)):
        part = columns_of(weight, columns)
        assert isinstance(part, Quantised)
        assert torch.equal(dequantise(part), whole[:, columns.start : columns.stop])
    with pytest.raises(ValueError, match="inputs 8 to 24 are not whole groups of 16"):
        columns_of(weight, range(8, 24))
    sorted_by_activations = replace(weight, order=torch.arange(96, dtype=torch.int32).flip(0))
    with pytest.raises(ValueError, match="not in the order of the inputs"):
        columns_of(sorted_by_activations, range(48))


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_adapters_are_divided_as_the_weights_that_they_change(family: str, tmp_path: Path) -> None:
    """The adapters cover all products of a layer, beside those of PEFT's definition."""
    model = save(configs()[family], tmp_path)
    experts = ("gate_proj", "up_proj", "down_proj") if family == "qwen2_moe" else ()
    modules = r"model\.layers\.\d\.\w+\.((shared_expert\.|experts\.\d\.)?\w+_proj|gate)"
    merged = lora.write(tmp_path / "adapter", model, modules, experts=experts)
    expected = reference_logprobs(merged, TOKENS)
    adapters = (f"one={tmp_path / 'adapter'}",)
    found = divided_logprobs(ModelConfig.read(tmp_path), 2, TOKENS, 5, adapters=adapters)
    assert (found - expected).abs().max() < 1e-4


def two_shards(folder: Path) -> list[tuple[torch.Tensor, ...]]:
    """Output, down and gate_up of layer 1: of the whole, and of two ranks."""
    config = ModelConfig.read(folder)
    found = []
    for shard in (None, Shard(config.spec, 0, 2), Shard(config.spec, 1, 2)):
        layer = load_weights(config, torch.float32, CPU, shard=shard).layers[1]
        assert layer.gate_up is not None and layer.down is not None
        found.append(tuple(map(matrix, (layer.output, layer.down, layer.gate_up))))
    return found


def test_quantised_weights_are_divided_between_their_groups(tmp_path: Path) -> None:
    settings, write = FORMATS["ct-int8"]()
    quantised(configs()["qwen2"], tmp_path, settings, write)
    whole, *parts = two_shards(tmp_path / "quantised")
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts], dim=1), whole[index])
    (one, other) = (part[2].chunk(2) for part in parts)
    assert torch.equal(torch.cat([one[0], other[0], one[1], other[1]]), whole[2])


def test_quantised_weights_that_cannot_be_divided_are_named(tmp_path: Path) -> None:
    settings, write = FORMATS["ct-int4"]()
    quantised(configs()["qwen2"], tmp_path, settings, write)
    said = r"layers\.1\.mlp\.down_proj .* inputs 0 to 48 are not whole groups of 32"
    with pytest.raises(UnsupportedModel, match=said):
        two_shards(tmp_path / "quantised")
