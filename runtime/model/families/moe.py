"""Read mixtures of experts: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, gpt-oss, DeepSeek-V2 and V3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    COUNTS,
    POSITIVE,
    REQUIRED,
    SIZE,
    TEXT,
    ConfigReader,
)
from rootlace.runtime.model.families.reading import (
    KINDS,
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
from rootlace.runtime.model.families.spec import (
    Attention,
    Experts,
    Latent,
    ModelSpec,
    Rope,
    WeightNames,
)


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
    """Read a decoder with experts. `experts`: arguments of `read_experts`."""
    normalised = config.flag("norm_topk_prob", False)
    mixture = read_experts(config, normalised=normalised, **experts)
    return decoder(config, attention, names, eps=eps, experts=mixture)


def _sparse_layers(config: ConfigReader) -> tuple[int, ...]:
    """Return the layers with experts: every `decoder_sparse_step`-th except `mlp_only_layers`."""
    step = config.size("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", COUNTS.or_none(), None) or []
    return tuple(i for i in range(config.layers()) if (i + 1) % step == 0 and i not in dense)


@family("OlmoeForCausalLM", "olmoe", eos=50279)
def olmoe(config: ConfigReader) -> ModelSpec:
    """OLMoE: experts in all layers, and norms over all queries and all keys of a token."""
    config.only("clip_qkv", None)
    divided_heads(config)
    attention = grouped_attention(config, **biases(config), joint_norm=True)
    return _decoder(config, attention, NORMED_QWEN_EXPERTS, 1e-5, count=64, chosen=8)


@family("Qwen2MoeForCausalLM", "qwen2_moe")
def qwen2_moe(config: ConfigReader) -> ModelSpec:
    """Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and a shared expert for all tokens."""
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
"""Rotation of a file that states none."""


@family("GptOssForCausalLM", "gpt_oss")
def gpt_oss(config: ConfigReader) -> ModelSpec:
    """gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every
    other layer, YaRN."""
    config.only("hidden_act", "silu")  # transformers ignores it
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
    rope = read_rope(config, 150000.0, unstated=GPT_OSS_YARN)
    config.only("initial_context_length", rope.parameters.get(ORIGINAL))
    return decoder(config, attention, GPT_OSS_NAMES, rope=rope, eps=1e-5, experts=experts)


NORM_EPS = 1e-6
"""Epsilon of the norms of latents; other norms may have another epsilon."""
_DEEPSEEK_NAMES = LLAMA.with_parts(
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


def _deepseek(
    config: ConfigReader,
    *,
    neighbours: bool,
    experts: Experts,
    further_layers: int = 0,
    kinds: Mapping[str, str] = KINDS,
) -> ModelSpec:
    """Read a model with these experts. `neighbours`: whether neighbours are rotated with each
    other. `kinds`: see `read_rope`."""
    rotated = config.size("qk_rope_head_dim", 64)
    if rotated % 2:
        config.refuse("qk_rope_head_dim", f"{rotated} numbers are not pairs")
    rope = replace(read_rope(config, kinds=kinds), rotated=rotated, neighbours=neighbours)
    attention = _attention(config, rotated, rope)
    names = replace(_deepseek_names(attention), further_layers=further_layers)
    return decoder(config, attention, names, rope=rope, experts=experts)


def _mixture(config: ConfigReader, *, first_dense: int, shared: int, **features: Any) -> Experts:
    """Read a mixture of experts. `first_dense` (number of layers without experts) and `shared`
    (number of shared experts) are defaults; `features` are fields of `Experts`."""
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
    """Put `experts` into `n_group` groups, of which the best `topk_group` count. `groups` and
    `counted` are the defaults."""
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
    config.pass_over("qk_head_dim")  # follows from other keys
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
    """Return YaRN's factor of queries and keys, besides that of cos and sin."""
    weight = rope.parameters.get("mscale_all_dim")
    if rope.kind != "yarn" or not weight:
        return 1.0
    return 0.1 * float(weight) * math.log(max(rope.parameters["factor"], 1.0)) + 1.0


def _deepseek_names(attention: Attention) -> WeightNames:
    if attention.latent is not None and attention.latent.query_rank:
        return _DEEPSEEK_NAMES
    return _DEEPSEEK_NAMES.with_parts(qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"))


_GROUPINGS = ("greedy", "group_limited_greedy")


@family("DeepseekV2ForCausalLM", "deepseek_v2", bos=1, eos=2)
def deepseek_v2(config: ConfigReader) -> ModelSpec:
    """DeepSeek-V2 and V2-Lite: shares are a softmax, a group counts by its best expert."""
    method = config.get("topk_method", TEXT, "greedy")
    if method not in _GROUPINGS:
        config.refuse("topk_method", f"only {' and '.join(_GROUPINGS)} are supported")
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    factor = config.number("routed_scaling_factor", 1.0)
    experts = _mixture(config, first_dense=0, shared=2, count=64, chosen=6, factor=factor)
    if method == "greedy":
        config.pass_over("n_group", "topk_group")
    else:
        experts = _in_groups(config, experts)
    return _deepseek(config, neighbours=True, experts=experts)


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
    """Read `config` also with the keys of Sarvam's own code, as transformers 5.24 does."""
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
    """DeepSeek-V3, R1 and Sarvam: shares are sigmoids. A correction is added for the choice alone,
    and a group counts by its two best experts."""
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
    return _deepseek(
        config,
        neighbours=config.flag("rope_interleave", True),
        experts=experts,
        further_layers=max((config.get(key, COUNT) for key in keys), default=1),
        kinds=kinds,
    )
