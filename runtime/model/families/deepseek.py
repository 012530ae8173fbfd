"""DeepSeek-V2 and V3: latent attention, experts behind a few dense layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    REQUIRED,
    SIZE,
    TEXT,
    ConfigReader,
)
from rootlace.runtime.model.families.reading import (
    KINDS,
    LLAMA,
    decoder,
    family,
    read_experts,
    read_rope,
)
from rootlace.runtime.model.families.spec import (
    Attention,
    Experts,
    Latent,
    ModelSpec,
    Rope,
    WeightNames,
)

NORM_EPS = 1e-6
"""Epsilon of the norms of latents; other norms may have another one."""
NAMES = LLAMA.with_parts(
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


def _decoder(
    config: ConfigReader,
    *,
    neighbours: bool,
    experts: Experts,
    further_layers: int = 0,
    kinds: Mapping[str, str] = KINDS,
) -> ModelSpec:
    """A model with these experts; `neighbours`: how numbers are paired to be rotated, `kinds`: see
    `read_rope`."""
    rotated = config.size("qk_rope_head_dim", 64)
    if rotated % 2:
        config.refuse("qk_rope_head_dim", f"{rotated} numbers are not pairs")
    rope = replace(read_rope(config, kinds=kinds), rotated=rotated, neighbours=neighbours)
    attention = _attention(config, rotated, rope)
    names = replace(_names(attention), further_layers=further_layers)
    return decoder(config, attention, names, rope=rope, experts=experts)


def _mixture(config: ConfigReader, *, first_dense: int, shared: int, **features: Any) -> Experts:
    """`first_dense` and `shared` are how many layers have no experts, and how many experts all
    tokens have, in a file without the keys; `features` are fields of `Experts`."""
    first = config.get("first_k_dense_replace", COUNT, first_dense)
    config.only("moe_layer_freq", 1)
    config.pass_over("ep_size", "seq_aux", "aux_loss_alpha")
    size = config.size("moe_intermediate_size", 1407)
    return read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=tuple(range(min(first, config.layers()), config.layers())),
        shared_size=size * config.size("n_shared_experts", shared),
        **features,
    )


def _in_groups(
    config: ConfigReader, experts: Experts, groups: Any = REQUIRED, counted: Any = REQUIRED
) -> Experts:
    """`experts` in groups, as many as `n_group` says, of which `topk_group` count; `groups` and
    `counted` are those of a file without the keys."""
    groups, counted = config.size("n_group", groups), config.size("topk_group", counted)
    if experts.count % groups or experts.best_of_group > experts.count // groups:
        config.refuse("n_group", f"n_routed_experts ({experts.count}) are not as many groups")
    if counted > groups or experts.chosen > counted * experts.count // groups:
        config.refuse(
            "topk_group",
            f"of n_group ({groups}) groups of {experts.count // groups} experts it must leave "
            f"num_experts_per_tok ({experts.chosen})",
        )
    return replace(experts, groups=groups, chosen_groups=counted)


def _attention(config: ConfigReader, rotated: int, rope: Rope) -> Attention:
    heads = config.size("num_attention_heads")
    config.only("num_key_value_heads", heads)
    latent = Latent(
        rank=config.size("kv_lora_rank", 512),
        plain=config.size("qk_nope_head_dim", 128),
        values=config.size("v_head_dim", 128),
        query_rank=config.get("q_lora_rank", SIZE.or_none(), 1536),
        eps=NORM_EPS,
    )
    if latent.rank % 2:
        config.refuse("kv_lora_rank", "an odd number is not supported")
    if config.size("head_dim", rotated) != rotated:
        config.refuse("head_dim", f"qk_rope_head_dim is {rotated}")
    config.pass_over("qk_head_dim")  # it follows from the others
    biased = config.flag("attention_bias", False)
    if biased and not latent.query_rank:
        config.refuse("attention_bias", "it is not supported without q_lora_rank")
    return Attention(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.rank + rotated,
        scale=(latent.plain + rotated) ** -0.5 * _growth(rope) ** 2,
        windows=(None,) * config.layers(),
        qkv_bias=biased,
        output_bias=biased,
        latent=latent,
    )


def _growth(rope: Rope) -> float:
    """YaRN's factor of queries and keys, besides that of cos and sin."""
    weight = rope.parameters.get("mscale_all_dim")
    if rope.kind != "yarn" or not weight:
        return 1.0
    return 0.1 * float(weight) * math.log(max(rope.parameters["factor"], 1.0)) + 1.0


def _names(attention: Attention) -> WeightNames:
    if attention.latent is not None and attention.latent.query_rank:
        return NAMES
    return NAMES.with_parts(qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"))


METHODS = ("greedy", "group_limited_greedy")


@family("DeepseekV2ForCausalLM", "deepseek_v2", bos=1, eos=2)
def deepseek_v2(config: ConfigReader) -> ModelSpec:
    """DeepSeek-V2 and V2-Lite: shares are a softmax, a group counts by its best expert."""
    method = config.get("topk_method", TEXT, "greedy")
    if method not in METHODS:
        config.refuse("topk_method", f"only {' and '.join(METHODS)} are supported")
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    factor = config.number("routed_scaling_factor", 1.0)
    experts = _mixture(config, first_dense=0, shared=2, count=64, chosen=6, factor=factor)
    if method == "greedy":
        config.pass_over("n_group", "topk_group")
    else:
        experts = _in_groups(config, experts)
    return _decoder(config, neighbours=True, experts=experts)


# transformers has no modules for Sarvam's models: it saves them with this architecture.
_SARVAM = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 0,
}


def _sarvam(config: ConfigReader) -> ConfigReader:
    """`config`, also as it is published for code of its own: transformers 5.24 reads it so."""
    others = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config.pass_over("head_dim", "q_head_dim", "output_dropout", "router_dtype")
    config.only("moe_router_enable_expert_bias", True)
    config.only("score_function", "sigmoid")
    config.only("use_qk_norm", True)
    config.only("default_theta", 1e4)
    names = {name: key for name, key in others.items() if key in config}
    return config.renamed({"head_dim": "qk_rope_head_dim", **names}, **_SARVAM)


@family("DeepseekV3ForCausalLM SarvamMLAForCausalLM", "deepseek_v3 sarvam_mla", bos=0, eos=1)
def deepseek_v3(config: ConfigReader) -> ModelSpec:
    """DeepSeek-V3, R1 and Sarvam: shares are sigmoids, to which a correction is added in the choice
    alone, and a group counts by its two best experts."""
    kinds = KINDS
    if config.get("model_type", TEXT) == "sarvam_mla":
        config, kinds = _sarvam(config), {**KINDS, "deepseek_yarn": "yarn"}
    config.only("topk_method", "noaux_tc")
    config.only("scoring_func", "sigmoid")
    experts = _mixture(
        config,
        first_dense=3,
        shared=1,
        count=256,
        chosen=8,
        scores="sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        factor=config.number("routed_scaling_factor", 2.5),
        best_of_group=2,
        correction=True,
    )
    experts = _in_groups(config, experts, 8, 4)
    keys = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in config]
    return _decoder(
        config,
        neighbours=config.flag("rope_interleave", True),
        experts=experts,
        further_layers=max((config.get(key, COUNT) for key in keys), default=1),
        kinds=kinds,
    )
