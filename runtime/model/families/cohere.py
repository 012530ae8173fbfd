"""Cohere 1 (Command R): attention and MLP side by side behind one LayerNorm, no windows."""

from dataclasses import replace

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import ConfigReader, read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
    layer_norm,
)
from rootlace.runtime.model.families.spec import Attention, ModelSpec, Rope


def read_decoder(given: ConfigReader, attention: Attention, rope: Rope) -> ModelSpec:
    """That of Cohere 1 and 2."""
    return decoder(
        given,
        llama.NAMES.with_parts(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
        attention,
        gated_mlp(given),
        rope=replace(rope, neighbours=True),
        norm=layer_norm(given, bias=False, placement="once"),
        parallel=True,
        tied=True,
        logit_multiplier=given.number("logit_scale", 0.0625),
    )


def _read(given: ConfigReader) -> ModelSpec:
    own_norms = given.flag("use_qk_norm", False)
    attention = grouped_attention(given, **biases(given), own_norms=own_norms)
    return read_decoder(given, attention, read_rope(given, 5e5))


FAMILY = Family(
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    read=_read,
    bos_token_id=5,
    eos_token_id=255001,
)
