"""OLMo 3: as OLMo 2, with windows in three of four layers, which have a rotation of their own."""

from rootlace.runtime.model.families import olmo2
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader, read_two_ropes
from rootlace.runtime.model.families.reading import (
    WINDOW,
    Family,
    biases,
    decoder,
    gated_mlp,
    grouped_attention,
    windows_by_layer,
)
from rootlace.runtime.model.families.spec import ModelSpec

THETA = 500000.0


def _read(given: ConfigReader) -> ModelSpec:
    # Of another one it would be unclear whether it is that of the layers with windows, too.
    given.only("rope_theta", THETA)
    window = given("sliding_window", SIZE, WINDOW)
    attention = grouped_attention(
        given,
        windows_by_layer(given, window, lambda index: (index + 1) % 4 != 0),
        **biases(given),
        joint_norm=True,
    )
    return decoder(
        given,
        olmo2.NAMES,
        attention,
        gated_mlp(given),
        rope=read_two_ropes(given, THETA, THETA),
        placement="after",
        eps=1e-5,
    )


FAMILY = Family(
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    read=_read,
    eos_token_id=50279,
)
