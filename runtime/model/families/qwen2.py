"""Qwen2 and Qwen2.5: Llama with biased queries, keys and values, and windows of some layers."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    upper_windows,
)
from rootlace.runtime.model.families.spec import ModelSpec


def _read(given: ConfigReader) -> ModelSpec:
    given.only("attention_bias", True)
    attention = grouped_attention(given, upper_windows(given), kv_heads=32, qkv_bias=True)
    return decoder(given, llama.NAMES, attention, gated_mlp(given))


FAMILY = Family(architectures=("Qwen2ForCausalLM",), model_types=("qwen2",), read=_read)
