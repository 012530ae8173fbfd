"""OLMoE: experts in all layers, and norms of all queries and all keys of a token."""

from rootlace.runtime.model.families import olmo2, qwen2_moe
from rootlace.runtime.model.families.config_reader import ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    divided_heads,
    gated_mlp,
    grouped_attention,
    read_experts,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = qwen2_moe.NAMES.with_parts(
    q_norm=olmo2.NAMES.parts["q_norm"], k_norm=olmo2.NAMES.parts["k_norm"]
)


def _read(given: ConfigReader) -> ModelSpec:
    given.only("clip_qkv", None)
    divided_heads(given)
    attention = grouped_attention(given, **biases(given), joint_norm=True)
    experts = read_experts(
        given, count=64, chosen=8, normalised=given.flag("norm_topk_prob", False)
    )
    return decoder(given, NAMES, attention, gated_mlp(given), eps=1e-5, experts=experts)


FAMILY = Family(
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    read=_read,
    eos_token_id=50279,
)
