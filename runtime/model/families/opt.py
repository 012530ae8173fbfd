"""OPT and Galactica: learned positions, LayerNorm, an MLP without a gate."""

from dataclasses import replace

from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    multi_head_attention,
    no_rope,
    plain_mlp,
)
from rootlace.runtime.model.families.spec import ModelSpec, Norm, WeightNames

KEYS = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
NAMES = WeightNames(
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
BARE = replace(
    NAMES,
    embedding="decoder.embed_tokens",
    layer="decoder.layers.{}.",
    final_norm="decoder.final_layer_norm",
    positions="decoder.embed_positions",
)
"""The names of the first checkpoints."""
ONLY = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
    # What files of OPT and Galactica say besides.
    "output_projection": True,
    "learned_embeddings": True,
    "scale_embeddings": False,
}


def _read(file: ConfigReader) -> ModelSpec:
    given = file.renamed(KEYS)
    for key, value in ONLY.items():
        given.only(key, value)
    hidden = given.size("hidden_size")
    if (given("word_embed_proj_dim", SIZE.or_none(), None) or hidden) != hidden:
        given.refuse("word_embed_proj_dim", f"only hidden_size ({hidden}) is supported")
    biased = given.flag("enable_bias", True)
    positions = given.size("max_position_embeddings")
    return decoder(
        given,
        replace(NAMES, others=(BARE,)),
        multi_head_attention(given, qkv_bias=biased, output_bias=biased),
        plain_mlp(given, biased, default="relu"),
        rope=no_rope(given),
        context=positions,
        norm=Norm(1e-5, kind="layer", bias=True),
        tied=True,
        learned_positions=positions,
        skipped_positions=2,
    )


FAMILY = Family(
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    read=_read,
    bos_token_id=2,
    eos_token_id=2,
)
