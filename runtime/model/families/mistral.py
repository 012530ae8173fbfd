"""Mistral: Llama with sliding windows, of all layers or, in Ministral's form, of some."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec


def _read(given: ConfigReader) -> ModelSpec:
    windows = windows_by_layer(given, given("sliding_window", SIZE.or_none(), WINDOW))
    attention = grouped_attention(given, windows, kv_heads=8)
    return decoder(given, llama.NAMES, attention, gated_mlp(given))


FAMILY = Family(
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    # transformers reads a Mistral configuration that has `layer_types` as Ministral's.
    model_types=("mistral", "ministral"),
    read=_read,
    bos_token_id=1,
    eos_token_id=2,
)
