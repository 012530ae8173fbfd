"""Find the family of a checkpoint among the `Family` objects that this folder's files define."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec
from msgspec.structs import replace

from rootlace.runtime.model.families.config_reader import (
    IGNORED,
    SIZE,
    TABLE,
    TEXTS,
    ConfigReader,
    names,
)
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames
from rootlace.wire.errors import UnsupportedModel

# Tasks --------------------------------------------------------------------------------------------
#
# Find known families of architectures with another head or without one: classifiers and
# models that embed texts.


TEXT_ENDINGS = ("ForCausalLM", "LMHeadModel")
CLASSIFIER, BASE = "ForSequenceClassification", "Model"
SCORES = "score"
"""Module of a classifier's head, the same in all families."""
LABELS = 2
"""Number of labels where a configuration states none."""


def known_by(architecture: str, known: Mapping[str, Family]) -> Family | None:
    """Return the family of an architecture, whatever its head; None: none of `known`."""
    if architecture in known:
        return known[architecture]
    for ending in (CLASSIFIER, BASE):
        stem = architecture.removesuffix(ending)
        found = [known[stem + text] for text in TEXT_ENDINGS if stem + text in known]
        if stem != architecture and found:
            return found[0]
    return None


def with_head(spec: ModelSpec, architecture: str, config: ConfigReader) -> ModelSpec:
    """Give the spec of a text generator the head of this architecture.

    A model saved without its head has names without the first part. Such names are among the
    `others`: embedding models are stored so under any architecture.
    """
    names = spec.names
    found = _bare(names)
    if found is not None:
        names = replace(names, others=(*names.others, found))
    if architecture.endswith(CLASSIFIER):
        labels = config.get("num_labels", SIZE.or_none(), None) or _named_labels(config)
        return _without_logits(spec, replace(names, head=SCORES), labels)
    if architecture.endswith(BASE) and not architecture.endswith(TEXT_ENDINGS):
        return _without_logits(spec, names, 0)
    return replace(spec, names=names)


def _without_logits(spec: ModelSpec, names: WeightNames, labels: int) -> ModelSpec:
    """Remove the multiplier and the cap of logits: scores of labels have neither."""
    return replace(
        spec,
        names=names,
        labels=labels,
        tied_embeddings=False,
        logit_multiplier=1.0,
        logit_soft_cap=0.0,
    )


def _named_labels(config: ConfigReader) -> int:
    return len(config.get("id2label", TABLE.or_none(), None) or ()) or LABELS


def _bare(names: WeightNames) -> WeightNames | None:
    """Return the names without their first part; None if they have no common first part."""
    first = names.embedding.partition(".")[0] + "."
    inside = (names.embedding, names.layer, names.final_norm)
    if not all(name.startswith(first) for name in inside):
        return None
    return replace(
        names,
        embedding=names.embedding.removeprefix(first),
        layer=names.layer.removeprefix(first),
        final_norm=names.final_norm.removeprefix(first),
        positions=names.positions.removeprefix(first),
        others=(),
    )


# Text part ----------------------------------------------------------------------------------------
#
# Find the text model in a checkpoint of a multimodal model.
#
# The layers are a known family's; only the names of weights begin differently.
# Weights and keys for images are skipped: without images they change nothing.


class TextModel(msgspec.Struct, frozen=True):
    """Text model of a multimodal model: a family's architecture and `model_type`, and defaults for
    missing keys. Published files omit sizes that are transformers' defaults."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, context: int, **further: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        **further,
    }


_LLAMA = TextModel("LlamaForCausalLM", "llama", _sizes(32000, 4096, 11008, 32, 32, 2048))
_MISTRAL = TextModel("MistralForCausalLM", "mistral", _sizes(32000, 4096, 14336, 32, 32, 131072))
_MINISTRAL3 = TextModel(
    "Ministral3ForCausalLM", "ministral3", _sizes(131072, 4096, 14336, 34, 32, 262144)
)
_QWEN2 = TextModel("Qwen2ForCausalLM", "qwen2", _sizes(151936, 4096, 22016, 32, 32, 32768))
_QWEN2_VL = TextModel(
    "Qwen2ForCausalLM",
    "qwen2",
    _sizes(
        *(152064, 8192, 29568, 80, 64, 32768),
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_window_layers=80,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
)
_QWEN3_VL = TextModel(
    "Qwen3ForCausalLM", "qwen3", _sizes(151936, 4096, 22016, 32, 32, 128000, rope_theta=5e5)
)
_GEMMA3 = TextModel("Gemma3ForCausalLM", "gemma3_text", _sizes(262208, 2304, 9216, 26, 8, 131072))
_LLAVA = {"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2}
_IDEFICS = {"llama": _LLAMA}
WHOLES: dict[str, Mapping[str, TextModel]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": _GEMMA3},
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": _LLAVA,
    "Mistral3ForConditionalGeneration": {"mistral": _MISTRAL, "ministral3": _MINISTRAL3},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": _QWEN2_VL, "qwen2_vl": _QWEN2_VL},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": _QWEN2_VL, "qwen2_5_vl": _QWEN2_VL},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": _QWEN3_VL},
    "SmolVLMForConditionalGeneration": _IDEFICS,
}
"""Text models of multimodal architectures, by the `model_type` of `text_config`. Files that do not
separate keys of texts and images are known by their own `model_type`."""

TIED = names("Gemma3ForConditionalGeneration Mistral3ForConditionalGeneration")
"""Architectures with a tied head unless the file states otherwise; a stored head counts more."""

OF_ALL = names(
    "architectures model_type bos_token_id eos_token_id dtype torch_dtype quantization_config "
    "tie_word_embeddings"
)
"""Keys of the whole model that its text model has, too: the whole model's value counts."""
OF_IMAGES = names(
    "vision_config image_token_id image_token_index video_token_id video_token_index "
    "vision_start_token_id vision_end_token_id vision_token_id boi_token_index eoi_token_index "
    "mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size "
    "vision_feature_layer vision_feature_select_strategy vision_aspect_ratio image_seq_length "
    "image_grid_pinpoints use_image_newline_parameter scale_factor ignore_index _pad_token_id "
    "perceiver_config pixel_shuffle_factor"
)
"""Keys, of the whole or beside those of texts, that say nothing about texts."""
PARTS = tuple(
    f"{start}{module}"
    for start in ("", "model.")
    for module in (
        *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector."),
        "image_newline",
    )
)
"""Beginnings of the names of weights for images."""
STARTS = (
    ("model.language_model.", "lm_head"),
    ("language_model.model.", "language_model.lm_head"),
    ("model.text_model.", "lm_head"),
)
"""Beginnings of the text model's names in place of "model.", each with the name of the head."""


def text_part(
    file: Path, raw: Mapping[str, Any], ignored: Collection[str] | None = ()
) -> dict[str, Any] | None:
    """Return the `config.json` of the text model in a multimodal model; None for other models.
    Raises `UnsupportedModel` for a text model of no known family and for unknown keys; `ignored` as
    in `ConfigReader.finish`."""
    config = ConfigReader(file, raw)
    architectures = config.get("architectures", TEXTS.or_none(), None) or []
    name = next((one for one in architectures if one in WHOLES), None)
    if name is None:
        return None
    apart = "text_config" in raw
    text = dict(config.get("text_config", TABLE)) if apart else dict(raw)
    if apart:
        # Some files repeat the text model's keys for the whole.
        again = {key for key, value in text.items() if value is None or raw.get(key) == value}
        config.finish(IGNORED | OF_ALL | OF_IMAGES | again, ignored)
    kind = str(text.get("model_type"))
    if kind not in WHOLES[name]:
        raise UnsupportedModel(
            f"{file}: text_config.model_type {kind!r} of {name} is not supported (supported: "
            f"{', '.join(WHOLES[name])})"
        )
    found = WHOLES[name][kind]
    text = {key: value for key, value in text.items() if key not in OF_IMAGES}
    if name in TIED:
        text["tie_word_embeddings"] = True
    text |= {key: raw[key] for key in OF_ALL if key in raw}
    rotations = [key for key in ("rope_scaling", "rope_parameters") if type(text.get(key)) is dict]
    for key in rotations:
        text[key] = _of_texts(text[key])
    inside_of_them = {key for one in rotations for key in text[one]}
    missing = {k: v for k, v in found.defaults.items() if k not in inside_of_them}
    kinds = {"architectures": [found.architecture], "model_type": found.model_type}
    return missing | text | kinds


def inside(names: WeightNames) -> WeightNames:
    """Return the names of a family's weights in a multimodal model's checkpoint."""

    def named(start: str, head: str) -> WeightNames:
        embedding, layer, norm = (
            start + name.removeprefix("model.")
            for name in (names.embedding, names.layer, names.final_norm)
        )
        return replace(
            names, embedding=embedding, layer=layer, final_norm=norm, head=head, apart=PARTS
        )

    others = tuple(named(*one) for one in STARTS)
    return replace(named("model.", names.head), others=others)


def _of_texts(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Drop Qwen's keys of positions in time, height and width: a text's three positions are equal,
    so that their assignment to numbers does not matter."""
    plain = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    kinds = ("type", "rope_type")
    return plain | {key: "default" for key in kinds if plain.get(key) == "mrope"}


# Table --------------------------------------------------------------------------------------------


@functools.cache
def families() -> dict[str, Family]:
    """Return every family, by the names of its architectures."""
    found: dict[str, Family] = {}
    for one in _defined():
        if isinstance(one, Family):
            found |= dict.fromkeys(one.architectures, one)
    return found


def _defined() -> Iterator[Any]:
    """Iterate over all objects that the families' files define."""
    package = __name__.rpartition(".")[0]
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        yield from vars(importlib.import_module(f"{package}.{file.name}")).values()


def check_ignored(config: ConfigReader, ignored: Collection[str]) -> None:
    """Raise `UnsupportedModel` if the user ignores a key that some family reads. Such a key is a
    constant in the family's code."""
    for key in sorted(set(ignored).intersection(config) - IGNORED):
        codes = [one.read if isinstance(one, Family) else one for one in _defined()]
        if any(key in _texts(getattr(code, "__code__", None)) for code in codes):
            config.refuse(key, "--ignore-config-keys names it, and it changes what is computed")


def _texts(code: Any) -> Iterator[str]:
    if isinstance(code, str):
        yield code
    elif isinstance(code, tuple):
        for one in code:
            yield from _texts(one)
    elif isinstance(code, CodeType):
        yield from _texts(code.co_consts)
