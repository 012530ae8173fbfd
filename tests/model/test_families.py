"""Every key of a family's configuration is computed as transformers does, or refused by name."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.families.table import families
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, configs, reference, reference_logprobs, save
from tests.model.hub_keys import HUB_KEYS
from tests.model.plans import Blocks, Row, Work, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")

Kernels = Literal["auto", "reference"]
KERNELS: tuple[Kernels, ...] = ("auto", "reference")
"""`auto`: the native kernels, where there is a compiler and they know the model."""
TOKENS = [5, 150, 7, 32, 9, 11, 4, 77, 3, 60, 198, 41]
LAYERS = SHAPE["num_hidden_layers"]
ALL = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=100, seed=0)
NAMES = (
    "llama",
    "mistral-sliding",
    "ministral",
    "ministral3",
    "qwen2-sliding",
    "qwen3",
    "granite",
    "phi3",
    "smollm3-sliding",
    "olmo2-biased",
    "gemma2",
    "gemma3",
    "olmo3",
    "glm",
    "glm4",
    "cohere2",
    "exaone4",
    "starcoder2-sliding",
    "gpt_neox",
    "stablelm",
    "gpt2",
    "opt",
    "cohere",
    "falcon",
    "falcon-grouped",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    *(name for name in ("exaone", "sarvam_mla") if name in CONFIG_MAPPING),
)
# What files call the number in their norms' roots, where it is not `rms_norm_eps`.
EPS = dict.fromkeys(("cohere", "cohere2", "gpt_neox", "stablelm"), "layer_norm_eps")
EPS |= {"starcoder2-sliding": "norm_epsilon", "gpt2": "layer_norm_epsilon"}
EPS |= dict.fromkeys(("falcon", "falcon-grouped"), "layer_norm_epsilon")
EPS["opt"] = "init_std"  # it has no such key
LEARNED_POSITIONS = ("gpt2", "opt")

SHARED = {"__init__", "config_reader", "reading", "spec", "table"}
ABSENT = object()

# Where transformers fails: it divides for every family but Ministral, wants 1.0 and not 1, and its
# own padding token is beyond a small vocabulary. Falcon's heads cannot be given a size, and with
# `output_attentions` its tokens see later ones, unless attention is `eager`, which agrees with us.
ONLY_OURS = [
    ("ministral", "head_dim", ABSENT),
    ("gemma3", "final_logit_softcapping", 1),
    *((name, "head_dim", 16) for name in ("falcon", "falcon-grouped")),
    *((name, "output_attentions", True) for name in ("falcon", "falcon-grouped")),
    *((name, "pad_token_id", ABSENT) for name in ("phi3", "smollm3-sliding", "glm", "glm4")),
]

# Values that mean something, where a number more or less does not.
TELLING: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu", "swish"],
    "layer_types": [
        ["full_attention"] * LAYERS,
        ["sliding_attention"] * LAYERS,
        ["full_attention", "sliding_attention", "full_attention"],
        ["linear_attention"] * LAYERS,
    ],
    "sliding_window": [None, 0, 2, 6],
    "hidden_activation": ["silu", "gelu"],
    "tie_word_embeddings": [True, False],
    "no_rope_layers": [None, [1, 0, 1], [1, 1], [0, 0, 0, 1], ["no"] * LAYERS],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"type": "yarn", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0},
        {
            "type": "su",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
        {"rope_theta": 500.0},
        {"rope_theta": "wide"},
        {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
        {
            "sliding_attention": {"rope_theta": 500.0},
            "full_attention": {"partial_rotary_factor": 0.5},
        },
        {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {}},
        {"sliding_attention": {"rope_theta": 500.0}, "full_attention": [1.0]},
        [500.0],
    ],
    "architectures": [["GemmaForCausalLM"], []],
    "model_type": ["mistral", "qwen2", "gemma"],
    "per_layer_config": [{"1": {"num_key_value_heads": 1}}],
}
# Keys of no family's configuration class that have been seen in checkpoints.
STRANGERS: dict[str, list[Any]] = {
    "layer_types": TELLING["layer_types"],
    "sliding_window": [2],
    "use_sliding_window": [True],
    "head_dim": [8, 16],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "rope_theta": [500.0],
    "rope_local_base_freq": [500.0],
    "sliding_window_pattern": [1, 3],
    "rope_scaling": [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"type": "mrope", "mrope_section": [2, 3, 3]},
    ],
    "partial_rotary_factor": [0.5],
    "is_causal": [False],
    "quantization_config": [{"quant_method": "gptq"}],
    "attn_logit_softcapping": [30.0],
    "query_pre_attn_scalar": [7],
    "dual_chunk_attention_config": [{"chunk_size": 4}],
    "logits_scaling": [4.0],
    "no_such_key": [1],
}
# Keys of no consequence that must not keep anybody from running a model.
HARMLESS = {
    "torch_dtype": "float32",
    "unsloth_fixed": True,
    "transformers.js_config": {},
    "temperature": 0.7,
    "max_length": 20,
    "bad_words_ids": None,
    "tokenizer_class": "LlamaTokenizer",
    "max_sequence_length": 2048,
    "pruned_heads": {},
    "is_decoder": False,
    "use_mrope": False,
    "_name_or_path": "someone/some-model",
    "no_such_key": None,
    "sliding_window": None,
}


def changed(value: object) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(value // 2, 1)]
    if isinstance(value, float):
        return [2.0 * value + 0.25]
    if value is None:
        return [1, True]
    return []


def cases(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    """(key, another value) of every key, and of keys that the class does not have."""
    known = config.to_dict()
    del known["return_dict"]  # in which form transformers' model answers the test
    found = {key: TELLING.get(key) or changed(value) for key, value in known.items()}
    found |= {key: STRANGERS[key] for key in STRANGERS if key not in known}
    found["per_layer_config"] = TELLING["per_layer_config"]
    return [(key, value) for key, values in found.items() for value in values]


def ours(folder: Path, key: str = "", kernels: Kernels = "reference") -> torch.Tensor | None:
    """The best logprobs after `TOKENS`, float64; None: refused, by name of the `key`."""
    try:
        executor = ExecutorConfig(model=str(folder), kernels=kernels, dtype="float32")
        runner = ModelRunner.load(executor, CacheConfig(4, 16), 64, 4)
    except (UnsupportedModel, InvalidRequest) as error:
        assert str(folder) in str(error)
        assert names_it(key, str(error).replace(str(folder), ""))
        return None
    work = Work(Row(Blocks(16, 4), list(TOKENS)), params=ALL)
    scores = runner.run(make_plan([work])).scores[0]
    assert scores is not None
    return torch.from_numpy(scores.top_logprobs[0]).double()


# A value of these keys may be what another key does not fit.
ELSEWHERE = {
    "architectures": ("model_type",),
    "num_hidden_layers": ("layer_types", "no_rope_layers"),
    "num_attention_heads": ("num_key_value_heads", "hidden_size"),
    "sliding_window": ("layer_types",),
    "use_sliding_window": ("layer_types",),
    "head_dim": ("partial_rotary_factor", "hidden_size"),
}


def names_it(key: str, message: str) -> bool:
    """Return whether a refusal names the key; if weights do not fit, the refusal names weights."""
    return (
        key in message
        or "weight" in message
        or ".safetensors: " in message
        or any(one in message for one in ELSEWHERE.get(key, ()))
    )


def theirs(folder: Path, key: str = "") -> torch.Tensor | None:
    """The same by transformers, all sorted; None: it cannot load the folder. Its loader, which
    takes long, is asked only where it is what heeds the `key`."""
    with contextlib.suppress(Exception):
        config = AutoConfig.from_pretrained(folder)
        # EXAONE's files have other names for all weights.
        if key == "tie_word_embeddings" or config.model_type == "exaone":
            model = reference(folder, torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            stored = load_file(folder / "model.safetensors")
            # GPT-NeoX's files have another name for the head than transformers' model.
            stored = {k.replace("embed_out.", "lm_head."): v for k, v in stored.items()}
            stored = with_stacks(stored)
            model.load_state_dict(stored, strict=False)
        return reference_logprobs(model, TOKENS)[-1].sort(descending=True).values
    return None


def with_stacks(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a file's tensors with experts as one tensor, as in transformers' models."""
    found, experts = {}, dict[tuple[str, str], dict[int, torch.Tensor]]()
    for name, tensor in stored.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        parts = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if parts is None:
            found[name] = tensor
            continue
        kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(parts[3], parts[3])
        experts.setdefault((parts[1], kind), {})[int(parts[2])] = tensor
    for (prefix, kind), of in experts.items():
        whole = torch.stack([of[index] for index in range(len(of))])
        if kind == "down_proj":
            found[f"{prefix}.down_proj"] = whole
        elif kind == "gate_proj":
            up = torch.stack([experts[prefix, "up_proj"][index] for index in range(len(of))])
            found[f"{prefix}.gate_up_proj"] = torch.cat((whole, up), dim=1)
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("ministral", "granite") else pytest.mark.slow)
        for n in NAMES
    ],
)
def test_every_key_is_computed_or_refused(name: str, tmp_path: Path) -> None:
    save(configs()[name], tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    spec, usual = ModelConfig.read(tmp_path).spec, ours(tmp_path)
    assert usual is not None
    refused, equal, wrong, unheeded = set(), set(), [], []
    edits = cases(AutoConfig.from_pretrained(tmp_path)) + [(key, ABSENT) for key in plain]
    for key, value in edits:
        rewrite(tmp_path, plain, {key: value})
        if (name, key, value) not in ONLY_OURS and is_read_as(spec, tmp_path):
            unheeded.append((key, value))
            continue
        found = ours(tmp_path, key)
        if found is None:
            refused.add(key)
            continue
        if (name, key, value) in ONLY_OURS:
            continue
        if not agree(found, theirs(tmp_path, key)):
            wrong.append((key, value))
        equal.add(key)
    equal.update(key for key, _ in unheeded)
    while unheeded:  # with one value of each key at a time
        several = dict(unheeded)
        unheeded = [edit for edit in unheeded if several[edit[0]] is not edit[1]]
        wrong += heeded(tmp_path, plain, list(several.items()), usual)
    assert not wrong
    # Both happen, so the test can see either.
    hidden_size = "n_embd" if name == "gpt2" else "hidden_size"
    assert {hidden_size, "per_layer_config", "no_such_key"} <= refused
    assert {EPS.get(name, "rms_norm_eps"), "use_cache"} <= equal
    assert ("rope_parameters" in equal) != (name in LEARNED_POSITIONS)


def rewrite(folder: Path, plain: dict[str, Any], edit: dict[str, Any]) -> None:
    """Write `plain` with other values of keys."""
    edited = {key: value for key, value in (plain | edit).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(edited))


def is_read_as(spec: ModelSpec, folder: Path) -> bool:
    """Whether that is the model that we read from a folder: then we compute the same."""
    with contextlib.suppress(UnsupportedModel):
        found = ModelConfig.read(folder)
        return found.spec == spec and found.quantisation is None
    return False


def heeded(
    folder: Path, plain: dict[str, Any], edits: list[tuple[str, Any]], usual: torch.Tensor
) -> list[tuple[str, Any]]:
    """Return the edits that change transformers' results; halves are tried only if the whole
    does."""
    rewrite(folder, plain, dict(edits))
    slow_loader = "tie_word_embeddings" if "tie_word_embeddings" in dict(edits) else ""
    if agree(usual, theirs(folder, slow_loader)):
        return []
    if len(edits) == 1:
        return edits
    half = len(edits) // 2
    return heeded(folder, plain, edits[:half], usual) + heeded(folder, plain, edits[half:], usual)


def agree(ours: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    return theirs is not None and bool((theirs[: len(ours)] - ours).abs().max() <= 1e-4)


def test_harmless_keys(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    file = tmp_path / "config.json"
    spec = ModelConfig.read(tmp_path).spec
    file.write_text(json.dumps(json.loads(file.read_text()) | HARMLESS))
    assert ModelConfig.read(tmp_path).spec == spec


@pytest.mark.parametrize("name", sorted(HUB_KEYS.keys() & configs().keys()))
def test_files_of_the_hub_are_computed(name: str, tmp_path: Path) -> None:
    save(configs()[name], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | HUB_KEYS[name]))
    expected = theirs(tmp_path)
    for kernels in KERNELS:
        found = ours(tmp_path, kernels=kernels)
        assert found is not None and expected is not None
        assert (expected[: len(found)] - found).abs().max() < 1e-4


def test_original_context_outside_of_rope_parameters(tmp_path: Path) -> None:
    save(configs()["llama-yarn"], tmp_path)
    before = ours(tmp_path)
    file = tmp_path / "config.json"
    edit = {"original_max_position_embeddings": 16}
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    found, expected = ours(tmp_path), theirs(tmp_path)
    assert found is not None
    assert expected is not None
    assert before is not None
    assert (expected[: len(found)] - found).abs().max() < 1e-4
    assert (before - found).abs().max() > 1e-3


def test_mistral_with_layer_types(tmp_path: Path) -> None:
    """Ministral's first form: a Mistral architecture whose layers differ."""
    save(configs()["ministral"], tmp_path)
    file = tmp_path / "config.json"
    old = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    file.write_text(json.dumps(json.loads(file.read_text()) | old))
    assert ModelConfig.read(tmp_path).spec.attention.windows == (7, None, 7)
    found, expected = ours(tmp_path), theirs(tmp_path)
    assert found is not None
    assert expected is not None
    assert (expected[: len(found)] - found).abs().max() < 1e-4


def test_a_family_is_found_by_its_file() -> None:
    files = {file.stem for file in Path("runtime/model/families").glob("*.py")}
    read_in = {family.read.__module__.rpartition(".")[2] for family in families().values()}
    assert read_in == files - SHARED
