"""GPT-NeoX and Pythia: LayerNorm, an MLP without a gate, and attention beside it or before it."""

from dataclasses import replace

from rootlace.runtime.model.families.config_reader import ConfigReader, read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    layer_norm,
    multi_head_attention,
    plain_mlp,
)
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames

NAMES = WeightNames(
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


def _read(given: ConfigReader) -> ModelSpec:
    biased = given.flag("attention_bias", True)
    given.flag("is_decoder", False)  # which nobody reads
    attention = multi_head_attention(given, qkv_bias=biased, output_bias=biased)
    rope = read_rope(
        given,
        head_dim=attention.head_dim,
        partial=0.25,
        theta_key="rotary_emb_base",
        partial_key="rotary_pct",
    )
    return decoder(
        given,
        # transformers calls the head as other families do, and reads and writes this name.
        replace(NAMES, others=(replace(NAMES, head="lm_head"),)),
        attention,
        plain_mlp(given, bias=True),
        rope=rope,
        norm=layer_norm(given),
        parallel=given.flag("use_parallel_residual", True),
    )


FAMILY = Family(
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    read=_read,
    bos_token_id=0,
    eos_token_id=2,
)
