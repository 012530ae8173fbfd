"""Configurations of quantised checkpoints: refusals by name, and accepted ones."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoRoundConfig,
    AwqConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
)

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import open_checkpoint
from rootlace.runtime.model.checkpoint.quantised.methods import METHODS, OTHERS
from rootlace.wire.errors import UnsupportedModel
from tests.model.checkpoints import configs, save
from tests.model.quantised_checkpoints import WEIGHTS, edit, gptq
from tests.model.test_quantised_checkpoints import FORMATS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint whose configuration tests replace; its weights are not read."""
    found = tmp_path_factory.mktemp("model")
    save(configs()["llama"], found)
    return found


def refusal(folder: Path, settings: Any) -> str:
    edit(folder, quantization_config=settings)
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.read(folder)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("method", [*sorted(OTHERS), "a-new-one"])
def test_other_methods(folder: Path, method: str) -> None:
    """The refusal names the methods that are read."""
    found = refusal(folder, {"quant_method": method, "bits": 4})
    assert f"quantization_config.quant_method {method!r}" in found
    assert all(name in found for name in METHODS)
    assert "not quantised" in found


def test_methods_without_a_name(folder: Path) -> None:
    assert "bitsandbytes" in refusal(folder, {"load_in_4bit": True})
    assert "quant_method" in refusal(folder, {"bits": 4})
    assert "not an object" in refusal(folder, [4])
    edit(folder, quantization_config=None, quantization={"group_size": 64, "bits": 4})
    with pytest.raises(UnsupportedModel, match=r"quantization .*MLX"):
        ModelConfig.read(folder)
    edit(folder, quantization=None)


@pytest.mark.parametrize(
    "settings",
    [
        FineGrainedFP8Config(),
        FineGrainedFP8Config(activation_scheme="static", weight_block_size=None),
        FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"]),
        GPTQConfig(bits=4),
        AwqConfig(bits=4),
        Mxfp4Config(),
        AutoRoundConfig(bits=4),
    ],
)
def test_what_transformers_writes(folder: Path, settings: Any) -> None:
    """Each key of the objects of this release of transformers is read."""
    edit(folder, quantization_config=json.loads(json.dumps(settings.to_dict(), default=str)))
    assert ModelConfig.read(folder).quantisation is not None


@pytest.mark.parametrize(
    ("name", "who", "stored"),
    [
        ("quantize_config.json", "AutoGPTQ", "q_proj.qweight"),
        ("quant_config.json", "AutoAWQ", "q_proj.qweight"),
        ("hf_quant_config.json", "ModelOpt", None),
        ("quanto_qmap.json", "Quanto", "q_proj.weight._data"),
    ],
)
def test_described_beside_the_configuration(
    tmp_path: Path, name: str, who: str, stored: str | None
) -> None:
    """Libraries that say in a file of their own how weights are stored: the refusal names it."""
    save(configs()["llama"], tmp_path)
    weights, q_proj = tmp_path / WEIGHTS, "model.layers.0.self_attn.q_proj"
    tensors = {key: tensor.clone() for key, tensor in load_file(weights).items()}
    if stored is None:  # codes under the name of the weight, and their scales
        tensors[f"{q_proj}.weight_scale"] = torch.ones(1)
    else:
        tensors[f"model.layers.0.self_attn.{stored}"] = tensors.pop(f"{q_proj}.weight")
    save_file(tensors, weights)
    with pytest.raises(UnsupportedModel, match=rf"{q_proj}\.weight\w*$"):
        open_checkpoint(ModelConfig.read(tmp_path))
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedModel, match=rf"{q_proj}.*{name} .*{who}.*quantization_config"):
        open_checkpoint(ModelConfig.read(tmp_path))


def changed(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`settings` with another value at a path such as "config_groups.group_0.weights.num_bits"."""
    key, _, rest = path.partition(".")
    inner = changed(settings.get(key) or {}, rest, value) if rest else value
    return settings | {key: inner}


GROUP = "config_groups.group_0"
CHANGES: list[tuple[str, str, Any]] = [
    ("awq", "version", "gemv"),
    ("awq", "checkpoint_format", "llm-awq"),
    ("awq", "method", "gptq"),
    ("awq", "pack_dtype", "int16"),
    ("awq", "dynamic", {"+:(": {}}),
    ("awq", "dynamic.+:q_proj", {"bits": 8}),
    ("awq", "bits", 8),
    ("awq", "zero_point", "no"),
    ("awq", "data_type", "fp"),
    ("awq", "group_size", 0),
    ("awq", "no_such_key", 1),
    ("awq", "pack_method", "order"),
    ("awq", "export", {"pack_method": "order"}),
    ("awq", "export", {"weight_format": "fake_quantized"}),
    ("gptq", "bits", 3),
    ("gptq", "checkpoint_format", "marlin"),
    ("gptq", "is_marlin_format", True),
    ("gptq", "group_size", "wide"),
    ("gptq", "sym", "yes"),
    ("gptq", "dynamic", {"+:(": {}}),
    ("gptq", "dynamic.+:q_proj", {"bits": 2}),
    ("gptq", "dynamic.+:q_proj", {"rotation": "hadamard"}),
    ("gptq", "adapter", {"name": "lora"}),
    ("fp8", "fmt", "e5m2"),
    ("fp8", "activation_scheme", "none"),
    ("fp8", "weight_block_size", [128]),
    ("fp8", "modules_to_convert", ["model.embed_tokens"]),
    ("fp8", "expert_dtype", "fp4"),
    ("fp8", "data_type", "int"),
    ("mxfp4", "no_such_key", True),
    ("auto-round-gptq", "bits", 3),
    ("auto-round-gptq", "data_type", "mx_fp"),
    ("auto-round-gptq", "packing_format", "auto_round:fake"),
    ("auto-round-gptq", "no_such_key", 1),
    ("auto-round-gptq", "rotation_configs", [{}]),
    ("auto-round-gptq", "extra_config.lm_head", {"bits": 2}),
    ("auto-round-gptq", "extra_config.lm_head", {"rotation_config": {"kind": "hadamard"}}),
    ("auto-round-gptq", "extra_config", {"(": {"bits": 8}}),
    ("auto-round-awq", "bits", 8),
    ("auto-round-fp8", "fmt", "e5m2"),
    ("auto-round-mxfp4", "group_size", 16),
    ("auto-round-nvfp4", "data_type", "nvfp4_v2"),
    ("ct-int4", "format", "marlin-24"),
    ("ct-int4", "format", "sparse-24-bitmask"),
    ("ct-int4", "sparsity_config", {"format": "sparse-24-bitmask"}),
    ("ct-int4", "transform_config", {"config_groups": {"R1": {}}}),
    ("ct-int4", "ignore", ["re:("]),
    ("ct-int4", "no_such_key", 1),
    ("ct-int4", f"{GROUP}.targets", ["Embedding"]),
    ("ct-int4", f"{GROUP}.targets", "Linear"),
    ("ct-int4", f"{GROUP}.no_such_key", 1),
    ("ct-int4", f"{GROUP}.weights.num_bits", 3),
    ("ct-int4", f"{GROUP}.weights.type", "float"),
    ("ct-int4", f"{GROUP}.weights.dynamic", True),
    ("ct-int4", f"{GROUP}.weights.strategy", "block"),
    ("ct-int4", f"{GROUP}.weights.strategy", "token"),
    ("ct-int4", f"{GROUP}.weights.no_such_key", 1),
    ("ct-fp8-blocks", f"{GROUP}.weights.block_structure", "wide"),
    ("ct-fp8", f"{GROUP}.weights.symmetric", False),
]


@pytest.mark.parametrize(("name", "path", "value"), CHANGES)
def test_keys_are_refused_by_name(folder: Path, name: str, path: str, value: Any) -> None:
    settings, _ = FORMATS[name]()
    edit(folder, quantization_config=settings)
    assert ModelConfig.read(folder).quantisation is not None
    found = refusal(folder, changed(settings, path, value))
    assert "quantization_config." in found
    named = path.rpartition(".")[2]
    inner = next(iter(value), "") if isinstance(value, dict) else ""
    # Of weights that do not fit together, all of them are named.
    assert named in found or inner in found or "weights" in found


SLOW = {
    "a repetition in a repetition": r"([a-z0-9_]*\.?)*!",
    "with a bound": r"(([a-z]{1,40}){1,40}){1,40}!",
    "that is possessive": r"(?:[a-z.]*+[a-z]*)*!",
    "in a look ahead": r"(?=(.*\.*)*!)q",
    "alternatives of the same": r"(a|a)*!",
    "that differ later": r"(ab|a.|.b)+!",
    "one behind the other": "(?:.|[a-z])" * 40 + "!",
    "repetitions in a row": r".*" * 12 + "!",
    "options in a row": r"[a-z]?" * 40 + "!",
    "nothing many times": r"(?:(?:(?=m)){60000}){60000}!",
    "a long one": "a" * 10_000,
    "a deep one": "(" * 450 + "a*" + ")*" * 450,
}


@pytest.mark.parametrize("why", SLOW)
def test_patterns_that_take_long_are_refused(folder: Path, why: str) -> None:
    settings, _ = FORMATS["ct-int4"]()
    found = refusal(folder, changed(settings, "ignore", ["re:" + SLOW[why]]))
    assert "quantization_config.ignore" in found
    assert "might take too long" in found
    assert len(found) < 400
    found = refusal(folder, gptq(4, 32)[0] | {"dynamic": {"-:" + SLOW[why]: {}}})
    assert "might take too long" in found


QUICK = [
    r".*mlp\.gate$",
    r".*\.layers\.\d+\.mlp\.experts\.[0-9]+\..*_proj.*",
    r"^(?!.*(?:self_attn|mlp)).*$",
    r".*\.(?:gate|up|down)_proj$",
    r"model\.layers\.(?:0|1|2|3|[1-9][0-9]|1[0-9]{2})\..*",
    r"(?:language_)?model\.layers\.[0-9]*\.(self_attn|linear_attn)\.(q|k|v|o)_proj",
    r"(?>.*self_attn)",
    r"visual.*",
]


@pytest.mark.parametrize("pattern", QUICK)
def test_patterns_of_other_files_are_read(folder: Path, pattern: str) -> None:
    settings, _ = FORMATS["ct-int4"]()
    edit(folder, quantization_config=settings | {"ignore": ["re:" + pattern]})
    found = ModelConfig.read(folder).quantisation
    assert found is not None
    assert found.rules[0].pattern.pattern == pattern


# As models on the Hugging Face hub have it: what AutoGPTQ, GPTQModel, AutoAWQ, llm-compressor,
# AutoFP8, Qwen and Mistral write.
SEEN: list[tuple[dict[str, Any], str]] = [
    (
        {
            "batch_size": 1,
            "bits": 4,
            "block_name_to_quantize": None,
            "cache_block_outputs": True,
            "damp_percent": 0.01,
            "dataset": None,
            "desc_act": False,
            "exllama_config": {"version": 1},
            "group_size": 128,
            "max_input_length": None,
            "model_seqlen": None,
            "module_name_preceding_first_block": None,
            "modules_in_block_to_quantize": None,
            "pad_token_id": None,
            "quant_method": "gptq",
            "sym": True,
            "tokenizer": None,
            "true_sequential": True,
            "use_cuda_fp16": False,
            "use_exllama": True,
        },
        "int4",
    ),
    (
        {
            "bits": 8,
            "checkpoint_format": "gptq_v2",
            "desc_act": True,
            "dynamic": None,
            "group_size": 32,
            "lm_head": False,
            "meta": {
                "damp_percent": 0.005,
                "quantizer": ["gptqmodel:2.2.0"],
                "static_groups": False,
            },
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": False,
            "true_sequential": True,
        },
        "int8",
    ),
    (
        {
            "bits": 4,
            "damp_percent": 0.1,
            "desc_act": True,
            "group_size": 128,
            "is_marlin_format": False,
            "model_file_base_name": "model",
            "model_name_or_path": None,
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
        },
        "int4",
    ),
    (
        {
            "backend": "autoawq",
            "bits": 4,
            "do_fuse": False,
            "exllama_config": None,
            "fuse_max_seq_len": None,
            "group_size": 128,
            "modules_to_fuse": None,
            "modules_to_not_convert": ["lm_head"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "int4",
    ),
    (
        {
            "config_groups": {
                "group_0": {
                    "format": "float-quantized",
                    "input_activations": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": True,
                        "group_size": None,
                        "num_bits": 8,
                        "observer": None,
                        "observer_kwargs": {},
                        "strategy": "token",
                        "symmetric": True,
                        "type": "float",
                    },
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": None,
                        "num_bits": 8,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "strategy": "channel",
                        "symmetric": True,
                        "type": "float",
                    },
                }
            },
            "format": "float-quantized",
            "global_compression_ratio": 1.24,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.12.3",
        },
        "fp8_e4m3",
    ),
    (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "fp8_e4m3",
    ),
    (
        {
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
        "fp8_e4m3",
    ),
    (
        {
            "activation_scheme": "static",
            "dequantize": False,
            "modules_to_not_convert": ["lm_head"],
            "quant_method": "fp8",
            "weight_block_size": None,
        },
        "fp8_e4m3",
    ),
]


@pytest.mark.parametrize(("settings", "code"), SEEN)
def test_what_the_hub_has_is_read(folder: Path, settings: dict[str, Any], code: str) -> None:
    edit(folder, quantization_config=settings)
    found = ModelConfig.read(folder).quantisation
    assert found is not None
    assert found.codes == {code}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def paths(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


@given(data=st.data())
def test_any_other_value_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    """Nothing else is raised, whatever a configuration says."""
    settings = data.draw(st.sampled_from(SEEN))[0]
    path = data.draw(st.sampled_from(sorted(paths(settings))))
    edit(folder, quantization_config=changed(settings, path, data.draw(VALUES)))
    with contextlib.suppress(UnsupportedModel):
        ModelConfig.read(folder)


HARMLESS = [
    ("awq", {"backend": "autoawq", "do_fuse": False, "version": "GEMM", "sym": True}),
    ("gptq", {"use_exllama": True, "dataset": "c4", "lm_head": False, "pack_dtype": "int32"}),
    ("fp8", {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0", "kv_cache_scheme": None}),
    ("ct-int4", {"version": "0.9.1", "sparsity_config": {}, "transform_config": {}}),
    ("ct-int4", {"global_compression_ratio": 1.5, "quantization_status": "frozen"}),
    (
        "ct-int4",
        {"transform_config": {"config_groups": {}}, "sparsity_config": {"format": "dense"}},
    ),
    ("ct-int4", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}),
]


@pytest.mark.parametrize(("name", "more"), HARMLESS)
def test_harmless_keys(folder: Path, name: str, more: dict[str, Any]) -> None:
    settings, _ = FORMATS[name]()
    edit(folder, quantization_config=settings | more)
    assert ModelConfig.read(folder).quantisation is not None


def test_what_is_refused_is_refused_without_torch(folder: Path) -> None:
    edit(folder, quantization_config={"quant_method": "hqq"})
    code = (
        "import sys\n"
        "from rootlace.runtime.model.checkpoint.config import ModelConfig\n"
        "from rootlace.wire.errors import UnsupportedModel\n"
        "try:\n"
        "    ModelConfig.read(sys.argv[1])\n"
        "except UnsupportedModel as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert "HQQ" in found.stdout
    assert found.stdout.strip().endswith("False")
