"""Falcon: LayerNorm, an MLP without a gate, and few heads of keys, or one.

The later form (40B, 180B, Falcon 2) has groups of queries, and attention and MLP are side by side,
each behind a norm of its own. The first form has them side by side behind one norm, or one after
the other.
"""

from dataclasses import replace

from rootlace.runtime.model.families.config_reader import COUNT, FLAG, SIZE, ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    divided_heads,
    grouped_attention,
    layer_norm,
    plain_mlp,
)
from rootlace.runtime.model.families.spec import ModelSpec, Placement, WeightNames

KEYS = {
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_act": "activation",
}
NAMES = WeightNames(
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
TWO_NORMS = NAMES.with_parts(input_norm="ln_attn", post_norm="ln_mlp")


def _read(file: ConfigReader) -> ModelSpec:
    given = file.renamed(KEYS, max_position_embeddings=2048)
    given.only("alibi", False)
    given.only("apply_residual_connection_post_layernorm", False)
    divided_heads(given)
    biased = _flag(given, "bias", False)
    grouped = _flag(given, "new_decoder_architecture", False)
    one_key = _flag(given, "multi_query", True) and not grouped
    names, placement, parallel = _branches(given, grouped)
    attention = grouped_attention(given, qkv_bias=biased, output_bias=biased)
    if one_key:
        attention = replace(attention, num_kv_heads=1)
    elif not grouped and attention.num_kv_heads != attention.num_heads:
        given.refuse("num_key_value_heads", "it is not num_attention_heads")
    hidden = given.size("hidden_size")
    inner_size = given("intermediate_size", SIZE.or_none(), None) or 4 * hidden
    factor = given("ff_factor", SIZE.or_none(), None)
    if factor and factor * hidden != inner_size:
        given.refuse("ff_factor", f"{given.name('intermediate_size')} is {inner_size}")
    return decoder(
        given,
        replace(names, qkv_by_group=not one_key),
        attention,
        plain_mlp(given, biased, inner_size=inner_size),
        norm=layer_norm(given, "layer_norm_epsilon", placement=placement),
        parallel=parallel,
        tied=True,
    )


def _branches(given: ConfigReader, grouped: bool) -> tuple[WeightNames, Placement, bool]:
    """Names, where norms are, and whether attention and MLP are side by side."""
    parallel = _flag(given, "parallel_attn", True)
    norms = given("num_ln_in_parallel_attn", COUNT.or_none(), None)
    if norms is None:
        norms = 2 if grouped else 1
    if not parallel and not grouped:
        return NAMES, "before", False
    if not parallel:
        given.refuse("parallel_attn", "new_decoder_architecture has no other form")
    if norms == 1:
        return NAMES, "once", True
    if norms != 2 or not grouped:
        given.refuse("num_ln_in_parallel_attn", "it is 1, or 2 with new_decoder_architecture")
    return TWO_NORMS, "before", True


def _flag(given: ConfigReader, key: str, default: bool) -> bool:
    return bool(given(key, FLAG.or_none(), default))


FAMILY = Family(
    architectures=("FalconForCausalLM",),
    model_types=("falcon",),
    read=_read,
    bos_token_id=11,
    eos_token_id=11,
)
