"""Granite 3 (dense): Llama with multipliers for embedding, scores, branches and logits."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.reading import (
    Family,
    Given,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
)
from rootlace.runtime.model.families.spec import ModelSpec


def _read(given: Given) -> ModelSpec:
    biased = given("attention_bias")
    attention = grouped_attention(
        given, qkv_bias=biased, output_bias=biased, scale=given("attention_multiplier")
    )
    return pre_norm_decoder(
        given,
        llama.NAMES,
        attention,
        gated_mlp(given, bias=given("mlp_bias")),
        embedding_multiplier=given("embedding_multiplier"),
        residual_multiplier=given("residual_multiplier"),
        logit_multiplier=1.0 / given("logits_scaling"),
    )


FAMILY = Family(architectures=("GraniteForCausalLM",), model_types=("granite",), read=_read)
