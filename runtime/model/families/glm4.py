"""GLM-4, of 2024 and of 2025: half of each head is rotated, neighbours with each other.

The later one has norms around attention and MLP.
"""

from dataclasses import replace

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import TEXT, ConfigReader, read_rope
from rootlace.runtime.model.families.reading import Family, decoder, gated_mlp, grouped_attention
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(
    gate_up="mlp.gate_up_proj",
    attention_out_norm="post_self_attn_layernorm",
    mlp_out_norm="post_mlp_layernorm",
)


def _read(given: ConfigReader) -> ModelSpec:
    attention = grouped_attention(
        given, kv_heads=2, head_dim=128, qkv_bias=given.flag("attention_bias", True)
    )
    rope = read_rope(given, head_dim=attention.head_dim, partial=0.5)
    return decoder(
        given,
        NAMES,
        attention,
        gated_mlp(given),
        rope=replace(rope, neighbours=True),
        placement="around" if given("model_type", TEXT) == "glm4" else "before",
        eps=1.5625e-7,
    )


FAMILY = Family(
    architectures=("GlmForCausalLM", "Glm4ForCausalLM"),
    model_types=("glm", "glm4"),
    read=_read,
    eos_token_id=(151329, 151336, 151338),
)
