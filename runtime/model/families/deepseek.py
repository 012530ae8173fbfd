"""What DeepSeek-V2 and V3 have in common: latent attention, experts behind a few dense layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import (
    COUNT,
    REQUIRED,
    SIZE,
    ConfigReader,
    read_rope,
)
from rootlace.runtime.model.families.reading import decoder, gated_mlp, read_experts
from rootlace.runtime.model.families.spec import (
    Attention,
    Experts,
    Latent,
    ModelSpec,
    Rope,
    WeightNames,
)

NORM_EPS = 1e-6
"""Of the norms of latents, whatever that of the others is."""
NAMES = llama.NAMES.with_parts(
    qkv=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    q_norm="self_attn.q_a_layernorm",
    q_up="self_attn.q_b_proj",
    k_norm="self_attn.kv_a_layernorm",
    kv_up="self_attn.kv_b_proj",
    router="mlp.gate",
    correction="mlp.gate.e_score_correction_bias",
    expert_gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)


def read_decoder(
    given: ConfigReader, *, neighbours: bool, experts: Experts, further_layers: int = 0
) -> ModelSpec:
    """A model with these experts; `neighbours`: how numbers are paired to be rotated."""
    rotated = given.size("qk_rope_head_dim", 64)
    if rotated % 2:
        given.refuse("qk_rope_head_dim", f"{rotated} numbers are not pairs")
    rope = replace(read_rope(given), rotated=rotated, neighbours=neighbours)
    attention = _read_attention(given, rotated, rope)
    names = replace(_names(attention), further_layers=further_layers)
    return decoder(given, names, attention, gated_mlp(given), rope=rope, experts=experts)


def read_mixture(given: ConfigReader, *, first_dense: int, shared: int, **features: Any) -> Experts:
    """`first_dense` and `shared` are how many layers have no experts, and how many experts all
    tokens have, in a file without the keys; `features` are fields of `Experts`."""
    first = given("first_k_dense_replace", COUNT, first_dense)
    given.only("moe_layer_freq", 1)
    given.pass_over("ep_size", "seq_aux", "aux_loss_alpha")
    size = given.size("moe_intermediate_size", 1407)
    return read_experts(
        given,
        size_key="moe_intermediate_size",
        layers=tuple(range(min(first, given.layers()), given.layers())),
        shared_size=size * given.size("n_shared_experts", shared),
        **features,
    )


def read_groups(
    given: ConfigReader, experts: Experts, groups: Any = REQUIRED, counted: Any = REQUIRED
) -> Experts:
    """`experts` in groups, as many as `n_group` says, of which `topk_group` count; `groups` and
    `counted` are those of a file without the keys."""
    groups, counted = given.size("n_group", groups), given.size("topk_group", counted)
    if experts.count % groups or experts.best_of_group > experts.count // groups:
        given.refuse("n_group", f"n_routed_experts ({experts.count}) are not as many groups")
    if counted > groups or experts.chosen > counted * experts.count // groups:
        given.refuse(
            "topk_group",
            f"of n_group ({groups}) groups of {experts.count // groups} experts it must leave "
            f"num_experts_per_tok ({experts.chosen})",
        )
    return replace(experts, groups=groups, chosen_groups=counted)


def _read_attention(given: ConfigReader, rotated: int, rope: Rope) -> Attention:
    heads = given.size("num_attention_heads")
    given.only("num_key_value_heads", heads)
    latent = Latent(
        rank=given.size("kv_lora_rank", 512),
        plain=given.size("qk_nope_head_dim", 128),
        values=given.size("v_head_dim", 128),
        query_rank=given("q_lora_rank", SIZE.or_none(), 1536),
        eps=NORM_EPS,
    )
    if latent.rank % 2:
        given.refuse("kv_lora_rank", "an odd number is not supported")
    if given.size("head_dim", rotated) != rotated:
        given.refuse("head_dim", f"qk_rope_head_dim is {rotated}")
    given.pass_over("qk_head_dim")  # it follows from the others
    biased = given.flag("attention_bias", False)
    if biased and not latent.query_rank:
        given.refuse("attention_bias", "it is not supported without q_lora_rank")
    return Attention(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.rank + rotated,
        scale=(latent.plain + rotated) ** -0.5 * _growth(rope) ** 2,
        windows=(None,) * given.layers(),
        qkv_bias=biased,
        output_bias=biased,
        latent=latent,
    )


def _growth(rope: Rope) -> float:
    """What YaRN multiplies queries and keys by, besides what it does to cos and sin."""
    weight = rope.parameters.get("mscale_all_dim")
    if rope.kind != "yarn" or not weight:
        return 1.0
    return 0.1 * float(weight) * math.log(max(rope.parameters["factor"], 1.0)) + 1.0


def _names(attention: Attention) -> WeightNames:
    if attention.latent is not None and attention.latent.query_rank:
        return NAMES
    return NAMES.with_parts(qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"))
