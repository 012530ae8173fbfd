"""Qwen3 (dense): queries and keys are normed per head; windows as Qwen2's."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
    upper_windows,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


def _read(given: ConfigReader) -> ModelSpec:
    attention = grouped_attention(
        given,
        upper_windows(given),
        kv_heads=32,
        head_dim=128,
        **biases(given),
        head_norm=True,
    )
    return decoder(given, NAMES, attention, gated_mlp(given))


FAMILY = Family(architectures=("Qwen3ForCausalLM",), model_types=("qwen3",), read=_read)
