"""Configuration files, without weights: read, or refused by a message that names them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.config_reader import IGNORED
from rootlace.runtime.model.families.reading import OF_KIND
from rootlace.wire.errors import UnsupportedModel
from tests.model.checkpoints import configs
from tests.model.hub_keys import HUB_KEYS
from tests.model.test_families import ABSENT, LAYERS, NAMES


def architecture(config: PreTrainedConfig) -> str:
    """Return transformers' class name of a configuration's decoder."""
    return str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def write_config(name: str, folder: Path, edit: dict[str, Any]) -> Path:
    """The file of a configuration without weights, with other values of keys."""
    config = configs()[name]
    config.architectures = [architecture(config)]
    config.save_pretrained(folder)
    file = folder / "config.json"
    edited = json.loads(file.read_text()) | edit
    file.write_text(json.dumps({k: v for k, v in edited.items() if v is not ABSENT}))
    return file


OLD_LINEAR = {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 8.0}}
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"no_such_key": 3}, ["config.json", "no_such_key 3", "not known"]),
    ("llama", {"is_causal": False}, ["is_causal", "False", "only True"]),
    ("llama", {"model_type": "mistral"}, ["model_type", "mistral", "LlamaForCausalLM"]),
    # transformers takes these for files without a scaling, and we would not.
    ("gemma3", OLD_LINEAR, ["rope_scaling", "write `rope_type`"]),
    ("olmo3", OLD_LINEAR, ["rope_scaling", "write `rope_type`"]),
    ("falcon", {"ff_factor": 4}, ["ff_factor 4", "ffn_hidden_size is 128"]),
    ("qwen3_moe", {"use_qk_norm": False}, ["use_qk_norm False", "only True"]),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, ["shared_expert_inter", "only 0"]),
    ("gemma2", {"sliding_window_size": 7}, ["sliding_window_size 7", "only 6"]),
    ("gemma2", {"hidden_act": "relu"}, ["hidden_act 'relu'", "hidden_activation"]),
    ("gemma3", {"hidden_act": "silu"}, ["hidden_act 'silu'", "hidden_activation"]),
    ("granite", {"logits_scaling": 0}, ["logits_scaling 0", "positive"]),
    ("llama", {"architectures": [["X"]]}, ["architectures [['X']]", "list of texts"]),
    ("llama", {"architectures": "LlamaForCausalLM"}, ["architectures 'Llama", "list of texts"]),
    ("llama", {"rms_norm_eps": -1}, ["rms_norm_eps -1", "at least 0"]),
    ("llama", {"head_dim": None, "num_attention_heads": 128}, ["a head of 0 numbers"]),
    ("llama", {"rope_parameters": None, "rope_theta": -5}, ["json: rope_theta -5", "positive"]),
    ("gemma3", {"rope_parameters": None, "rope_theta": -5}, ["json: rope_theta -5", "positive"]),
    ("glm", {"rope_parameters": None, "partial_rotary_factor": 3}, ["partial_rotary_factor 3:"]),
    ("llama", {"torch_dtype": "bogus"}, ["torch_dtype 'bogus'", "bfloat16"]),
    ("llama", {"layer_types": ["sliding_attention"] * LAYERS}, ["layer_types", "sliding"]),
    (
        "phi3-partial",
        {"rope_parameters": configs()["phi3-partial"].rope_parameters | {"long_factor": [2.0]}},
        ["rope_parameters", "long_factor has 1 numbers, and 6 pairs"],
    ),
    (
        "phi3-partial",
        {"original_max_position_embeddings": None},
        ["original_max_position_embeddings None", "longrope"],
    ),
]


@pytest.mark.parametrize(("name", "edit", "words"), REFUSED)
def test_what_is_refused_is_named(
    name: str, edit: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    write_config(name, tmp_path, edit)
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.read(tmp_path)
    for word in words:
        assert word in str(caught.value)


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"layer_types": ["full_attention"] * LAYERS}),
    ("llama", {"rope_theta": None}),  # `rope_parameters` has it
    (
        "llama-yarn",
        {"rope_parameters": {**configs()["llama-yarn"].rope_parameters, "type": "yarn"}},
    ),
    ("phi3-partial", {"torch_dtype": "torch.bfloat16", "dtype": None}),
    ("gemma2", {"hidden_act": "gelu_new"}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 0}),
]


@pytest.mark.parametrize(("name", "edit"), ACCEPTED)
def test_what_changes_nothing_is_accepted(name: str, edit: dict[str, Any], tmp_path: Path) -> None:
    write_config(name, tmp_path, {})
    plain = ModelConfig.read(tmp_path).spec
    write_config(name, tmp_path, edit)
    found = ModelConfig.read(tmp_path).spec
    for spec in (found, plain):
        spec.rope.parameters.pop("type", None)
    assert found == plain


def test_finetuned_is_a_remark(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
    for scaling in (yarn, yarn | {"finetuned": True}):
        file = write_config("llama", tmp_path, {"rope_parameters": None, "rope_scaling": scaling})
        assert file.exists() and ModelConfig.read(tmp_path).spec.max_context == 1024


def test_keys_that_the_user_knows_to_be_harmless(tmp_path: Path) -> None:
    write_config("llama", tmp_path, {"remark": 3, "other": [1]})
    with pytest.raises(UnsupportedModel, match=r"other \[1\].*--ignore-config-keys"):
        ModelConfig.read(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"remark 3: this key is not known"):
        ModelConfig.read(tmp_path, ignored=["other"])
    plain = ModelConfig.read(tmp_path, ignored=["other", "remark", "absent"])
    write_config("llama", tmp_path, {})
    assert plain.spec == ModelConfig.read(tmp_path).spec
    # What counts is not passed over: what some family reads, or has one supported value.
    others = {"logits_scaling": 2.0, "final_logit_softcapping": 30.0, "no_rope_layers": [1, 0]}
    for key, value in {"rms_norm_eps": 1e-3, "attention_multiplier": 0.5, **others}.items():
        write_config("llama", tmp_path, {key: value})
        with pytest.raises(UnsupportedModel, match=f"{key}.*changes what is computed"):
            ModelConfig.read(tmp_path, ignored=[key])
    write_config("llama", tmp_path, {"use_mrope": True})
    with pytest.raises(UnsupportedModel, match="use_mrope True: only False is supported"):
        ModelConfig.read(tmp_path, ignored=["use_mrope"])


def test_modules_that_ask_an_input_are_refused_in_our_own_words(tmp_path: Path) -> None:
    config = {"architectures": ["JetMoeForCausalLM"], "model_type": "jetmoe", "hidden_size": 64}
    config |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16}
    config |= {"intermediate_size": 64, "num_local_experts": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"JetMoe.* by numbers that only an input gives$"):
        ModelConfig.read(tmp_path)


def test_internlm3_as_it_is_published(tmp_path: Path) -> None:
    """The file names its own architecture, and keys by its own code's names."""
    edit = {"attention_bias": ABSENT, "mlp_bias": ABSENT, "architectures": ["InternLM3ForCausalLM"]}
    for bias in (False, True):
        write_config("internlm3", tmp_path, {"attention_bias": bias, "mlp_bias": bias})
        saved = ModelConfig.read(tmp_path).spec
        write_config("internlm3", tmp_path, {**edit, "qkv_bias": bias, "bias": bias})
        assert ModelConfig.read(tmp_path).spec == saved
        assert saved.attention.output_bias is bias
    write_config("internlm3", tmp_path, {**edit, "qkv_bias": True, "bias": False})
    with pytest.raises(UnsupportedModel, match="qkv_bias True: only the same value"):
        ModelConfig.read(tmp_path)


@pytest.mark.skipif("exaone" not in configs(), reason="this transformers does not have it")
def test_exaone_as_it_is_published(tmp_path: Path) -> None:
    """The file names its own architecture, and keys by its own code's names."""
    write_config("exaone", tmp_path, {})
    saved = ModelConfig.read(tmp_path).spec
    edit = {
        "architectures": ["ExaoneForCausalLM"],
        "num_hidden_layers": ABSENT,
        "num_layers": 3,
        "rms_norm_eps": ABSENT,
        "layer_norm_epsilon": 0.25,
        "hidden_act": ABSENT,
        "activation_function": "silu",
    }
    write_config("exaone", tmp_path, edit)
    assert ModelConfig.read(tmp_path).spec == saved
    write_config("exaone", tmp_path, {"eos_token_id": ABSENT})
    with pytest.raises(UnsupportedModel, match="eos_token_id is missing"):
        ModelConfig.read(tmp_path)


@pytest.mark.skipif("sarvam_mla" not in configs(), reason="this transformers does not have it")
def test_sarvam_as_it_is_published(tmp_path: Path) -> None:
    """The file names its own architecture, and keys by its own code's names."""
    write_config("sarvam_mla", tmp_path, {"rope_parameters": None})
    saved = ModelConfig.read(tmp_path).spec
    published = {
        **HUB_KEYS["sarvam_mla"],
        "rope_scaling": None,
        "n_routed_experts": ABSENT,
        "num_experts": 8,
        "n_shared_experts": ABSENT,
        "num_shared_experts": 1,
        "qk_head_dim": ABSENT,
        "n_group": ABSENT,
        "topk_group": ABSENT,
        "num_nextn_predict_layers": ABSENT,
    }
    write_config("sarvam_mla", tmp_path, published)
    assert ModelConfig.read(tmp_path).spec == saved
    assert saved.experts is not None and (saved.experts.count, saved.experts.groups) == (8, 1)
    for key, value in {"score_function": "softmax", "use_qk_norm": False}.items():
        write_config("sarvam_mla", tmp_path, published | {key: value})
        with pytest.raises(UnsupportedModel, match=f"{key} .*only"):
            ModelConfig.read(tmp_path)


ODD = [None, True, 0, -1, 1, 5e-324, 1e308, 10**400, "x", [["x"]], [0], {"x": []}]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=() if n in ("phi3-partial", "granite", "gemma3") else pytest.mark.slow
        )
        for n in (*NAMES, "phi3-partial")
    ],
)
def test_whatever_a_file_says_it_is_read_or_refused(name: str, tmp_path: Path) -> None:
    file = write_config(name, tmp_path, {})
    plain = json.loads(file.read_text())
    keys = {"rope_scaling", "rope_theta", *plain}
    edits: list[dict[str, Any]] = [{key: odd} for key in keys - IGNORED for odd in ODD]
    edits += [{key: odd} for key in ("architectures", "dtype", "eos_token_id") for odd in ODD]
    for kind, parameters in OF_KIND.items() if name == "granite" else ():
        rope = plain["rope_parameters"] | {"rope_type": kind}
        edits += [{"rope_parameters": rope | {key: odd}} for key in parameters for odd in ODD]
    outcomes = set()
    for edit in edits:
        file.write_text(json.dumps(plain | edit))
        try:
            outcomes.add(type(ModelConfig.read(tmp_path)))
        except UnsupportedModel as error:
            outcomes.add(type(error))
    assert outcomes == {ModelConfig, UnsupportedModel}


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "\udcff", '{"a": 1' + "0" * 5000 + "}"])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelConfig.read(tmp_path)


def test_keys_that_say_how_to_sample_are_known() -> None:
    assert GenerationConfig().to_dict().keys() <= IGNORED


# An EXAONE that says none is refused.
BY_TYPE = {config.model_type: n for n, config in configs().items() if config.model_type != "exaone"}


@pytest.mark.parametrize("name", BY_TYPE.values())
def test_tokens_that_begin_and_end_a_text(name: str, tmp_path: Path) -> None:
    """If neither file names such tokens, the family's count."""
    config = configs()[name]
    config.architectures = [architecture(config)]
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    plain = {k: v for k, v in json.loads(file.read_text()).items() if not k.endswith("_token_id")}
    file.write_text(json.dumps(plain))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), ModelConfig.read(tmp_path)
    eos = theirs.eos_token_id
    expected = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, expected)


def test_a_length_that_scaling_has_led_to(tmp_path: Path) -> None:
    """Gemma 3 states this length, though its scaling is `linear`."""
    config = configs()["gemma3"]
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert config.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert ModelConfig.read(tmp_path).spec.max_context == config.max_position_embeddings
