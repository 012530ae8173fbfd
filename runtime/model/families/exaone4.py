"""EXAONE 4: normed heads, and norms behind attention and MLP.

Where some layers have windows, the others know nothing of positions.
"""

from dataclasses import replace

from rootlace.runtime.model.families import olmo2
from rootlace.runtime.model.families.config_reader import (
    COUNT,
    SIZE,
    TEXT,
    TEXTS,
    ConfigReader,
    Kind,
    read_rope,
)
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

_PATTERN = Kind("an integer or a text", lambda value: COUNT.fits(value) or TEXT.fits(value))


def _read(given: ConfigReader) -> ModelSpec:
    window = given("sliding_window", SIZE.or_none(), WINDOW)
    pattern = given("sliding_window_pattern", _PATTERN.or_none(), 4)
    if given("layer_types", TEXTS.or_none(), None) is None:
        # Files without windows, and those whose pattern is a text, say which layers have which.
        if window is None:
            given.refuse("sliding_window", "layer_types is missing")
        if not SIZE.fits(pattern):
            given.refuse("sliding_window_pattern", "it is not a positive integer")
    windows = windows_by_layer(given, window, lambda index: (index + 1) % pattern != 0)
    attention = grouped_attention(given, windows, kv_heads=32, head_norm=True)
    rope = read_rope(given)
    if window is not None:
        unrotated = tuple(i for i, one in enumerate(windows) if one is None)
        rope = replace(rope, unrotated_layers=unrotated)
    return decoder(
        given, olmo2.NAMES, attention, gated_mlp(given), rope=rope, placement="after", eps=1e-5
    )


FAMILY = Family(
    architectures=("Exaone4ForCausalLM",),
    model_types=("exaone4",),
    read=_read,
    bos_token_id=0,
    eos_token_id=2,
)
