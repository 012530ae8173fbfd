"""From a `config.json` to a spec: what the families' files have in common.

No key is passed over in silence: each is read by its family, or is listed here as one that says
nothing about what a decoder computes, or has the only value that is supported. Anything else is
refused by name, also where transformers would not look at it: whoever wrote it meant something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rootlace.runtime.model.families.spec import (
    Activation,
    Attention,
    GatedMlp,
    ModelSpec,
    Norm,
    Rope,
    WeightNames,
)
from rootlace.wire.errors import UnsupportedModel

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED = _names(
    # Read elsewhere, or before: `checkpoint.config`. Old names that transformers has translated.
    "architectures model_type dtype torch_dtype bos_token_id eos_token_id quantization_config "
    "rope_theta rope_scaling partial_rotary_factor "
    # Training, and how transformers runs a model.
    "initializer_range attention_dropout gradient_checkpointing use_cache pretraining_tp "
    "pad_token_id chunk_size_feed_forward output_attentions output_hidden_states return_dict "
    "torchscript use_bfloat16 tf_legacy_loss attn_implementation "
    "_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    # Other tasks than continuing a text.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params "
    # The tokenizer, and how long a text it was used for.
    "tokenizer_class prefix unk_token_id sep_token_id cls_token_id model_max_length "
    "max_sequence_length tokenizer_model_max_length "
    # Where a folder comes from, and remarks of tools.
    "_name_or_path name_or_path _commit_hash transformers_version auto_map "
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version"
)
"""Keys that say nothing about what a decoder computes."""

ONLY: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_causal": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
"""Keys of which one value is supported, where a family does not read them."""

ROPE_PARAMETERS = _names(
    "rope_type type rope_theta factor original_max_position_embeddings max_position_embeddings "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor "
    "low_freq_factor high_freq_factor partial_rotary_factor"
)


class Given:
    """The keys of a `config.json`; remembers which were read. What is refused names the file."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self._file = file
        self._values = values
        self._read: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` where there is none."""
        self._read.add(key)
        return self._values.get(key, default)

    def only(self, key: str, value: object) -> None:
        """Refuse any other value of the key."""
        if self(key, value) not in (value, None):
            self.refuse(key, f"only {value!r} is supported")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises `UnsupportedModel`, naming the key and its value."""
        raise UnsupportedModel(f"{self._file}: {key} {self._values.get(key)!r}: {why}")

    def finish(self, ignored: frozenset[str]) -> None:
        """Refuse the keys that nobody has read, unless they are `ignored` or have no value."""
        for key in sorted(self._values.keys() - self._read - IGNORED - ignored):
            if key in ONLY:
                self.only(key, ONLY[key])
            elif self._values[key] is not None:
                self.refuse(key, "this key is not known; remove it if it changes nothing")


@dataclass(frozen=True)
class Family:
    """What a family's file defines, as `FAMILY`. `model_types`: the names that transformers has for
    configurations of these `architectures`."""

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[Given], ModelSpec]


def pre_norm_decoder(
    given: Given, names: WeightNames, attention: Attention, mlp: GatedMlp, **features: Any
) -> ModelSpec:
    """A decoder with RMSNorm before each part; `features` are fields of `ModelSpec`."""
    return ModelSpec(
        vocab_size=given("vocab_size"),
        hidden_size=given("hidden_size"),
        num_layers=given("num_hidden_layers"),
        max_context=given("max_position_embeddings"),
        norm=Norm(eps=given("rms_norm_eps")),
        attention=attention,
        mlp=mlp,
        rope=_rope(given),
        names=names,
        tied_embeddings=bool(given("tie_word_embeddings")),
        **features,
    )


def grouped_attention(
    given: Given, windows: tuple[int | None, ...] | None = None, **features: Any
) -> Attention:
    """Attention of a `head_dim` of its own or of hidden_size / num_attention_heads; `features` are
    fields of `Attention`. `windows` None: full attention in all layers."""
    heads, kv_heads = given("num_attention_heads"), given("num_key_value_heads")
    if heads % kv_heads:
        given.refuse(
            "num_key_value_heads", f"num_attention_heads ({heads}) is not a multiple of it"
        )
    head_dim = given("head_dim") or given("hidden_size") // heads
    return Attention(
        **{
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "windows": windows or (None,) * given("num_hidden_layers"),
        }
        | features
    )


def gated_mlp(given: Given, bias: bool = False) -> GatedMlp:
    """An MLP whose activation is `hidden_act`."""
    activation = ACTIVATIONS.get(given("hidden_act"))
    if activation is None:
        given.refuse("hidden_act", f"only {', '.join(ACTIVATIONS)} are supported")
    return GatedMlp(given("intermediate_size"), activation, bias)


def windows_by_layer(given: Given) -> tuple[int | None, ...]:
    """The windows that `layer_types` gives; transformers makes it of older keys where it lacks."""
    for older in ("use_sliding_window", "max_window_layers"):
        given(older)
    kinds, window = given("layer_types"), given("sliding_window")
    if len(kinds) != given("num_hidden_layers"):
        given.refuse("layer_types", f"there are {given('num_hidden_layers')} layers")
    windows: list[int | None] = []
    for layer_type in kinds:
        if layer_type == "full_attention":
            windows.append(None)
        elif layer_type == "sliding_attention" and window:
            windows.append(window)
        else:
            given.refuse(
                "layer_types", f"{layer_type!r} with sliding_window {window} is not supported"
            )
    return tuple(windows)


def _rope(given: Given) -> Rope:
    parameters = dict(given("rope_parameters") or {})
    unknown = sorted(parameters.keys() - ROPE_PARAMETERS)
    if unknown:
        given.refuse("rope_parameters", f"{', '.join(unknown)} is not known")
    if parameters.get("partial_rotary_factor", 1.0) not in (1.0, None):
        given.refuse("rope_parameters", "partial rotation is not supported")
    # Outside of `rope_parameters` it counts for more, as in transformers.
    original = given("original_max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    return Rope(parameters.get("rope_type", "default"), parameters)
