"""The text model in a checkpoint of one that sees, too.

Its layers are those of a known family, and only the names of its weights begin in another way. What
makes images readable is passed over: without images it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rootlace.runtime.model.families.given import IGNORED, TABLE, TEXTS, Given, names
from rootlace.runtime.model.families.spec import WeightNames
from rootlace.wire.errors import UnsupportedModel


@dataclass(frozen=True)
class Whole:
    """A model that sees. `text`: by the `model_type` of its `text_config`, or by its own where keys
    of texts and of images are not apart, a family's architecture and `model_type`. `defaults`: what
    its text model has where the file does not say."""

    text: Mapping[str, tuple[str, str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA, _MISTRAL = ("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral")
_QWEN2, _QWEN3 = ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")
_GEMMA3 = ("Gemma3ForCausalLM", "gemma3_text")
_LLAVA = Whole({"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2})
_IDEFICS = Whole({"llama": _LLAMA})
WHOLES: dict[str, Whole] = {
    "Gemma3ForConditionalGeneration": Whole(
        {"gemma3_text": _GEMMA3},
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": _LLAVA,
    "Mistral3ForConditionalGeneration": Whole({"mistral": _MISTRAL}),
    "Qwen2VLForConditionalGeneration": Whole({"qwen2_vl_text": _QWEN2, "qwen2_vl": _QWEN2}),
    "Qwen2_5_VLForConditionalGeneration": Whole({"qwen2_5_vl_text": _QWEN2, "qwen2_5_vl": _QWEN2}),
    "Qwen3VLForConditionalGeneration": Whole({"qwen3_vl_text": _QWEN3}),
    "SmolVLMForConditionalGeneration": _IDEFICS,
}
"""By their architectures."""

OF_ALL = names(
    "architectures model_type bos_token_id eos_token_id dtype torch_dtype quantization_config "
    "tie_word_embeddings"
)
"""Keys of the whole that its text model has, too: the whole decides."""
OF_IMAGES = names(
    "vision_config image_token_id image_token_index video_token_id video_token_index "
    "vision_start_token_id vision_end_token_id vision_token_id boi_token_index eoi_token_index "
    "mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size "
    "vision_feature_layer vision_feature_select_strategy vision_aspect_ratio image_seq_length "
    "image_grid_pinpoints use_image_newline_parameter scale_factor ignore_index _pad_token_id"
)
"""Keys of the whole that say nothing about texts."""
PARTS = tuple(
    f"{start}{module}"
    for start in ("", "model.")
    for module in (
        *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector."),
        "image_newline",
    )
)
"""How the names of weights for images begin."""
STARTS = (
    ("model.language_model.", "lm_head"),
    ("language_model.model.", "language_model.lm_head"),
    ("model.text_model.", "lm_head"),
)
"""How those of the text model begin in place of "model.", and what its head is called."""


def text_part(file: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `config.json` of the text model in a model that sees; None: it is no such model. Raises
    `UnsupportedModel` for a text model of no known family, and for keys that nobody knows."""
    given = Given(file, raw)
    found = given("architectures", TEXTS.or_none(), None) or []
    name = next((one for one in found if one in WHOLES), None)
    if name is None:
        return None
    whole = WHOLES[name]
    if "text_config" in raw:
        text = dict(given("text_config", TABLE))
        given.finish(IGNORED | OF_ALL | OF_IMAGES)
    else:
        text = {key: value for key, value in raw.items() if key not in OF_IMAGES}
    kind = str(text.get("model_type"))
    if kind not in whole.text:
        raise UnsupportedModel(
            f"{file}: text_config.model_type {kind!r} of {name} is not supported (supported: "
            f"{', '.join(whole.text)})"
        )
    architecture, model_type = whole.text[kind]
    text = {**whole.defaults, **text, **{key: raw[key] for key in OF_ALL if key in raw}}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            text[key] = _of_texts(text[key])
    return text | {"architectures": [architecture], "model_type": model_type}


def inside(names: WeightNames) -> WeightNames:
    """The names of a family's weights in a checkpoint of a model that sees."""

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
    """Qwen's rotations have positions in time, height and width. A text's are all the same, so
    that it does not matter which numbers are rotated by which of them."""
    plain = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    kinds = ("type", "rope_type")
    return plain | {key: "default" for key in kinds if plain.get(key) == "mrope"}
