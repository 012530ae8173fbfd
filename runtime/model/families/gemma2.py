"""Gemma 2: norms around attention and MLP, capped scores and logits, windows in half the layers."""

from dataclasses import replace

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.given import POSITIVE, SIZE, TEXT, Given
from rootlace.runtime.model.families.reading import (
    ACTIVATIONS,
    WINDOW,
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import GatedMlp, ModelSpec

NAMES = replace(
    llama.NAMES,
    parts={
        **llama.NAMES.parts,
        "attention_out_norm": ("post_attention_layernorm",),
        "post_norm": ("pre_feedforward_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    },
)


def read_mlp(given: Given) -> GatedMlp:
    """The MLP, whose activation is `hidden_activation`; files have it as `hidden_act`, too."""
    mlp = gated_mlp(given, key="hidden_activation", default="gelu_pytorch_tanh")
    other = given("hidden_act", TEXT.or_none(), None)
    if other is not None and ACTIVATIONS.get(other) != mlp.activation:
        given.refuse("hidden_act", "it is not hidden_activation, which counts")
    return mlp


def _read(given: Given) -> ModelSpec:
    given.only("use_bidirectional_attention", False)
    window = given("sliding_window", SIZE, WINDOW)
    given.only("sliding_window_size", window)  # files have it, and nobody reads it
    biased = given.flag("attention_bias", False)
    attention = grouped_attention(
        given,
        windows_by_layer(given, window, lambda index: index % 2 == 0),
        kv_heads=4,
        head_dim=256,
        qkv_bias=biased,
        output_bias=biased,
        scale=given("query_pre_attn_scalar", POSITIVE, 256) ** -0.5,
        soft_cap=given("attn_logit_softcapping", POSITIVE.or_none(), 50.0) or 0.0,
    )
    return decoder(
        given,
        NAMES,
        attention,
        read_mlp(given),
        placement="around",
        norm_offset=1.0,
        tied=True,
        embedding_multiplier=given.size("hidden_size") ** 0.5,
        rounded_multiplier=True,
        logit_soft_cap=given("final_logit_softcapping", POSITIVE.or_none(), 30.0) or 0.0,
    )


FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    read=_read,
    bos_token_id=2,
    eos_token_id=1,
)
