"""SmolLM3: Llama with layers, mostly every fourth, that know nothing of positions."""

from dataclasses import replace

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import COUNT, SIZE, ConfigReader, Kind, read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    biases,
    chosen_window,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

_FLAGS = Kind("a list of 0 and 1", lambda v: type(v) is list and all(one in (0, 1) for one in v))


def _read(given: ConfigReader) -> ModelSpec:
    count = given.layers()
    interval = given("no_rope_layer_interval", SIZE, 4)
    rotates = given("no_rope_layers", _FLAGS.or_none(), None)
    if rotates is None:
        rotates = [(index + 1) % interval != 0 for index in range(count)]
    if len(rotates) < count:
        given.refuse("no_rope_layers", f"there are {count} layers")
    given("max_window_layers", COUNT, 0)  # files have it, and nobody reads it
    attention = grouped_attention(
        given,
        windows_by_layer(given, chosen_window(given, None), lambda index: not rotates[index]),
        kv_heads=4,
        **biases(given),
    )
    unrotated = tuple(index for index in range(count) if not rotates[index])
    return decoder(
        given,
        llama.NAMES,
        attention,
        gated_mlp(given, bias=given.flag("mlp_bias", False)),
        rope=replace(read_rope(given, 2e6), unrotated_layers=unrotated),
        tied=True,
    )


FAMILY = Family(
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    read=_read,
    bos_token_id=128000,
    eos_token_id=128001,
)
