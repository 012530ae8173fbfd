"""Qwen3-MoE: Qwen3 with experts, in all layers or in some."""

from rootlace.runtime.model.families import qwen2_moe, qwen3
from rootlace.runtime.model.families.config_reader import ConfigReader
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    biases,
    chosen_window,
    decoder,
    gated_mlp,
    grouped_attention,
    read_experts,
    sparse_layers,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = qwen2_moe.NAMES.with_parts(
    q_norm=qwen3.NAMES.parts["q_norm"], k_norm=qwen3.NAMES.parts["k_norm"]
)


def _read(given: ConfigReader) -> ModelSpec:
    # What files of Qwen3-Coder say besides.
    given.only("qkv_bias", False)
    given.only("shared_expert_intermediate_size", 0)
    given.only("use_qk_norm", True)
    window = chosen_window(given, WINDOW)
    if window is None:
        given.pass_over("max_window_layers")
    attention = grouped_attention(
        given, (window,) * given.layers(), kv_heads=4, **biases(given), head_norm=True
    )
    experts = read_experts(
        given,
        count=128,
        chosen=8,
        size_key="moe_intermediate_size",
        layers=sparse_layers(given),
        normalised=given.flag("norm_topk_prob", False),
    )
    return decoder(given, NAMES, attention, gated_mlp(given), experts=experts)


FAMILY = Family(architectures=("Qwen3MoeForCausalLM",), model_types=("qwen3_moe",), read=_read)
