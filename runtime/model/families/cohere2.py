"""Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one LayerNorm.

Three of four layers have windows; the others know nothing of positions.
"""

from dataclasses import replace

from rootlace.runtime.model.families import cohere
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader, read_rope
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    biases,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

REMARKS = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}
"""Keys that files have and transformers does not read, with what it computes."""


def _read(given: ConfigReader) -> ModelSpec:
    for key, value in REMARKS.items():
        given.only(key, value)
    given("_sliding_window_pattern", SIZE, 4)  # what transformers has written, and does not read
    pattern = given("sliding_window_pattern", SIZE, 4)
    given.only("layer_switch", pattern)
    windows = windows_by_layer(
        given, given("sliding_window", SIZE, WINDOW), lambda index: (index + 1) % pattern != 0
    )
    unrotated = tuple(index for index, window in enumerate(windows) if window is None)
    attention = grouped_attention(given, windows, **biases(given))
    rope = replace(read_rope(given), unrotated_layers=unrotated)
    return cohere.read_decoder(given, attention, rope)


FAMILY = Family(
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    read=_read,
    bos_token_id=5,
    eos_token_id=255001,
)
