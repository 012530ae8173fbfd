"""Mistral: Llama with sliding windows, of all layers or, in Ministral's form, of some."""

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
    windows = (given("sliding_window"),) * given("num_hidden_layers")
    if given("layer_types") is not None:
        windows = windows_by_layer(given)
    attention = grouped_attention(given, windows)
    return pre_norm_decoder(given, llama.NAMES, attention, gated_mlp(given))


FAMILY = Family(
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    # transformers reads a Mistral configuration that has `layer_types` as Ministral's.
    model_types=("mistral", "ministral"),
    read=_read,
)
