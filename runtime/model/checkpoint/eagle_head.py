"""Read the configuration of an EAGLE-3 draft head (Li et al. 2025, arXiv:2503.01840).

A head drafts for one model, from hidden states of three of the model's layers. Two layouts of
`config.json` are read, with the same weights:

 flat         Llama's keys, "draft_vocab_size", "eagle_config"         SafeAILab, SpecForge, SGLang
 speculators  "speculators_model_type", Llama's keys in an object      speculators, vLLM

 fc           [H, layers x H]             one state of the three
 midlayer.*   or layers.0.*: a layer of Llama, whose attention reads 2 H numbers
 norm, lm_head [draft vocabulary, H], d2t (token = id + d2t[id]), embed_tokens (else the model's)

Importing this module imports no torch and no reader of weights: a bad head is refused at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.quantised.layouts import Expected
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.model.families.config_reader import COUNTS, SIZE, TABLE, TEXTS, ConfigReader
from rootlace.wire.errors import UnsupportedModel

_MARKS = frozenset({"draft_vocab_size", "eagle_config", "speculators_model_type"})
"""Keys that only a head has."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OF_HEADS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
_FLAT = frozenset({*_MARKS, *_OF_HEADS, _LAYERS, "target_hidden_size", "max_window_layers"})
"""Keys of the flat layout besides Llama's; `max_window_layers` has no effect without windows."""
_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_COUNT = 3
"""Number of layers whose hidden states a head reads."""
_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on the length of a text."""
INTEGERS = frozenset({"I32", "I64"})
"""Types of `d2t`."""


class HeadSource(FolderSource, frozen=True):
    """Folder of a head. The configuration of the head's layer is a Llama's."""

    layer: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        return {**self.layer, "architectures": ["LlamaForCausalLM"]}


class HeadConfig(ModelConfig, frozen=True, kw_only=True):
    """Configuration of a head. `spec`: a Llama with the head's one layer, the model's vocabulary
    and context. `layers`: the model's layers before which hidden states are taken, in the order of
    `fc`. `norm_output`: norm the state that the next draft step reads. `norm_before_residual`: norm
    the state that is added to attention's output."""

    layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool
    norm_output: bool

    def expected(self, stored: Collection[str]) -> dict[str, Expected]:
        """List the tensors of the head, by their names in a checkpoint with the `stored` names."""
        spec, attention = self.spec, self.spec.attention
        hidden, inner, layer = spec.hidden_size, spec.mlp.inner_size, layer_name(stored)
        queries = attention.num_heads * attention.head_dim
        keys = attention.num_kv_heads * attention.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, _COUNT * hidden),
            f"{layer}hidden_norm.weight": (hidden,),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (queries, 2 * hidden),
            f"{layer}self_attn.k_proj.weight": (keys, 2 * hidden),
            f"{layer}self_attn.v_proj.weight": (keys, 2 * hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, queries),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        if "embed_tokens.weight" in stored:
            shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
        found = {name: Expected((shape,)) for name, shape in shapes.items()}
        if "d2t" in stored or self.draft_vocab_size != spec.vocab_size:
            found["d2t"] = Expected(((self.draft_vocab_size,),), INTEGERS)
        return found


def layer_name(stored: Collection[str]) -> str:
    """Return the beginning of the names of the layer's weights."""
    return "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."


def says_nothing(name: str) -> bool:
    """Tell whether a tensor carries no further information: `t2d` repeats `d2t`, `inv_freq` repeats
    `rope_theta`; tensors of the verifier are the model's own, kept for training."""
    return name == "t2d" or name.endswith(".inv_freq") or name.startswith("verifier_")


def is_head(raw: Mapping[str, Any]) -> bool:
    """Tell whether a `config.json` is that of a head that reads another model's hidden states."""
    called = " ".join(map(str, raw.get("architectures") or ())).lower()
    return "eagle" in called or not _MARKS.isdisjoint(raw)


def read_head(folder: Path, model: ModelConfig, ignored: Collection[str]) -> HeadConfig:
    """Read the configuration of a head for `model`. Raises `UnsupportedModel`, naming file and key,
    if a setting is not supported or belongs to another model."""
    source, spec = FolderSource(folder), model.spec
    file, raw = source.config_file, source.config()
    config = ConfigReader(file, raw)
    apart = "speculators_model_type" in raw
    layer, layers = _speculators(config, ignored) if apart else _flat(config, raw)
    if layer.get("model_type") != "llama":
        _refuse(file, "model_type", layer.get("model_type"), "'llama'")
    if layers is None:
        layers = [2, spec.num_layers // 2, spec.num_layers - 3]
    if len(layers) != _COUNT or not 0 <= min(layers) <= max(layers) < spec.num_layers:
        _refuse(file, _LAYERS, layers, f"{_COUNT} of the model's {spec.num_layers} layers")
    for key in ("norm_before_fc", "fc_norm"):
        config.only(key, False)
    config.only("target_hidden_size", spec.hidden_size)
    read = ModelConfig.of(HeadSource(folder, layer), ignored)
    head, attention = read.spec, read.spec.attention
    for key, found, expected in (
        ("num_hidden_layers", head.num_layers, 1),
        ("hidden_size", head.hidden_size, spec.hidden_size),
        ("vocab_size", head.vocab_size, spec.vocab_size),
        ("tie_word_embeddings", head.tied_embeddings, False),
        ("attention_bias", attention.qkv_bias or attention.output_bias, False),
        ("mlp_bias", head.mlp.bias, False),
        ("quantization_config", read.quantisation and read.quantisation.method, None),
    ):
        if found != expected:
            _refuse(file, key, found, expected)
    if head.rope.kind not in _ROPES:
        _refuse(file, "rope_type", head.rope.kind, " or ".join(_ROPES))
    size = config.get("draft_vocab_size", SIZE.or_none(), None) or head.vocab_size
    if size > head.vocab_size:
        _refuse(file, "draft_vocab_size", size, f"at most the model's {head.vocab_size}")
    return HeadConfig(
        **{**asdict(read), "spec": replace(head, max_context=spec.max_context)},
        layers=tuple(layers),
        draft_vocab_size=size,
        norm_before_residual=config.flag("norm_before_residual", False),
        norm_output=config.flag("norm_output", False),
    )


def _flat(config: ConfigReader, raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[int] | None]:
    """Return Llama's keys, and the layers before which hidden states are taken. SGLang's
    `eagle_config` has the layers whose outputs are taken instead."""
    names = config.get("architectures", TEXTS, ["LlamaForCausalLM"])
    if len(names) != 1 or names[0] not in _NAMES:
        config.refuse("architectures", f"only EAGLE-3 of one Llama layer ({', '.join(_NAMES)})")
    layers = config.get(_LAYERS, COUNTS.or_none(), None) or None
    if config.get("eagle_config", TABLE.or_none(), None):
        inside = config.table("eagle_config")
        inside.only("use_aux_hidden_state", True)
        outputs = inside.get(_LAYERS, COUNTS.or_none(), None)
        inside.finish()
        if outputs and layers:
            config.refuse(_LAYERS, "eagle_config has it, too")
        if outputs:
            layers = [one + 1 for one in outputs]
    return {key: raw[key] for key in raw if key not in _FLAT}, layers


def _speculators(
    config: ConfigReader, ignored: Collection[str]
) -> tuple[dict[str, Any], list[int] | None]:
    """Return Llama's keys, and the layers before which hidden states are taken."""
    config.only("speculators_model_type", "eagle3")
    # Keys about the head's origin and training, and its own decoder's proposals.
    config.pass_over("speculators_version", "speculators_config", "embed_requires_grad")
    config.pass_over("draft_vocab_size", "target_hidden_size", "has_no_defaults_at_init")
    config.pass_over(*_OF_HEADS)
    config.only("tie_word_embeddings", False)
    layers = config.get(_LAYERS, COUNTS.or_none(), None)
    layer = dict(config.get("transformer_layer_config", TABLE))
    config.finish(by_user=ignored)
    return {key: value for key, value in layer.items() if key != "max_window_layers"}, layers


def _refuse(file: Path, key: str, found: object, expected: object) -> None:
    raise UnsupportedModel(f"{file}: {key} {found!r}: expected {expected}")
