"""Read GPT-2, GPT-NeoX, OPT and Falcon: LayerNorm, and an MLP without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from rootlace.runtime.model.families.config_reader import COUNT, FLAG, SIZE, TEXT, ConfigReader
from rootlace.runtime.model.families.reading import (
    decoder,
    divided_heads,
    family,
    grouped_attention,
    layer_norm,
    multi_head_attention,
    no_rope,
    plain_mlp,
    read_rope,
)
from rootlace.runtime.model.families.spec import ModelSpec, Norm, Placement, WeightNames

# GPT-2 --------------------------------------------------------------------------------------------


GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
GPT2_NAMES = WeightNames(
    embedding="transformer.wte",
    layer="transformer.h.{}.",
    parts={
        "input_norm": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "output": ("attn.c_proj",),
        "post_norm": ("ln_2",),
        "gate_up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    final_norm="transformer.ln_f",
    head="lm_head",
    buffers=(".attn.bias", ".attn.masked_bias"),
    positions="transformer.wpe",
    transposed=True,
)
GPT2_BARE = replace(GPT2_NAMES, embedding="wte", layer="h.{}.", final_norm="ln_f", positions="wpe")
"""Names of weights in the first checkpoints."""


@family("GPT2LMHeadModel", "gpt2", bos=50256, eos=50256)
def gpt2(file: ConfigReader) -> ModelSpec:
    """GPT-2: learned positions and transposed matrices."""
    config = file.renamed(GPT2_KEYS)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("n_ctx", config.size("max_position_embeddings"))
    config.only("n_special", 0)
    config.pass_over(
        # Precision of scores in training, and heads of other tasks.
        "reorder_and_upcast_attn",
        "predict_special_tokens",
        *("summary_type", "summary_use_proj", "summary_proj_to_labels", "summary_first_dropout"),
    )
    config.get("summary_activation", TEXT.or_none(), None)
    attention = multi_head_attention(config, qkv_bias=True, output_bias=True)
    if not config.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    stated = config.get("intermediate_size", SIZE.or_none(), None)
    inner_size = stated or 4 * config.size("hidden_size")
    positions = config.size("max_position_embeddings")
    return decoder(
        config,
        attention,
        replace(GPT2_NAMES, others=(GPT2_BARE,)),
        plain_mlp(config, bias=True, default="gelu_new", inner_size=inner_size),
        rope=no_rope(config),
        context=positions,
        norm=layer_norm(config, "layer_norm_epsilon"),
        tied=True,
        learned_positions=positions,
    )


# GPT-NeoX -----------------------------------------------------------------------------------------


NEOX_NAMES = WeightNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}.",
    parts={
        "input_norm": ("input_layernorm",),
        "qkv": ("attention.query_key_value",),
        "output": ("attention.dense",),
        "post_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv_by_group=True,
    buffers=(".attention.bias", ".attention.masked_bias"),
)


@family("GPTNeoXForCausalLM", "gpt_neox", bos=0, eos=2)
def gpt_neox(config: ConfigReader) -> ModelSpec:
    """GPT-NeoX and Pythia: attention beside the MLP or before it."""
    biased = config.flag("attention_bias", True)
    config.flag("is_decoder", False)  # no program reads it
    attention = multi_head_attention(config, qkv_bias=biased, output_bias=biased)
    rope = read_rope(
        config,
        head_dim=attention.head_dim,
        partial=0.25,
        theta_key="rotary_emb_base",
        partial_key="rotary_pct",
    )
    return decoder(
        config,
        attention,
        # transformers names the head `lm_head`, but reads and writes NeoX's name.
        replace(NEOX_NAMES, others=(replace(NEOX_NAMES, head="lm_head"),)),
        plain_mlp(config, bias=True),
        rope=rope,
        norm=layer_norm(config),
        parallel=config.flag("use_parallel_residual", True),
    )


# OPT ----------------------------------------------------------------------------------------------


OPT_KEYS = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
OPT_NAMES = WeightNames(
    embedding="model.decoder.embed_tokens",
    layer="model.decoder.layers.{}.",
    parts={
        "input_norm": ("self_attn_layer_norm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.out_proj",),
        "post_norm": ("final_layer_norm",),
        "gate_up": ("fc1",),
        "down": ("fc2",),
    },
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    positions="model.decoder.embed_positions",
)
OPT_BARE = replace(
    OPT_NAMES,
    embedding="decoder.embed_tokens",
    layer="decoder.layers.{}.",
    final_norm="decoder.final_layer_norm",
    positions="decoder.embed_positions",
)
"""Names of weights in the first checkpoints."""
OPT_ONLY = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
    # Further keys in files of OPT and Galactica.
    "output_projection": True,
    "learned_embeddings": True,
    "scale_embeddings": False,
}


@family("OPTForCausalLM", "opt", bos=2, eos=2)
def opt(file: ConfigReader) -> ModelSpec:
    """OPT and Galactica: learned positions."""
    config = file.renamed(OPT_KEYS)
    for key, value in OPT_ONLY.items():
        config.only(key, value)
    hidden = config.size("hidden_size")
    if (config.get("word_embed_proj_dim", SIZE.or_none(), None) or hidden) != hidden:
        config.refuse("word_embed_proj_dim", f"only hidden_size ({hidden}) is supported")
    biased = config.flag("enable_bias", True)
    positions = config.size("max_position_embeddings")
    return decoder(
        config,
        multi_head_attention(config, qkv_bias=biased, output_bias=biased),
        replace(OPT_NAMES, others=(OPT_BARE,)),
        plain_mlp(config, biased, default="relu"),
        rope=no_rope(config),
        context=positions,
        norm=Norm(1e-5, kind="layer", bias=True),
        tied=True,
        learned_positions=positions,
        skipped_positions=2,
    )


# Falcon -------------------------------------------------------------------------------------------


FALCON_KEYS = {
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_act": "activation",
}
FALCON_NAMES = WeightNames(
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}.",
    parts={
        "input_norm": ("input_layernorm",),
        "qkv": ("self_attention.query_key_value",),
        "output": ("self_attention.dense",),
        "post_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    final_norm="transformer.ln_f",
    head="lm_head",
)
FALCON_TWO_NORMS = FALCON_NAMES.with_parts(input_norm="ln_attn", post_norm="ln_mlp")


@family("FalconForCausalLM", "falcon", bos=11, eos=11)
def falcon(file: ConfigReader) -> ModelSpec:
    """Falcon: few heads of keys, or one.

    The later form (40B, 180B, Falcon 2) has groups of queries; attention and MLP are parallel, each
    behind its own norm. The first form has both in parallel behind one norm, or in sequence.
    """
    config = file.renamed(FALCON_KEYS, max_position_embeddings=2048)
    config.only("alibi", False)
    config.only("apply_residual_connection_post_layernorm", False)
    divided_heads(config)
    biased = _flag(config, "bias", False)
    grouped = _flag(config, "new_decoder_architecture", False)
    one_key = _flag(config, "multi_query", True) and not grouped
    names, placement, parallel = _branches(config, grouped)
    attention = grouped_attention(config, qkv_bias=biased, output_bias=biased)
    if one_key:
        attention = replace(attention, num_kv_heads=1)
    elif not grouped and attention.num_kv_heads != attention.num_heads:
        config.refuse("num_key_value_heads", "it is not num_attention_heads")
    hidden = config.size("hidden_size")
    inner_size = config.get("intermediate_size", SIZE.or_none(), None) or 4 * hidden
    factor = config.get("ff_factor", SIZE.or_none(), None)
    if factor and factor * hidden != inner_size:
        config.refuse("ff_factor", f"{config.name('intermediate_size')} is {inner_size}")
    return decoder(
        config,
        attention,
        replace(names, qkv_by_group=not one_key),
        plain_mlp(config, biased, inner_size=inner_size),
        norm=layer_norm(config, "layer_norm_epsilon", placement=placement),
        parallel=parallel,
        tied=True,
    )


def _branches(config: ConfigReader, grouped: bool) -> tuple[WeightNames, Placement, bool]:
    """Return names of weights, the placement of norms, and whether branches are parallel."""
    parallel = _flag(config, "parallel_attn", True)
    norms = config.get("num_ln_in_parallel_attn", COUNT.or_none(), None)
    if norms is None:
        norms = 2 if grouped else 1
    if not parallel and not grouped:
        return FALCON_NAMES, "before", False
    if not parallel:
        config.refuse("parallel_attn", "new_decoder_architecture has no other form")
    if norms == 1:
        return FALCON_NAMES, "once", True
    if norms != 2 or not grouped:
        config.refuse("num_ln_in_parallel_attn", "it is 1, or 2 with new_decoder_architecture")
    return FALCON_TWO_NORMS, "before", True


def _flag(config: ConfigReader, key: str, default: bool) -> bool:
    return bool(config.get(key, FLAG.or_none(), default))
