"""Gemma 3 (text): as Gemma 2 without caps, with normed queries and keys, and two rotations."""

from dataclasses import replace

from rootlace.runtime.model.families import gemma2
from rootlace.runtime.model.families.given import POSITIVE, SIZE, Given
from rootlace.runtime.model.families.positions import read_two_ropes
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    decoder,
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
    return decoder(
        given,
        NAMES,
        attention,
        gemma2.read_mlp(given),
        rope=read_two_ropes(given, 1e6, 1e4, "rope_local_base_freq"),
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
