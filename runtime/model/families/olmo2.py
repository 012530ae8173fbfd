"""OLMo 2: norms behind attention and MLP, and of all queries and all keys of a token."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    attention_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def _read(given: ConfigReader) -> ModelSpec:
    attention = grouped_attention(given, **biases(given), joint_norm=True)
    return decoder(given, NAMES, attention, gated_mlp(given), placement="after", eps=1e-5)


FAMILY = Family(
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    read=_read,
    eos_token_id=50279,
)
