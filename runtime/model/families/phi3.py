"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, of whose heads a part may be rotated."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader, read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""What files call the rope types: `su` is longrope's first name, `yarn` was never YaRN's."""


def _read(given: ConfigReader) -> ModelSpec:
    window = given("sliding_window", SIZE.or_none(), None)
    windows = (window,) * given.layers()
    attention = grouped_attention(given, windows)
    rope = read_rope(given, original=4096, head_dim=attention.head_dim, kinds=KINDS)
    return decoder(given, NAMES, attention, gated_mlp(given), rope=rope, eps=1e-5)


FAMILY = Family(
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read=_read,
    bos_token_id=1,
    eos_token_id=32000,
)
