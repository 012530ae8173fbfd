"""Qwen2 and Qwen2.5: Llama with biased queries, keys and values, and windows of some layers."""

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


def _read(given: Given) -> ModelSpec:
    given.only("attention_bias", True)
    attention = grouped_attention(given, windows_by_layer(given), qkv_bias=True)
    return pre_norm_decoder(given, llama.NAMES, attention, gated_mlp(given))


FAMILY = Family(architectures=("Qwen2ForCausalLM",), model_types=("qwen2",), read=_read)
