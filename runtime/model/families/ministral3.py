"""Ministral 3: Mistral with YaRN, whose queries grow with the position.

A query is multiplied by 1 + beta * ln(1 + floor(position / original)), which is 1 within the length
before YaRN.
"""

from dataclasses import replace
from typing import Any

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import (
    NUMBER,
    ORIGINAL,
    SIZE,
    TABLE,
    ConfigReader,
    read_context,
    read_rope,
)
from rootlace.runtime.model.families.reading import Family, decoder, gated_mlp, grouped_attention
from rootlace.runtime.model.families.spec import ModelSpec, Rope

BETA = "llama_4_scaling_beta"
OWN = {BETA: NUMBER, "max_position_embeddings": SIZE}
REMARKS = ("type", "max_position_embeddings")
"""What files say once more."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""The rotation of a file that does not say."""


def _read(given: ConfigReader) -> ModelSpec:
    window = given("sliding_window", SIZE.or_none(), None)
    attention = grouped_attention(given, (window,) * given.layers(), kv_heads=8, head_dim=128)
    rope = _read_rope(given)
    context = read_context(given, rope)
    if rope.parameters[BETA]:
        attention = replace(attention, growth=(rope.parameters[BETA], rope.parameters[ORIGINAL]))
    mlp = gated_mlp(given)
    return decoder(given, llama.NAMES, attention, mlp, rope=rope, context=context, eps=1e-5)


def _read_rope(given: ConfigReader) -> Rope:
    stated = given("rope_parameters", TABLE.or_none(), None) is not None
    scaled = bool(given("rope_scaling", TABLE.or_none(), None))
    if not stated and not scaled:
        given = given.renamed({"rope_parameters": "default_rope"}, default_rope=YARN)
    rope = read_rope(given, own=OWN)
    for needed in (BETA, ORIGINAL):
        if needed not in rope.parameters:
            given.refuse("rope_scaling" if scaled else "rope_parameters", f"{needed} is missing")
    told = {key: value for key, value in rope.parameters.items() if key not in REMARKS}
    return replace(rope, parameters={**told, "rope_type": rope.kind})


FAMILY = Family(
    architectures=("Ministral3ForCausalLM",),
    model_types=("ministral3",),
    read=_read,
    bos_token_id=1,
    eos_token_id=2,
)
