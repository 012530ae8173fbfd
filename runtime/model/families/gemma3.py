"""Gemma 3 (text): as Gemma 2 without caps, with normed queries and keys, and two rotations."""

from dataclasses import replace

from rootlace.runtime.model.families import gemma2
from rootlace.runtime.model.families.given import NUMBER, POSITIVE, SIZE, TEXT, Given
from rootlace.runtime.model.families.positions import read_two_ropes
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = replace(
    gemma2.NAMES,
    parts={**gemma2.NAMES.parts, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
)


def _read(given: Given) -> ModelSpec:
    given.only("use_bidirectional_attention", False)
    given.only("attn_logit_softcapping", None)
    given("hidden_act", TEXT.or_none(), None)  # files have it, and `hidden_activation` counts
    given("_sliding_window_pattern", SIZE, 6)  # what transformers writes, and does not read
    pattern = given("sliding_window_pattern", SIZE, 6)
    window = given("sliding_window", SIZE, WINDOW)
    biased = given.flag("attention_bias", False)
    attention = grouped_attention(
        given,
        windows_by_layer(given, window, lambda index: (index + 1) % pattern != 0),
        kv_heads=4,
        head_dim=256,
        qkv_bias=biased,
        output_bias=biased,
        head_norm=True,
        scale=given("query_pre_attn_scalar", POSITIVE, 256) ** -0.5,
    )
    theta = given("rope_theta", NUMBER, 1e6)
    return decoder(
        given,
        NAMES,
        attention,
        gated_mlp(given, key="hidden_activation", default="gelu_pytorch_tanh"),
        rope=read_two_ropes(given, theta, given("rope_local_base_freq", NUMBER, 1e4)),
        # Here `linear` scaling leads to the length that the file states, not beyond it.
        context=given.size("max_position_embeddings"),
        placement="around",
        norm_offset=1.0,
        tied=True,
        embedding_multiplier=given.size("hidden_size") ** 0.5,
        rounded_multiplier=True,
        logit_soft_cap=given("final_logit_softcapping", POSITIVE.or_none(), None) or 0.0,
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    read=_read,
    bos_token_id=2,
    eos_token_id=1,
)
