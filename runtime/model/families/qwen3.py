"""Qwen3 (dense): queries and keys are normed per head; windows as Qwen2's."""

from dataclasses import replace

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.reading import (
    Family,
    Given,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = replace(
    llama.NAMES,
    parts={**llama.NAMES.parts, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
)


def _read(given: Given) -> ModelSpec:
    biased = given("attention_bias")
    attention = grouped_attention(
        given, windows_by_layer(given), qkv_bias=biased, output_bias=biased, head_norm=True
    )
    return pre_norm_decoder(given, NAMES, attention, gated_mlp(given))


FAMILY = Family(architectures=("Qwen3ForCausalLM",), model_types=("qwen3",), read=_read)
