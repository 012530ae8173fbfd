"""Read the configurations of Llama and similar dense families, of Cohere and of Gemma."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    NUMBER,
    POSITIVE,
    SIZE,
    TABLE,
    TEXT,
    TEXTS,
    TOKENS,
    ConfigReader,
    Kind,
)
from rootlace.runtime.model.families.reading import (
    ACTIVATIONS,
    LLAMA,
    ORIGINAL,
    QK_NORMS,
    WINDOW,
    biases,
    chosen_window,
    decoder,
    divided_heads,
    family,
    gated_mlp,
    grouped_attention,
    layer_norm,
    plain_mlp,
    read_context,
    read_rope,
    read_two_ropes,
    same_windows,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import Attention, Mlp, ModelSpec, Rope, WeightNames

# transformers has no modules for these models: it saves their configurations, of other types,
# with Llama's architecture.
_OTHER_DEFAULTS = {
    "exaone": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
}
_EXAONE_NAMES = WeightNames(
    embedding="transformer.wte",
    layer="transformer.h.{}.",
    parts={
        "input_norm": ("ln_1",),
        "qkv": tuple(f"attn.attention.{one}_proj" for one in "qkv"),
        "output": ("attn.attention.out_proj",),
        "post_norm": ("ln_2",),
        "gate_up": ("mlp.c_fc_0", "mlp.c_fc_1"),
        "down": ("mlp.c_proj",),
    },
    final_norm="transformer.ln_f",
    head="lm_head",
)


@family(
    "LlamaForCausalLM ExaoneForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM",
    "llama exaone internlm3 iquestcoder",
    bos=1,
    eos=2,
)
def llama(config: ConfigReader) -> ModelSpec:
    """Llama 2, 3 and similar models; EXAONE 3, InternLM 3 and IQuest Coder."""
    kind = config.get("model_type", TEXT)
    config = config.renamed({}, **_OTHER_DEFAULTS.get(kind, {}))
    if kind == "internlm3":
        other = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
        config = config.renamed({name: key for name, key in other.items() if key in config})
        if config.flag("attention_bias", False) != config.flag("mlp_bias", False):
            config.refuse("attention_bias", "only the same value as of the MLP's is supported")
    names = LLAMA
    if kind == "exaone":
        names = replace(LLAMA, others=(_EXAONE_NAMES,))
        other = {
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        }
        config = config.renamed({name: key for name, key in other.items() if key in config})
        config.pass_over("embed_dropout")
        config.get("eos_token_id", TOKENS)  # its default is not the others'
    if kind == "iquestcoder":
        config.only("clip_qkv", None)
    mlp = gated_mlp(config, bias=config.flag("mlp_bias", False))
    rope = read_rope(config, 5e5 if kind == "exaone" else 1e4)
    return decoder(config, grouped_attention(config, **biases(config)), names, mlp, rope=rope)


@family("GraniteForCausalLM", "granite", bos=1, eos=2)
def granite(config: ConfigReader) -> ModelSpec:
    """Granite 3 (dense): Llama with multipliers for embedding, scores, branches and logits."""
    scale = config.number("attention_multiplier", 1.0)
    return decoder(
        config,
        grouped_attention(config, scale=scale, **biases(config)),
        mlp=gated_mlp(config, bias=config.flag("mlp_bias", False)),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / config.get("logits_scaling", POSITIVE, 1.0),
    )


# SmolLM3 ------------------------------------------------------------------------------------------


_FLAGS = Kind("a list of 0 and 1", lambda v: type(v) is list and all(one in (0, 1) for one in v))


@family("SmolLM3ForCausalLM", "smollm3", bos=128000, eos=128001)
def smollm3(config: ConfigReader) -> ModelSpec:
    """SmolLM3: Llama with layers, mostly every fourth, that rotate nothing."""
    count = config.layers()
    interval = config.get("no_rope_layer_interval", SIZE, 4)
    rotates = config.get("no_rope_layers", _FLAGS.or_none(), None)
    if rotates is None:
        rotates = [(index + 1) % interval != 0 for index in range(count)]
    if len(rotates) < count:
        config.refuse("no_rope_layers", f"there are {count} layers")
    config.get("max_window_layers", COUNT, 0)  # in files, but no program reads it
    windows = windows_by_layer(config, chosen_window(config, None), lambda at: not rotates[at])
    unrotated = tuple(index for index in range(count) if not rotates[index])
    return decoder(
        config,
        grouped_attention(config, windows, kv_heads=4, **biases(config)),
        mlp=gated_mlp(config, bias=config.flag("mlp_bias", False)),
        rope=replace(read_rope(config, 2e6), unrotated_layers=unrotated),
        tied=True,
    )


# Mistral ------------------------------------------------------------------------------------------


# transformers reads a Mistral configuration that has `layer_types` as Ministral's.
@family("MistralForCausalLM MinistralForCausalLM", "mistral ministral", bos=1, eos=2)
def mistral(config: ConfigReader) -> ModelSpec:
    """Mistral: Llama with sliding windows, of all layers or, in Ministral's form, of some."""
    windows = windows_by_layer(config, config.get("sliding_window", SIZE.or_none(), WINDOW))
    return decoder(config, grouped_attention(config, windows, kv_heads=8))


BETA = "llama_4_scaling_beta"
_MINISTRAL_KEYS = {BETA: NUMBER, "max_position_embeddings": SIZE}
_MINISTRAL_REMARKS = ("type", "max_position_embeddings")
"""Keys that repeat others."""
_MINISTRAL_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""Rotation of a file that states none."""


@family("Ministral3ForCausalLM", "ministral3", bos=1, eos=2)
def ministral3(config: ConfigReader) -> ModelSpec:
    """Ministral 3: Mistral with YaRN, whose queries grow with the position.

    A query is multiplied by 1 + beta * ln(1 + floor(position / original)). The factor is 1 within
    the length before YaRN.
    """
    attention = grouped_attention(config, same_windows(config), kv_heads=8, head_dim=128)
    rope = _ministral_rope(config)
    context = read_context(config, rope)
    if rope.parameters[BETA]:
        attention = replace(attention, growth=(rope.parameters[BETA], rope.parameters[ORIGINAL]))
    return decoder(config, attention, rope=rope, context=context, eps=1e-5)


def _ministral_rope(config: ConfigReader) -> Rope:
    rope = read_rope(config, own=_MINISTRAL_KEYS, unstated=_MINISTRAL_YARN)
    scaled = config.get("rope_scaling", TABLE.or_none(), None)
    for needed in (BETA, ORIGINAL):
        if needed not in rope.parameters:
            config.refuse("rope_scaling" if scaled else "rope_parameters", f"{needed} is missing")
    read = {key: value for key, value in rope.parameters.items() if key not in _MINISTRAL_REMARKS}
    return replace(rope, parameters={**read, "rope_type": rope.kind})


# Qwen ---------------------------------------------------------------------------------------------


def _upper_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the windows: layers from `max_window_layers` on have one."""
    first = config.get("max_window_layers", COUNT, 28)
    return windows_by_layer(config, chosen_window(config, WINDOW), lambda index: index >= first)


@family("Qwen2ForCausalLM", "qwen2")
def qwen2(config: ConfigReader) -> ModelSpec:
    """Qwen2 and Qwen2.5: Llama with biased queries, keys and values, and windows of some layers."""
    config.only("attention_bias", True)
    return decoder(
        config, grouped_attention(config, _upper_windows(config), kv_heads=32, qkv_bias=True)
    )


@family("Qwen3ForCausalLM", "qwen3")
def qwen3(config: ConfigReader) -> ModelSpec:
    """Qwen3 (dense): queries and keys are normed per head; windows as in Qwen2."""
    sizes = {"kv_heads": 32, "head_dim": 128}
    attention = grouped_attention(
        config, _upper_windows(config), **sizes, **biases(config), head_norm=True
    )
    return decoder(config, attention, LLAMA.with_parts(**QK_NORMS))


# Parts of heads rotated, other norms --------------------------------------------------------------


PHI_ROPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Rope types by the names in files: `su` is longrope's first name; `yarn` means longrope, too."""


@family("Phi3ForCausalLM", "phi3", bos=1, eos=32000)
def phi3(config: ConfigReader) -> ModelSpec:
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and optional partial rotation."""
    names = LLAMA.with_parts(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
    attention = grouped_attention(config, same_windows(config))
    rope = read_rope(config, original=4096, head_dim=attention.head_dim, kinds=PHI_ROPES)
    return decoder(config, attention, names, rope=rope, eps=1e-5)


@family("GlmForCausalLM Glm4ForCausalLM", "glm glm4", eos=(151329, 151336, 151338))
def glm4(config: ConfigReader) -> ModelSpec:
    """GLM-4, of 2024 and of 2025: half of each head is rotated, neighbours with each other. GLM-4
    of 2025 has norms around attention and MLP."""
    names = LLAMA.with_parts(
        gate_up="mlp.gate_up_proj",
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
    )
    biased = config.flag("attention_bias", True)
    attention = grouped_attention(config, kv_heads=2, head_dim=128, qkv_bias=biased)
    rope = read_rope(config, head_dim=attention.head_dim, partial=0.5)
    return decoder(
        config,
        attention,
        names,
        rope=replace(rope, neighbours=True),
        placement="around" if config.get("model_type", TEXT) == "glm4" else "before",
        eps=1.5625e-7,
    )


@family("StableLmForCausalLM", "stablelm", bos=0, eos=0)
def stablelm(config: ConfigReader) -> ModelSpec:
    """StableLM: Llama with LayerNorm and partial rotation. Attention and MLP may be parallel behind
    one norm."""
    names = LLAMA.with_parts(
        q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}"
    )
    divided_heads(config)
    attention = grouped_attention(
        config,
        kv_heads=32,
        qkv_bias=config.flag("use_qkv_bias", False),
        own_norms=config.flag("qk_layernorm", False),
    )
    parallel = config.flag("use_parallel_residual", False)
    return decoder(
        config,
        attention,
        names,
        rope=read_rope(config, head_dim=attention.head_dim, partial=0.25),
        norm=layer_norm(config, placement="once" if parallel else "before"),
        parallel=parallel,
    )


@family("Starcoder2ForCausalLM", "starcoder2", bos=50256, eos=50256)
def starcoder2(config: ConfigReader) -> ModelSpec:
    """StarCoder2: LayerNorm, an MLP without a gate, biases everywhere, and a window in all
    layers."""
    biased = config.flag("use_bias", True)
    attention = grouped_attention(
        config, same_windows(config), kv_heads=2, qkv_bias=biased, output_bias=biased
    )
    config.only("mlp_type", "default")
    config.only("norm_type", "layer_norm")
    norm = layer_norm(config, "norm_epsilon")
    # Further keys of the 15B model's file, from its predecessor; no program reads them.
    config.only("layer_norm_epsilon", norm.eps)
    config.only("scale_attn_weights", True)
    if "hidden_act" in config:
        config.pass_over("activation_function")
    config.pass_over("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    names = LLAMA.with_parts(gate_up="mlp.c_fc", down="mlp.c_proj")
    mlp = plain_mlp(config, biased, default="gelu_pytorch_tanh")
    return decoder(config, attention, names, mlp, norm=norm, tied=True)


# Norms behind attention and MLP -------------------------------------------------------------------


_NORMS_BEHIND = LLAMA.with_parts(
    **QK_NORMS,
    attention_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


@family("Olmo2ForCausalLM", "olmo2", eos=50279)
def olmo2(config: ConfigReader) -> ModelSpec:
    """OLMo 2: norms behind attention and MLP, and over all queries and all keys of a token."""
    attention = grouped_attention(config, **biases(config), joint_norm=True)
    return decoder(config, attention, _NORMS_BEHIND, placement="after", eps=1e-5)


OLMO_THETA = 500000.0


@family("Olmo3ForCausalLM", "olmo3", eos=50279)
def olmo3(config: ConfigReader) -> ModelSpec:
    """OLMo 3: OLMo 2 with windows in three of four layers, which have their own rotation."""
    # Another type could mean layers with windows, too, or not.
    config.only("rope_theta", OLMO_THETA)
    windows = windows_by_layer(
        config, config.get("sliding_window", SIZE, WINDOW), lambda index: (index + 1) % 4 != 0
    )
    attention = grouped_attention(config, windows, **biases(config), joint_norm=True)
    rope = read_two_ropes(config, OLMO_THETA, OLMO_THETA)
    return decoder(config, attention, _NORMS_BEHIND, rope=rope, placement="after", eps=1e-5)


_PATTERN = Kind("an integer or a text", lambda value: COUNT.fits(value) or TEXT.fits(value))


@family("Exaone4ForCausalLM", "exaone4", bos=0, eos=2)
def exaone4(config: ConfigReader) -> ModelSpec:
    """EXAONE 4: normed heads, and norms behind attention and MLP. If some layers have windows, the
    other layers rotate nothing."""
    window = config.get("sliding_window", SIZE.or_none(), WINDOW)
    pattern = config.get("sliding_window_pattern", _PATTERN.or_none(), 4)
    if config.get("layer_types", TEXTS.or_none(), None) is None:
        # Files without windows, or with a pattern in text, need `layer_types`.
        if window is None:
            config.refuse("sliding_window", "layer_types is missing")
        if not SIZE.fits(pattern):
            config.refuse("sliding_window_pattern", "it is not a positive integer")
    windows = windows_by_layer(config, window, lambda index: (index + 1) % pattern != 0)
    attention = grouped_attention(config, windows, kv_heads=32, head_norm=True)
    rope = read_rope(config)
    if window is not None:
        unrotated = tuple(i for i, one in enumerate(windows) if one is None)
        rope = replace(rope, unrotated_layers=unrotated)
    return decoder(config, attention, _NORMS_BEHIND, rope=rope, placement="after", eps=1e-5)


def _cohere(config: ConfigReader, attention: Attention, rope: Rope) -> ModelSpec:
    return decoder(
        config,
        attention,
        LLAMA.with_parts(**QK_NORMS),
        rope=replace(rope, neighbours=True),
        norm=layer_norm(config, bias=False, placement="once"),
        parallel=True,
        tied=True,
        logit_multiplier=config.number("logit_scale", 0.0625),
    )


@family("CohereForCausalLM", "cohere", bos=5, eos=255001)
def cohere(config: ConfigReader) -> ModelSpec:
    """Cohere 1 (Command R): no windows."""
    own_norms = config.flag("use_qk_norm", False)
    attention = grouped_attention(config, **biases(config), own_norms=own_norms)
    return _cohere(config, attention, read_rope(config, 5e5))


_COHERE_REMARKS = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}
"""Keys in files that transformers does not read, with the values that it computes."""


@family("Cohere2ForCausalLM", "cohere2", bos=5, eos=255001)
def cohere2(config: ConfigReader) -> ModelSpec:
    """Cohere 2 (Command R7B, Command A): three of four layers have windows; the others rotate
    nothing."""
    for key, value in _COHERE_REMARKS.items():
        config.only(key, value)
    config.get("_sliding_window_pattern", SIZE, 4)  # written by transformers, and not read
    pattern = config.get("sliding_window_pattern", SIZE, 4)
    config.only("layer_switch", pattern)
    windows = windows_by_layer(
        config, config.get("sliding_window", SIZE, WINDOW), lambda index: (index + 1) % pattern != 0
    )
    unrotated = tuple(index for index, window in enumerate(windows) if window is None)
    attention = grouped_attention(config, windows, **biases(config))
    return _cohere(config, attention, replace(read_rope(config), unrotated_layers=unrotated))


_GEMMA_NAMES = LLAMA.with_parts(
    attention_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def _gemma_attention(
    config: ConfigReader, slides: Callable[[int], bool], **features: Any
) -> Attention:
    """Read attention. Layers whose index `slides` have windows, unless the file states types."""
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


def _gemma(
    config: ConfigReader,
    names: WeightNames,
    attention: Attention,
    soft_cap: float | None,
    **features: Any,
) -> ModelSpec:
    """Read a Gemma. `soft_cap`: cap of logits in a file without the key."""
    return decoder(
        config,
        attention,
        names,
        _gemma_mlp(config),
        placement="around",
        norm_offset=1.0,
        tied=True,
        embedding_multiplier=config.size("hidden_size") ** 0.5,
        rounded_multiplier=True,
        logit_soft_cap=config.get("final_logit_softcapping", POSITIVE.or_none(), soft_cap) or 0.0,
        **features,
    )


def _gemma_mlp(config: ConfigReader) -> Mlp:
    """Read the MLP with `hidden_activation`; files may repeat the key as `hidden_act`."""
    mlp = gated_mlp(config, key="hidden_activation", default="gelu_pytorch_tanh")
    other = config.get("hidden_act", TEXT.or_none(), None)
    if other is not None and ACTIVATIONS.get(other) != mlp.activation:
        config.refuse("hidden_act", "it is not hidden_activation, which counts")
    return mlp


@family("Gemma2ForCausalLM", "gemma2", bos=2, eos=1)
def gemma2(config: ConfigReader) -> ModelSpec:
    """Gemma 2: capped scores and logits, windows in half of the layers."""
    # In files, but no program reads it.
    config.only("sliding_window_size", config.get("sliding_window", SIZE, WINDOW))
    soft_cap = config.get("attn_logit_softcapping", POSITIVE.or_none(), 50.0) or 0.0
    attention = _gemma_attention(config, lambda index: index % 2 == 0, soft_cap=soft_cap)
    return _gemma(config, _GEMMA_NAMES, attention, 30.0)


@family("Gemma3ForCausalLM", "gemma3_text", bos=2, eos=1)
def gemma3(config: ConfigReader) -> ModelSpec:
    """Gemma 3 (text): no caps, normed queries and keys, and two rotations."""
    config.only("attn_logit_softcapping", None)
    config.get("_sliding_window_pattern", SIZE, 6)  # written by transformers, and not read
    pattern = config.get("sliding_window_pattern", SIZE, 6)
    return _gemma(
        config,
        _GEMMA_NAMES.with_parts(**QK_NORMS),
        _gemma_attention(config, lambda index: (index + 1) % pattern != 0, head_norm=True),
        None,
        rope=read_two_ropes(config, 1e6, 1e4, "rope_local_base_freq"),
        # With Gemma's `linear` scaling the stated length is the length after scaling.
        context=config.size("max_position_embeddings"),
    )
