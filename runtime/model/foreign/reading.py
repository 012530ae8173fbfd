"""From a model folder that transformers can run to a spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from rootlace.runtime.model.families.spec import (
    Attention,
    Foreign,
    ModelSpec,
    Norm,
    PlainMlp,
    Rope,
    WeightNames,
)
from rootlace.runtime.model.foreign.attention import RECORDED, Unattended
from rootlace.runtime.model.foreign.recording import Asked, Recorded, first_line, record
from rootlace.wire.errors import UnsupportedModel


@dataclass(frozen=True)
class ForeignModel:
    """What transformers knows of a model without its weights."""

    spec: ModelSpec
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


def read_model(folder: Path, architecture: str) -> ForeignModel:
    """Raises `UnsupportedModel`, saying why, for a model whose layers ask for more than we have."""
    file = folder / "config.json"
    try:
        kind = getattr(transformers, architecture)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not isinstance(config, kind.config_class):
            raise UnsupportedModel(
                f"{file}: architectures: model_type {config.model_type!r} is not that of "
                f"{architecture}"
            )
        # The type is that in which more can be tried out without numbers.
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation=RECORDED, dtype=torch.bfloat16)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{file}: {architecture}: transformers {transformers.__version__} cannot read it: "
            f"{first_line(error)}"
        ) from error
    text = config.get_text_config()
    try:
        spec = _spec(architecture, text, record(model))
    except Unattended as error:
        raise UnsupportedModel(f"{file}: {architecture}: {error}") from error
    begin, end = (getattr(text, f"{name}_token_id", None) for name in ("bos", "eos"))
    return ForeignModel(spec, begin, end)


def _spec(architecture: str, config: PreTrainedConfig, recorded: Recorded) -> ModelSpec:
    asked = recorded.asked
    if len(asked) < config.num_hidden_layers:
        raise Unattended("it has layers without attention")
    first, size = asked[0], max(asked[0].key_size, asked[0].value_size)
    if len({(one.heads, one.kv_heads, one.key_size, one.value_size) for one in asked}) > 1:
        raise Unattended("its layers have heads of unlike numbers or sizes")
    return ModelSpec(
        vocab_size=recorded.vocab_size,
        hidden_size=recorded.hidden_size,
        num_layers=len(asked),
        max_context=_context(config),
        norm=Norm(0.0),
        attention=_attention(first, size, asked),
        mlp=PlainMlp(0, "gelu"),
        rope=Rope("default", {"rope_theta": 1e4}, unrotated_layers=tuple(range(len(asked)))),
        names=WeightNames("", "", {}, "", ""),
        tied_embeddings=bool(config.tie_word_embeddings),
        foreign=Foreign(architecture, recorded.numbers, first.key_size, first.value_size),
    )


def _attention(first: Asked, size: int, asked: list[Asked]) -> Attention:
    if first.heads % first.kv_heads or size % 2:
        raise Unattended(f"{first.heads} heads of {size} numbers over {first.kv_heads} of keys")
    return Attention(
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=size,
        scale=first.scale,
        windows=tuple(one.window for one in asked),
        soft_cap=first.soft_cap,
        sinks=any(one.sinks for one in asked),
    )


def _context(config: PreTrainedConfig) -> int:
    """The most positions. Those of `longrope` end where the second of its two sets of factors
    begins: the longest text of a step would choose it for all."""
    most: Any = getattr(config, "max_position_embeddings", None)
    if type(most) is not int or most < 1:
        raise Unattended("config.json has no max_position_embeddings")
    parameters = getattr(config, "rope_parameters", None) or {}
    for found in (parameters, *parameters.values()):
        if isinstance(found, dict) and found.get("rope_type") == "longrope":
            most = min(most, found.get("original_max_position_embeddings") or most)
    return most
