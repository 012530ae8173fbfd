"""Gemma 2 and 3: norms around attention and MLP, and layers with windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootlace.runtime.model.families.config_reader import POSITIVE, SIZE, TEXT, ConfigReader
from rootlace.runtime.model.families.reading import (
    ACTIVATIONS,
    LLAMA,
    QK_NORMS,
    WINDOW,
    biases,
    decoder,
    family,
    gated_mlp,
    grouped_attention,
    read_two_ropes,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import Attention, GatedMlp, ModelSpec, WeightNames

NAMES = LLAMA.with_parts(
    attention_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def _attention(config: ConfigReader, slides: Callable[[int], bool], **features: Any) -> Attention:
    """Layers whose index `slides` have windows, unless the file says."""
    config.only("use_bidirectional_attention", False)
    window = config.get("sliding_window", SIZE, WINDOW)
    return grouped_attention(
        config,
        windows_by_layer(config, window, slides),
        kv_heads=4,
        head_dim=256,
        scale=config.get("query_pre_attn_scalar", POSITIVE, 256) ** -0.5,
        **biases(config),
        **features,
    )


def _decoder(
    config: ConfigReader,
    names: WeightNames,
    attention: Attention,
    soft_cap: float | None,
    **features: Any,
) -> ModelSpec:
    """`soft_cap` of logits is that of a file without it."""
    return decoder(
        config,
        attention,
        names,
        _mlp(config),
        placement="around",
        norm_offset=1.0,
        tied=True,
        embedding_multiplier=config.size("hidden_size") ** 0.5,
        rounded_multiplier=True,
        logit_soft_cap=config.get("final_logit_softcapping", POSITIVE.or_none(), soft_cap) or 0.0,
        **features,
    )


def _mlp(config: ConfigReader) -> GatedMlp:
    """The MLP, whose activation is `hidden_activation`; files have it as `hidden_act`, too."""
    mlp = gated_mlp(config, key="hidden_activation", default="gelu_pytorch_tanh")
    other = config.get("hidden_act", TEXT.or_none(), None)
    if other is not None and ACTIVATIONS.get(other) != mlp.activation:
        config.refuse("hidden_act", "it is not hidden_activation, which counts")
    return mlp


@family("Gemma2ForCausalLM", "gemma2", bos=2, eos=1)
def gemma2(config: ConfigReader) -> ModelSpec:
    """Gemma 2: capped scores and logits, windows in half of the layers."""
    # Files have it, and nobody reads it.
    config.only("sliding_window_size", config.get("sliding_window", SIZE, WINDOW))
    soft_cap = config.get("attn_logit_softcapping", POSITIVE.or_none(), 50.0) or 0.0
    attention = _attention(config, lambda index: index % 2 == 0, soft_cap=soft_cap)
    return _decoder(config, NAMES, attention, 30.0)


@family("Gemma3ForCausalLM", "gemma3_text", bos=2, eos=1)
def gemma3(config: ConfigReader) -> ModelSpec:
    """Gemma 3 (text): no caps, normed queries and keys, and two rotations."""
    config.only("attn_logit_softcapping", None)
    config.get("_sliding_window_pattern", SIZE, 6)  # what transformers writes, and does not read
    pattern = config.get("sliding_window_pattern", SIZE, 6)
    return _decoder(
        config,
        NAMES.with_parts(**QK_NORMS),
        _attention(config, lambda index: (index + 1) % pattern != 0, head_norm=True),
        None,
        rope=read_two_ropes(config, 1e6, 1e4, "rope_local_base_freq"),
        # Here `linear` scaling leads to the length that the file states, not beyond it.
        context=config.size("max_position_embeddings"),
    )
