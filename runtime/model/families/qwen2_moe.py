"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, one of which all tokens have."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import COUNT, ConfigReader
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    chosen_window,
    decoder,
    gated_mlp,
    grouped_attention,
    read_experts,
    sparse_layers,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(
    router="mlp.gate",
    expert_gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)


def _read(given: ConfigReader) -> ModelSpec:
    last = given("max_window_layers", COUNT, 28)
    windows = windows_by_layer(
        given, chosen_window(given, WINDOW), lambda index: index % 2 == 0 and index < last
    )
    attention = grouped_attention(
        given, windows, kv_heads=16, qkv_bias=given.flag("qkv_bias", True)
    )
    experts = read_experts(
        given,
        count=60,
        chosen=4,
        size_key="moe_intermediate_size",
        layers=sparse_layers(given),
        normalised=given.flag("norm_topk_prob", False),
        shared_size=given.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return decoder(given, NAMES, attention, gated_mlp(given), experts=experts)


FAMILY = Family(architectures=("Qwen2MoeForCausalLM",), model_types=("qwen2_moe",), read=_read)
