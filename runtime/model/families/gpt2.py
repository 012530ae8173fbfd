"""GPT-2: learned positions, LayerNorm, an MLP without a gate, and transposed matrices."""

from dataclasses import replace

from rootlace.runtime.model.families.config_reader import SIZE, TEXT, ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    layer_norm,
    multi_head_attention,
    no_rope,
    plain_mlp,
)
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames

KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
NAMES = WeightNames(
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
BARE = replace(NAMES, embedding="wte", layer="h.{}.", final_norm="ln_f", positions="wpe")
"""The names of the first checkpoints."""


def _read(file: ConfigReader) -> ModelSpec:
    given = file.renamed(KEYS)
    given.only("scale_attn_by_inverse_layer_idx", False)
    given.only("n_ctx", given.size("max_position_embeddings"))
    given.only("n_special", 0)
    given.pass_over(
        # What precision scores have in training, and heads of other tasks.
        "reorder_and_upcast_attn",
        "predict_special_tokens",
        *("summary_type", "summary_use_proj", "summary_proj_to_labels", "summary_first_dropout"),
    )
    given("summary_activation", TEXT.or_none(), None)
    attention = multi_head_attention(given, qkv_bias=True, output_bias=True)
    if not given.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    inner_size = given("intermediate_size", SIZE.or_none(), None) or 4 * given.size("hidden_size")
    positions = given.size("max_position_embeddings")
    return decoder(
        given,
        replace(NAMES, others=(BARE,)),
        attention,
        plain_mlp(given, bias=True, default="gelu_new", inner_size=inner_size),
        rope=no_rope(given),
        context=positions,
        norm=layer_norm(given, "layer_norm_epsilon"),
        tied=True,
        learned_positions=positions,
    )


FAMILY = Family(
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    read=_read,
    bos_token_id=50256,
    eos_token_id=50256,
)
