"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere, and a window in all layers."""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    grouped_attention,
    layer_norm,
    plain_mlp,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(gate_up="mlp.c_fc", down="mlp.c_proj")


def _read(given: ConfigReader) -> ModelSpec:
    biased = given.flag("use_bias", True)
    window = given("sliding_window", SIZE.or_none(), None)
    attention = grouped_attention(
        given, (window,) * given.layers(), kv_heads=2, qkv_bias=biased, output_bias=biased
    )
    given.only("mlp_type", "default")
    given.only("norm_type", "layer_norm")
    norm = layer_norm(given, "norm_epsilon")
    # What the 15B model's file says besides: as in the model that it grew out of. Nobody reads it.
    given.only("layer_norm_epsilon", norm.eps)
    given.only("scale_attn_weights", True)
    if "hidden_act" in given:
        given.pass_over("activation_function")
    given.pass_over("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    return decoder(
        given,
        NAMES,
        attention,
        plain_mlp(given, biased, default="gelu_pytorch_tanh"),
        norm=norm,
        tied=True,
    )


FAMILY = Family(
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    read=_read,
    bos_token_id=50256,
    eos_token_id=50256,
)
