"""Mixtures of experts: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    COUNTS,
    POSITIVE,
    SIZE,
    TABLE,
    ConfigReader,
)
from rootlace.runtime.model.families.reading import (
    LLAMA,
    ORIGINAL,
    QK_NORMS,
    WINDOW,
    biases,
    chosen_window,
    decoder,
    divided_heads,
    family,
    grouped_attention,
    read_experts,
    read_rope,
    same_windows,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import Attention, ModelSpec, Rope, WeightNames


@family("MixtralForCausalLM", "mixtral", bos=1, eos=2)
def mixtral(config: ConfigReader) -> ModelSpec:
    """Mixtral: Mistral with experts in all layers."""
    names = LLAMA.with_parts(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
    attention = grouped_attention(config, same_windows(config), kv_heads=8)
    experts = read_experts(config, count=8, chosen=2, normalised=True)
    return decoder(config, attention, names, rope=read_rope(config, 1e6), eps=1e-5, experts=experts)


# Qwen's names of experts --------------------------------------------------------------------------


QWEN_EXPERTS = LLAMA.with_parts(
    router="mlp.gate",
    expert_gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
NORMED_QWEN_EXPERTS = QWEN_EXPERTS.with_parts(**QK_NORMS)


def _decoder(
    config: ConfigReader, attention: Attention, names: WeightNames, eps: float, **experts: Any
) -> ModelSpec:
    """`experts` are arguments of `read_experts`."""
    normalised = config.flag("norm_topk_prob", False)
    mixture = read_experts(config, normalised=normalised, **experts)
    return decoder(config, attention, names, eps=eps, experts=mixture)


def _sparse_layers(config: ConfigReader) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step = config.size("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", COUNTS.or_none(), None) or []
    return tuple(i for i in range(config.layers()) if (i + 1) % step == 0 and i not in dense)


@family("OlmoeForCausalLM", "olmoe", eos=50279)
def olmoe(config: ConfigReader) -> ModelSpec:
    """OLMoE: experts in all layers, and norms of all queries and all keys of a token."""
    config.only("clip_qkv", None)
    divided_heads(config)
    attention = grouped_attention(config, **biases(config), joint_norm=True)
    return _decoder(config, attention, NORMED_QWEN_EXPERTS, 1e-5, count=64, chosen=8)


@family("Qwen2MoeForCausalLM", "qwen2_moe")
def qwen2_moe(config: ConfigReader) -> ModelSpec:
    """Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, one of which all tokens have."""
    last = config.get("max_window_layers", COUNT, 28)
    windows = windows_by_layer(
        config, chosen_window(config, WINDOW), lambda index: index % 2 == 0 and index < last
    )
    biased = config.flag("qkv_bias", True)
    return _decoder(
        config,
        grouped_attention(config, windows, kv_heads=16, qkv_bias=biased),
        QWEN_EXPERTS,
        1e-6,
        count=60,
        chosen=4,
        size_key="moe_intermediate_size",
        layers=_sparse_layers(config),
        shared_size=config.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )


@family("Qwen3MoeForCausalLM", "qwen3_moe")
def qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Qwen3-MoE: Qwen3 with experts, in all layers or in some."""
    # Further keys of Qwen3-Coder's files.
    config.only("qkv_bias", False)
    config.only("shared_expert_intermediate_size", 0)
    config.only("use_qk_norm", True)
    window = chosen_window(config, WINDOW)
    if window is None:
        config.pass_over("max_window_layers")
    windows = (window,) * config.layers()
    return _decoder(
        config,
        grouped_attention(config, windows, kv_heads=4, **biases(config), head_norm=True),
        NORMED_QWEN_EXPERTS,
        1e-6,
        count=128,
        chosen=8,
        size_key="moe_intermediate_size",
        layers=_sparse_layers(config),
    )


# gpt-oss ------------------------------------------------------------------------------------------


GPT_OSS_NAMES = replace(
    LLAMA.with_parts(
        sinks="self_attn.sinks",
        router="mlp.router",
        expert_gate_up="mlp.experts.gate_up_proj",
        expert_down="mlp.experts.down_proj",
    ),
    stacks="alternating",
)
GPT_OSS_WINDOW = 128
GPT_OSS_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
"""The rotation of a file that does not say."""


@family("GptOssForCausalLM", "gpt_oss")
def gpt_oss(config: ConfigReader) -> ModelSpec:
    """gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every
    other layer, YaRN."""
    config.only("hidden_act", "silu")  # which transformers does not look at
    window = config.get("sliding_window", SIZE.or_none(), GPT_OSS_WINDOW)
    attention = grouped_attention(
        config,
        windows_by_layer(config, window, lambda index: index % 2 == 0),
        kv_heads=8,
        head_dim=64,
        **{**biases(config.renamed({}, attention_bias=True)), "sinks": True},
    )
    clamp = (config.number("swiglu_alpha", 1.702), float(config.get("swiglu_limit", POSITIVE, 7.0)))
    experts = read_experts(
        config, count=128, chosen=4, normalised=True, router_bias=True, bias=True, clamp=clamp
    )
    config.only("experts_per_token", experts.chosen)
    rope = _gpt_oss_rope(config)
    config.only("initial_context_length", rope.parameters.get(ORIGINAL))
    return decoder(config, attention, GPT_OSS_NAMES, rope=rope, eps=1e-5, experts=experts)


def _gpt_oss_rope(config: ConfigReader) -> Rope:
    stated = config.get("rope_parameters", TABLE.or_none(), None) is not None
    if not stated and not config.get("rope_scaling", TABLE.or_none(), None):
        config = config.renamed({"rope_scaling": "default_rope"}, default_rope=GPT_OSS_YARN)
    return read_rope(config, 150000.0)
