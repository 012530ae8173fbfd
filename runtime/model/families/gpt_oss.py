"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every
other layer, YaRN."""

from dataclasses import replace
from typing import Any

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import (
    ORIGINAL,
    POSITIVE,
    SIZE,
    TABLE,
    ConfigReader,
    read_rope,
)
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
    read_experts,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec, Rope

NAMES = replace(
    llama.NAMES.with_parts(
        sinks="self_attn.sinks",
        router="mlp.router",
        expert_gate_up="mlp.experts.gate_up_proj",
        expert_down="mlp.experts.down_proj",
    ),
    stacks="alternating",
)
WINDOW = 128
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
"""The rotation of a file that does not say."""


def _read(given: ConfigReader) -> ModelSpec:
    given.only("hidden_act", "silu")  # which transformers does not look at
    window = given("sliding_window", SIZE.or_none(), WINDOW)
    attention = grouped_attention(
        given,
        windows_by_layer(given, window, lambda index: index % 2 == 0),
        kv_heads=8,
        head_dim=64,
        **{**biases(given.renamed({}, attention_bias=True)), "sinks": True},
    )
    clamp = (given.number("swiglu_alpha", 1.702), float(given("swiglu_limit", POSITIVE, 7.0)))
    experts = read_experts(
        given, count=128, chosen=4, normalised=True, router_bias=True, bias=True, clamp=clamp
    )
    given.only("experts_per_token", experts.chosen)
    rope = _read_rope(given)
    given.only("initial_context_length", rope.parameters.get(ORIGINAL))
    return decoder(given, NAMES, attention, gated_mlp(given), rope=rope, eps=1e-5, experts=experts)


def _read_rope(given: ConfigReader) -> Rope:
    stated = given("rope_parameters", TABLE.or_none(), None) is not None
    if not stated and not given("rope_scaling", TABLE.or_none(), None):
        given = given.renamed({"rope_scaling": "default_rope"}, default_rope=YARN)
    return read_rope(given, 150000.0)


FAMILY = Family(architectures=("GptOssForCausalLM",), model_types=("gpt_oss",), read=_read)
