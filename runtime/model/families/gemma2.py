"""Gemma 2: norms around attention and MLP, capped scores and logits, windows in half the layers."""

from collections.abc import Callable
from typing import Any

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import POSITIVE, SIZE, TEXT, ConfigReader
from rootlace.runtime.model.families.reading import (
    ACTIVATIONS,
    WINDOW,
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import Attention, GatedMlp, ModelSpec, WeightNames

NAMES = llama.NAMES.with_parts(
    attention_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def read_attention(
    given: ConfigReader, slides: Callable[[int], bool], **features: Any
) -> Attention:
    """That of Gemma 2 and 3: layers whose index `slides` have windows, unless the file says."""
    given.only("use_bidirectional_attention", False)
    window = given("sliding_window", SIZE, WINDOW)
    return grouped_attention(
        given,
        windows_by_layer(given, window, slides),
        kv_heads=4,
        head_dim=256,
        scale=given("query_pre_attn_scalar", POSITIVE, 256) ** -0.5,
        **biases(given),
        **features,
    )


def read_decoder(
    given: ConfigReader,
    names: WeightNames,
    attention: Attention,
    soft_cap: float | None,
    **features: Any,
) -> ModelSpec:
    """That of Gemma 2 and 3; `soft_cap` of logits is that of a file without it."""
    return decoder(
        given,
        names,
        attention,
        _read_mlp(given),
        placement="around",
        norm_offset=1.0,
        tied=True,
        embedding_multiplier=given.size("hidden_size") ** 0.5,
        rounded_multiplier=True,
        logit_soft_cap=given("final_logit_softcapping", POSITIVE.or_none(), soft_cap) or 0.0,
        **features,
    )


def _read_mlp(given: ConfigReader) -> GatedMlp:
    """The MLP, whose activation is `hidden_activation`; files have it as `hidden_act`, too."""
    mlp = gated_mlp(given, key="hidden_activation", default="gelu_pytorch_tanh")
    other = given("hidden_act", TEXT.or_none(), None)
    if other is not None and ACTIVATIONS.get(other) != mlp.activation:
        given.refuse("hidden_act", "it is not hidden_activation, which counts")
    return mlp


def _read(given: ConfigReader) -> ModelSpec:
    # Files have it, and nobody reads it.
    given.only("sliding_window_size", given("sliding_window", SIZE, WINDOW))
    soft_cap = given("attn_logit_softcapping", POSITIVE.or_none(), 50.0) or 0.0
    attention = read_attention(given, lambda index: index % 2 == 0, soft_cap=soft_cap)
    return read_decoder(given, NAMES, attention, 30.0)


FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    read=_read,
    bos_token_id=2,
    eos_token_id=1,
)
