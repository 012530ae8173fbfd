"""Granite 3 (dense): Llama with multipliers for embedding, scores, branches and logits."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import POSITIVE, ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
)
from rootlace.runtime.model.families.spec import ModelSpec


def _read(given: ConfigReader) -> ModelSpec:
    attention = grouped_attention(
        given, scale=given.number("attention_multiplier", 1.0), **biases(given)
    )
    return decoder(
        given,
        llama.NAMES,
        attention,
        gated_mlp(given, bias=given.flag("mlp_bias", False)),
        embedding_multiplier=given.number("embedding_multiplier", 1.0),
        residual_multiplier=given.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / given("logits_scaling", POSITIVE, 1.0),
    )


FAMILY = Family(
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    read=_read,
    bos_token_id=1,
    eos_token_id=2,
)
