"""Cohere 1 (Command R): attention and MLP side by side behind one LayerNorm, no windows."""

from dataclasses import replace

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.given import Given
from rootlace.runtime.model.families.positions import read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
    layer_norm,
)
from rootlace.runtime.model.families.spec import ModelSpec


def _read(given: Given) -> ModelSpec:
    given.only("use_qk_norm", False)
    return decoder(
        given,
        llama.NAMES,
        grouped_attention(given, **biases(given)),
        gated_mlp(given),
        rope=replace(read_rope(given, 5e5), neighbours=True),
        norm=layer_norm(given, bias=False, placement="once"),
        parallel=True,
        tied=True,
        logit_multiplier=given.number("logit_scale", 0.0625),
    )


FAMILY = Family(
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    read=_read,
    bos_token_id=5,
    eos_token_id=255001,
)
