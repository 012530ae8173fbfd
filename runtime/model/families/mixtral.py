"""Mixtral: Mistral with experts in all layers."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader, read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    read_experts,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)


def _read(given: ConfigReader) -> ModelSpec:
    window = given("sliding_window", SIZE.or_none(), None)
    attention = grouped_attention(given, (window,) * given.layers(), kv_heads=8)
    return decoder(
        given,
        NAMES,
        attention,
        gated_mlp(given),
        rope=read_rope(given, 1e6),
        eps=1e-5,
        experts=read_experts(given, count=8, chosen=2, normalised=True),
    )


FAMILY = Family(
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    read=_read,
    bos_token_id=1,
    eos_token_id=2,
)
