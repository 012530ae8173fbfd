"""Translate llama.cpp's architectures to transformers' names, and read their special keys.

An architecture's metadata become the `config.json` that a family reads. `config` reads keys that
most architectures have; this module reads keys of some alone.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Set
from functools import partial
from typing import Any

import msgspec

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    FLAG,
    IGNORED,
    NOT_ASKED,
    NUMBER,
    REQUIRED,
    SIZE,
    ConfigReader,
    Kind,
)
from rootlace.runtime.model.families.gpt import FALCON_KEYS, GPT2_KEYS
from rootlace.runtime.model.families.llama import BETA
from rootlace.runtime.model.families.reading import ORIGINAL
from rootlace.runtime.model.gguf.file import GgufFile, Texts

# Metadata -----------------------------------------------------------------------------------------
#
# Read a GGUF file's metadata: each key of its architecture is read or refused by name.


ONLY: dict[str, Any] = {
    "attention.causal": True,
    "use_parallel_residual": False,
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), 0.0),
    **dict.fromkeys(("expert_count", "expert_shared_count", "expert_used_count"), 0),
    **dict.fromkeys(("attention.shared_kv_layers", "leading_dense_block_count"), 0),
    **dict.fromkeys(("nextn_predict_layers", "pooling_type"), 0),
}
"""Keys of which one value is supported, unless an architecture reads the key."""
REMARKS = ("rope.scaling.finetuned", "tensor_data_layout", "vocab_size")
"""Keys that change nothing. The embedding has the number of tokens."""


class Metadata(ConfigReader):
    """Reader of keys that begin with the architecture's name, given without that name; errors have
    the whole key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._tensors = file.tensors
        self._prefix = f"{architecture}."
        values = {
            key: value.tolist() if isinstance(value, (array, Texts)) else value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        super().__init__(file.path, values)

    def name(self, key: str) -> str:
        return key if key.startswith(self._prefix) else self._prefix + key

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """Return a positive integer. A list with one number for each layer counts as the number if
        all are equal."""
        same = Kind(
            "a positive integer, the same for all layers",
            lambda v: SIZE.fits(v) or (type(v) is list and len(set(v)) == 1 and SIZE.fits(v[0])),
        )
        found = self.get(key, same, default)
        return found[0] if isinstance(found, list) else found

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a number as its author wrote it: files round numbers to float32."""
        return as_written(self.get(key, NUMBER, default))

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def floats(self, name: str) -> list[float] | None:
        """Return the numbers of a small tensor; None if the file lacks it."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            self.refuse(name, f"it is a tensor of {tensor.type.name} {list(tensor.shape)}")
        return [as_written(one) for one in struct.unpack(f"<{tensor.shape[0]}f", tensor.data)]

    def finish(
        self, harmless: Set[str] = IGNORED, by_user: Collection[str] | None = NOT_ASKED
    ) -> None:
        """Refuse the keys that were not read."""
        self.pass_over(*REMARKS)
        for key, value in ONLY.items():
            if self.name(key) not in self._read:
                self.only(key, value)
        super().finish(harmless, by_user)


def as_written(value: Any) -> Any:
    """Return the shortest decimal number that float32 rounds to `value`, if a float32 number."""
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 1e38 and struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


# Architectures ------------------------------------------------------------------------------------


Keys = dict[str, Any]

_PATTERN = Kind(
    "a positive integer or a list of truth values",
    lambda v: (
        (type(v) is int and v > 0)
        or (type(v) is list and all(type(one) in (bool, int) for one in v))
    ),
)


class Architecture(msgspec.Struct, frozen=True):
    """Architecture of llama.cpp. `name` and `model_type` are transformers'. `neighbours`: rows of
    queries and keys are in the order that rotates neighbours with each other. `shifted_norms`:
    weights of norms include the family's offset. `layer_norm_key`: norms are LayerNorm, with their
    epsilon at this key of a `config.json`. `biased`: key of whether queries have biases.
    `all_rotated`: heads are rotated as a whole, unless the file says otherwise. `latent`: attention
    is latent, and lengths of keys and values mean something else. `read` adds keys to a
    `config.json`; `keys`: other names of keys. `parts`: module names unlike other
    architectures'."""

    name: str
    model_type: str
    neighbours: bool = False
    shifted_norms: bool = False
    layer_norm_key: str = ""
    biased: str = ""
    all_rotated: bool = False
    latent: bool = False
    read: Callable[[Metadata, Keys], None] = lambda metadata, keys: None
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)

    def add_keys(self, metadata: Metadata, keys: Keys) -> None:
        """Add the architecture's own keys of a `config.json`."""
        if self.biased:
            keys[self.biased] = _biased(metadata)
        if self.all_rotated:
            keys.setdefault("partial_rotary_factor", 1.0)
        self.read(metadata, keys)


def _biases(metadata: Metadata, keys: Keys) -> None:
    keys |= {
        "attention_bias": _biased(metadata),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


def _llama(metadata: Metadata, keys: Keys) -> None:
    """Read a Llama, one of Mistral's first models (with a stated window), or Mixtral (with
    experts): all their files say `llama`."""
    window = metadata.get("attention.sliding_window", COUNT, 0)
    if metadata.get("expert_count", COUNT, 0):
        keys |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        keys["sliding_window"] = window or None
        _experts(metadata, keys, "num_local_experts")
        return
    _biases(metadata, keys)
    if window:
        _mistral(metadata, keys)
        keys |= {"sliding_window": window}


def _mistral(metadata: Metadata, keys: Keys) -> None:
    keys |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    keys |= {"sliding_window": None}


def _mistral3(metadata: Metadata, keys: Keys) -> None:
    """Read Mistral Small 3, or Ministral 3 if queries grow with the position; YaRN's factor for cos
    and sin is then 1."""
    _mistral(metadata, keys)
    beta = metadata.number("attention.temperature_scale", 0.0)
    if not beta:
        return
    keys |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    scaling = keys.get("rope_scaling", {})
    metadata.only("attention.temperature_length", scaling.get(ORIGINAL))
    metadata.only("rope.scaling.yarn_log_multiplier", 1.0)
    keys["rope_scaling"] = scaling | {"mscale": 1.0, "mscale_all_dim": 1.0, BETA: beta}


def _experts(metadata: Metadata, keys: Keys, count_key: str) -> None:
    """Read the number of experts, and the number that each token uses."""
    keys[count_key] = metadata.size("expert_count")
    keys["num_experts_per_tok"] = metadata.size("expert_used_count")


def _qwen_experts(metadata: Metadata, keys: Keys, *, normalised: bool) -> None:
    """Read Qwen's experts. `normalised`: llama.cpp's treatment of shares, whatever a file says."""
    _experts(metadata, keys, "num_experts")
    keys["norm_topk_prob"] = normalised
    metadata.only("expert_weights_norm", normalised)


def _qwen2_moe(metadata: Metadata, keys: Keys) -> None:
    _qwen_experts(metadata, keys, normalised=False)
    keys["moe_intermediate_size"] = metadata.size("expert_feed_forward_length")
    shared = metadata.size("expert_shared_feed_forward_length")
    keys["shared_expert_intermediate_size"] = shared


def _qwen3_moe(metadata: Metadata, keys: Keys) -> None:
    _qwen_experts(metadata, keys, normalised=True)
    keys["moe_intermediate_size"] = metadata.size("expert_feed_forward_length")


def _gpt_oss(metadata: Metadata, keys: Keys) -> None:
    _experts(metadata, keys, "num_local_experts")
    keys["intermediate_size"] = metadata.size("expert_feed_forward_length")
    keys["sliding_window"] = metadata.size("attention.sliding_window")
    if "rope_scaling" in keys:
        # gpt-oss has the setting, but no GGUF file states it.
        keys["rope_scaling"]["truncate"] = False


def _gemma2(metadata: Metadata, keys: Keys) -> None:
    keys["sliding_window"] = metadata.get("attention.sliding_window", COUNT, 4096)
    metadata.only("attention.sliding_window_pattern", 2)
    metadata.only("rope.freq_base_swa", keys["rope_theta"])
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    keys |= {key: metadata.number(key, default) for key, default in caps.items()}
    _gemma_scale(metadata, keys, 46)


def _gemma3(metadata: Metadata, keys: Keys) -> None:
    window = metadata.get("attention.sliding_window", COUNT, 0)
    _set_layer_types(metadata, keys, window, 6)
    if window:
        keys["sliding_window"] = window
    keys["final_logit_softcapping"] = metadata.number("final_logit_softcapping", None)
    keys["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    _gemma_scale(metadata, keys, 62)


def _gemma_scale(metadata: Metadata, keys: Keys, layers: int) -> None:
    """Set the scale of the largest models, known by `layers`: files do not state it."""
    scalar = keys["head_dim"]
    if keys["num_hidden_layers"] == layers:
        scalar = keys["hidden_size"] // keys["num_attention_heads"]
    keys["query_pre_attn_scalar"] = scalar


def _phi3(metadata: Metadata, keys: Keys) -> None:
    keys["sliding_window"] = metadata.get("attention.sliding_window", COUNT, 0) or None
    original = keys.get("rope_scaling", {}).get("original_max_position_embeddings")
    if original:
        # The family's default goes before the parameters: state the value outside of them.
        keys["original_max_position_embeddings"] = original


def _olmo2(metadata: Metadata, keys: Keys) -> None:
    window = metadata.get("attention.sliding_window", COUNT, 0)
    if not window:
        return
    keys |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    keys["sliding_window"] = window
    _set_layer_types(metadata, keys, window, 4)
    metadata.only("rope.freq_base_swa", keys["rope_theta"])


def _set_layer_types(metadata: Metadata, keys: Keys, window: int, period: int) -> None:
    """Set the layers with windows: all but the last of each `period`, or those in a list."""
    count = keys["num_hidden_layers"]
    found = metadata.get("attention.sliding_window_pattern", _PATTERN, period)
    if isinstance(found, int):
        found = [(index + 1) % found != 0 for index in range(count)]
    if len(found) != count:
        metadata.refuse("attention.sliding_window_pattern", f"there are {count} layers")
    kinds = ("full_attention", "sliding_attention")
    keys["layer_types"] = [kinds[bool(slides and window)] for slides in found]


def _granite(metadata: Metadata, keys: Keys) -> None:
    _biases(metadata, keys)
    metadata.only("rope.scaling.finetuned", True)
    scale = metadata.number("attention.scale", None)
    keys["attention_multiplier"] = scale or keys["head_dim"] ** -0.5
    keys["embedding_multiplier"] = metadata.number("embedding_scale", None) or 1.0
    keys["residual_multiplier"] = metadata.number("residual_scale", None) or 1.0
    keys["logits_scaling"] = metadata.number("logit_scale", None) or 1.0


def _deepseek2(metadata: Metadata, keys: Keys) -> None:
    """Read DeepSeek-V2, or V3 if experts are chosen with corrections."""
    first = metadata.get("leading_dense_block_count", COUNT, 0)
    corrected = metadata.has_tensor(f"blk.{first}.exp_probs_b.bias")
    if corrected:
        keys |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    metadata.only("expert_gating_func", 2 if corrected else 1)
    _set_latent_sizes(metadata, keys)
    _experts(metadata, keys, "n_routed_experts")
    groups = metadata.size("expert_group_count", 1)
    if not corrected:
        keys["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    keys |= {
        "attention_bias": metadata.has_tensor("blk.0.attn_kv_a_mqa.bias"),
        "first_k_dense_replace": first,
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "n_shared_experts": metadata.size("expert_shared_count"),
        "norm_topk_prob": metadata.get("expert_weights_norm", FLAG, False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": metadata.size("expert_group_used_count", 1),
    }
    weight = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    if weight and "rope_scaling" in keys:
        mscale = round(10 * weight, 6)
        keys["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}


def _set_latent_sizes(metadata: Metadata, keys: Keys) -> None:
    """Set the latent sizes. Newer files state the cached lengths beside those of keys and values;
    old files state only the latter."""
    rotated = metadata.size("rope.dimension_count")
    rank = metadata.size("attention.kv_lora_rank")
    key, value = keys.pop("head_dim"), metadata.size("attention.value_length")
    if metadata.has_tensor("blk.0.attn_k_b.weight"):
        metadata.only("attention.key_length", rank + rotated)
        metadata.only("attention.value_length", rank)
        key, value = (metadata.size(f"attention.{one}_length_mla") for one in ("key", "value"))
    keys.pop("partial_rotary_factor", None)
    keys |= {
        "num_key_value_heads": keys["num_attention_heads"],
        "kv_lora_rank": rank,
        "q_lora_rank": metadata.get("attention.q_lora_rank", SIZE, None),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
    }


def _cohere(metadata: Metadata, keys: Keys) -> None:
    keys["logit_scale"] = metadata.number("logit_scale")
    keys["use_qk_norm"] = metadata.has_tensor("blk.0.attn_q_norm.weight")


def _cohere2(metadata: Metadata, keys: Keys) -> None:
    keys["logit_scale"] = metadata.number("logit_scale")
    window = keys["sliding_window"] = metadata.size("attention.sliding_window")
    _set_layer_types(metadata, keys, window, 4)


def _exaone4(metadata: Metadata, keys: Keys) -> None:
    window = metadata.get("attention.sliding_window", COUNT, 0)
    keys["sliding_window"] = window or None
    _set_layer_types(metadata, keys, window, 4)


def _falcon(metadata: Metadata, keys: Keys) -> None:
    """Read a Falcon. The later form has groups of queries; the first form has one key for all of
    them or for each."""
    heads, kv_heads = keys["num_attention_heads"], keys["num_key_value_heads"]
    grouped = kv_heads not in (1, heads)
    keys |= {"new_decoder_architecture": grouped, "multi_query": kv_heads == 1}
    if grouped:
        two = metadata.has_tensor("blk.0.attn_norm_2.weight")
        keys["num_ln_in_parallel_attn"] = 2 if two else 1


def _gpt_neox(metadata: Metadata, keys: Keys) -> None:
    keys["use_parallel_residual"] = metadata.get("use_parallel_residual", FLAG, True)


def _stablelm(metadata: Metadata, keys: Keys) -> None:
    _gpt_neox(metadata, keys)
    keys["qk_layernorm"] = metadata.has_tensor("blk.0.attn_q_norm.weight")


def _biased(metadata: Metadata) -> bool:
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return any(metadata.has_tensor(name) for name in names)


ARCHITECTURES: dict[str, Architecture] = {
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", layer_norm_key="layer_norm_eps", read=_cohere2
    ),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", layer_norm_key="layer_norm_eps", read=_cohere
    ),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", "deepseek_v2", latent=True, read=_deepseek2),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", read=_exaone4),
    "falcon": Architecture(
        "FalconForCausalLM",
        "falcon",
        layer_norm_key="layer_norm_epsilon",
        biased="bias",
        read=_falcon,
        keys=FALCON_KEYS,
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", shifted_norms=True, read=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", shifted_norms=True, read=_gemma3),
    "glm4": Architecture(
        "Glm4ForCausalLM", "glm4", neighbours=True, biased="attention_bias", all_rotated=True
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", "gpt_oss", read=_gpt_oss, parts={"post_norm": ("post_attention_norm",)}
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        layer_norm_key="layer_norm_epsilon",
        read=lambda metadata, keys: keys.pop("rope_theta"),
        keys=GPT2_KEYS,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        layer_norm_key="layer_norm_eps",
        all_rotated=True,
        read=_gpt_neox,
        keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", neighbours=True, read=_granite),
    "llama": Architecture("LlamaForCausalLM", "llama", neighbours=True, read=_llama),
    "mistral3": Architecture("MistralForCausalLM", "mistral", neighbours=True, read=_mistral3),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", biased="attention_bias", read=_olmo2),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "olmoe", read=partial(_qwen_experts, normalised=False)
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", read=_phi3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", read=_qwen2_moe),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", biased="attention_bias"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", biased="attention_bias", read=_qwen3_moe
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", neighbours=True, read=_biases),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        layer_norm_key="layer_norm_eps",
        biased="use_qkv_bias",
        all_rotated=True,
        read=_stablelm,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", layer_norm_key="norm_epsilon", biased="use_bias"
    ),
}
"""Architectures by `general.architecture`."""
