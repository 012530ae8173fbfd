"""Llama 2, 3 and their like."""

from rootlace.runtime.model.families.config_reader import ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
)
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames

NAMES = WeightNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    parts={
        "input_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "post_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    final_norm="model.norm",
    head="lm_head",
)


def _read(given: ConfigReader) -> ModelSpec:
    attention = grouped_attention(given, **biases(given))
    return decoder(given, NAMES, attention, gated_mlp(given, bias=given.flag("mlp_bias", False)))


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    read=_read,
    bos_token_id=1,
    eos_token_id=2,
)
