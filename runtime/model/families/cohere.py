"""Cohere 1 and 2: attention and MLP side by side behind one LayerNorm."""

from __future__ import annotations

from dataclasses import replace

from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader
from rootlace.runtime.model.families.reading import (
    LLAMA,
    QK_NORMS,
    WINDOW,
    biases,
    decoder,
    family,
    grouped_attention,
    layer_norm,
    read_rope,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import Attention, ModelSpec, Rope


def _decoder(config: ConfigReader, attention: Attention, rope: Rope) -> ModelSpec:
    return decoder(
        config,
        attention,
        LLAMA.with_parts(**QK_NORMS),
        rope=replace(rope, neighbours=True),
        norm=layer_norm(config, bias=False, placement="once"),
        parallel=True,
        tied=True,
        logit_multiplier=config.number("logit_scale", 0.0625),
    )


@family("CohereForCausalLM", "cohere", bos=5, eos=255001)
def cohere(config: ConfigReader) -> ModelSpec:
    """Cohere 1 (Command R): no windows."""
    own_norms = config.flag("use_qk_norm", False)
    attention = grouped_attention(config, **biases(config), own_norms=own_norms)
    return _decoder(config, attention, read_rope(config, 5e5))


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


@family("Cohere2ForCausalLM", "cohere2", bos=5, eos=255001)
def cohere2(config: ConfigReader) -> ModelSpec:
    """Cohere 2 (Command R7B, Command A): three of four layers have windows; the others know nothing
    of positions."""
    for key, value in REMARKS.items():
        config.only(key, value)
    config.get("_sliding_window_pattern", SIZE, 4)  # transformers has written and does not read it
    pattern = config.get("sliding_window_pattern", SIZE, 4)
    config.only("layer_switch", pattern)
    windows = windows_by_layer(
        config, config.get("sliding_window", SIZE, WINDOW), lambda index: (index + 1) % pattern != 0
    )
    unrotated = tuple(index for index, window in enumerate(windows) if window is None)
    attention = grouped_attention(config, windows, **biases(config))
    return _decoder(config, attention, replace(read_rope(config), unrotated_layers=unrotated))
