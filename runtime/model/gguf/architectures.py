"""What llama.cpp's architectures are called by transformers, and what each says in its own way.

An architecture's metadata become the `config.json` that a family reads. Keys that most of them have
are read in `config`; here stands what only some have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootlace.runtime.model.families.given import COUNT, Kind
from rootlace.runtime.model.gguf.metadata import Metadata

Keys = dict[str, Any]

_PATTERN = Kind(
    "a positive integer or a list of truth values",
    lambda v: (
        (type(v) is int and v > 0)
        or (type(v) is list and all(type(one) in (bool, int) for one in v))
    ),
)


@dataclass(frozen=True)
class Architecture:
    """`name` and `model_type` are transformers'. `neighbours`: the file has the rows of queries and
    keys in the order in which neighbours are rotated with each other. `shifted_norms`: weights of
    norms have the family's offset in them. `read` adds keys to a `config.json`."""

    name: str
    model_type: str
    neighbours: bool = False
    shifted_norms: bool = False
    read: Callable[[Metadata, Keys], None] = lambda metadata, keys: None


def _biases(metadata: Metadata, keys: Keys) -> None:
    keys |= {
        "attention_bias": _biased(metadata),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


def _llama(metadata: Metadata, keys: Keys) -> None:
    """Mistral's first models are files of `llama`, too: with a window where it is stated."""
    _biases(metadata, keys)
    window = metadata("attention.sliding_window", COUNT, 0)
    if window:
        _mistral(metadata, keys)
        keys |= {"sliding_window": window}


def _mistral(metadata: Metadata, keys: Keys) -> None:
    keys |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    keys |= {"sliding_window": None}


def _qwen3(metadata: Metadata, keys: Keys) -> None:
    keys["attention_bias"] = _biased(metadata)


def _gemma2(metadata: Metadata, keys: Keys) -> None:
    keys["sliding_window"] = metadata("attention.sliding_window", COUNT, 4096)
    metadata.only("attention.sliding_window_pattern", 2)
    metadata.only("rope.freq_base_swa", keys["rope_theta"])
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    keys |= {key: metadata.number(key, default) for key, default in caps.items()}
    _gemma_scale(metadata, keys, 46)


def _gemma3(metadata: Metadata, keys: Keys) -> None:
    window = metadata("attention.sliding_window", COUNT, 0)
    _set_layer_types(metadata, keys, window, 6)
    if window:
        keys["sliding_window"] = window
    keys["final_logit_softcapping"] = metadata.number("final_logit_softcapping", None)
    keys["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    _gemma_scale(metadata, keys, 62)


def _gemma_scale(metadata: Metadata, keys: Keys, layers: int) -> None:
    """The largest ones, of so many layers, have another scale, and files do not say so."""
    scalar = keys["head_dim"]
    if keys["num_hidden_layers"] == layers:
        scalar = keys["hidden_size"] // keys["num_attention_heads"]
    keys["query_pre_attn_scalar"] = scalar


def _phi3(metadata: Metadata, keys: Keys) -> None:
    keys["sliding_window"] = metadata("attention.sliding_window", COUNT, 0) or None
    original = keys.get("rope_scaling", {}).get("original_max_position_embeddings")
    if original:
        # The family has a default, which counts for more than what is stated among parameters.
        keys["original_max_position_embeddings"] = original


def _olmo2(metadata: Metadata, keys: Keys) -> None:
    keys["attention_bias"] = _biased(metadata)
    window = metadata("attention.sliding_window", COUNT, 0)
    if not window:
        return
    keys |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    keys["sliding_window"] = window
    _set_layer_types(metadata, keys, window, 4)
    metadata.only("rope.freq_base_swa", keys["rope_theta"])


def _set_layer_types(metadata: Metadata, keys: Keys, window: int, period: int) -> None:
    """Which layers have windows: all but the last of each `period`, or those that a list names."""
    count = keys["num_hidden_layers"]
    found = metadata("attention.sliding_window_pattern", _PATTERN, period)
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


def _glm4(metadata: Metadata, keys: Keys) -> None:
    keys["attention_bias"] = _biased(metadata)
    keys.setdefault("partial_rotary_factor", 1.0)


def _biased(metadata: Metadata) -> bool:
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return any(metadata.has_tensor(name) for name in names)


ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", shifted_norms=True, read=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", shifted_norms=True, read=_gemma3),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", neighbours=True, read=_glm4),
    "granite": Architecture("GraniteForCausalLM", "granite", neighbours=True, read=_granite),
    "llama": Architecture("LlamaForCausalLM", "llama", neighbours=True, read=_llama),
    "mistral3": Architecture("MistralForCausalLM", "mistral", neighbours=True, read=_mistral),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", read=_olmo2),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", read=_phi3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", read=_qwen3),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", neighbours=True, read=_biases),
}
"""By `general.architecture`."""
