"""From a `config.json` to a spec: what the families' files have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    COUNTS,
    NOT_NEGATIVE,
    SIZE,
    TEXT,
    TEXTS,
    ConfigReader,
    check_factors,
    read_context,
    read_rope,
)
from rootlace.runtime.model.families.spec import (
    Activation,
    Attention,
    Experts,
    GatedMlp,
    ModelSpec,
    Norm,
    Placement,
    PlainMlp,
    Rope,
    WeightNames,
)

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
PLAIN_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""Those of MLPs without a gate."""
WINDOW = 4096
"""The sliding window of a file that does not say, in all families that have one."""


COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What files call the number of experts."""


@dataclass(frozen=True)
class Family:
    """What a family's file defines, as `FAMILY`. `model_types`: the names that transformers has for
    configurations of these `architectures`; the tokens are those that begin and end a text where
    the folder does not say."""

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[ConfigReader], ModelSpec]
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


def decoder(
    given: ConfigReader,
    names: WeightNames,
    attention: Attention,
    mlp: GatedMlp | PlainMlp,
    *,
    rope: Rope | None = None,
    context: int | None = None,
    placement: Placement = "before",
    norm_offset: float = 0.0,
    eps: float = 1e-6,
    norm: Norm | None = None,
    tied: bool = False,
    **features: Any,
) -> ModelSpec:
    """A decoder with RMSNorm (see `Norm`), unless another `norm` is given. `eps` and `tied` are
    those of a file without the keys; `rope` and `context` None: as `read_rope` and `read_context`
    find them; `features` are fields of `ModelSpec`."""
    rope = rope or read_rope(given)
    check_factors(given, rope, attention.head_dim)
    if norm is None:
        eps = float(given("rms_norm_eps", NOT_NEGATIVE, eps))
        norm = Norm(eps, placement=placement, offset=norm_offset)
    return ModelSpec(
        vocab_size=given.size("vocab_size"),
        hidden_size=given.size("hidden_size"),
        num_layers=given.layers(),
        max_context=context or read_context(given, rope),
        norm=norm,
        attention=attention,
        mlp=mlp,
        rope=rope,
        names=names,
        tied_embeddings=given.flag("tie_word_embeddings", tied),
        **features,
    )


def grouped_attention(
    given: ConfigReader,
    windows: tuple[int | None, ...] | None = None,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **features: Any,
) -> Attention:
    """`windows` None: full attention in all layers. `kv_heads` and `head_dim` are those of a file
    without the keys; None: as many as heads, hidden_size / heads. `features` are fields of
    `Attention`."""
    heads = given.size("num_attention_heads")
    kv_heads = given("num_key_value_heads", SIZE.or_none(), kv_heads) or heads
    head_dim = given("head_dim", SIZE.or_none(), head_dim) or given.size("hidden_size") // heads
    if heads % kv_heads:
        given.refuse(
            "num_key_value_heads", f"num_attention_heads ({heads}) is not a multiple of it"
        )
    if head_dim % 2 or head_dim == 0:
        key = "head_dim" if "head_dim" in given else "hidden_size"
        given.refuse(key, f"a head of {head_dim} numbers is not supported")
    return Attention(
        **{
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "windows": windows or windows_by_layer(given, None),
        }
        | features
    )


def multi_head_attention(given: ConfigReader, **features: Any) -> Attention:
    """As `grouped_attention`, of a family with as many heads of keys as of queries."""
    divided_heads(given)
    given.only("num_key_value_heads", given.size("num_attention_heads"))
    return grouped_attention(given, **features)


def divided_heads(given: ConfigReader) -> None:
    """Refuse heads that do not have hidden_size / heads numbers each."""
    heads, hidden = given.size("num_attention_heads"), given.size("hidden_size")
    if hidden % heads:
        name = given.name("hidden_size")
        given.refuse("num_attention_heads", f"{name} ({hidden}) is not a multiple of it")
    given.only("head_dim", hidden // heads)


def no_rope(given: ConfigReader) -> Rope:
    """That of a family without rotation."""
    return Rope("default", {"rope_theta": 1e4}, unrotated_layers=tuple(range(given.layers())))


def biases(given: ConfigReader) -> dict[str, Any]:
    """Fields of `Attention`: `attention_bias` is that of all its projections."""
    biased = given.flag("attention_bias", False)
    return {"qkv_bias": biased, "output_bias": biased}


def gated_mlp(
    given: ConfigReader, bias: bool = False, key: str = "hidden_act", default: str = "silu"
) -> GatedMlp:
    """An MLP whose activation is what `key` says, `default` where it is not there."""
    activation = ACTIVATIONS.get(given(key, TEXT, default))
    if activation is None:
        given.refuse(key, f"only {', '.join(ACTIVATIONS)} are supported")
    return GatedMlp(given.size("intermediate_size"), activation, bias)


def read_experts(
    given: ConfigReader,
    *,
    count: int,
    chosen: int,
    size_key: str = "intermediate_size",
    layers: tuple[int, ...] | None = None,
    **features: Any,
) -> Experts:
    """A mixture of experts in these `layers`, None: in all. `count` and `chosen` are those of a
    file without the keys; `features` are fields of `Experts`."""
    keys = [key for key in COUNT_KEYS if key in given]
    found = given.size(keys[0], count) if keys else count
    for key in keys[1:]:
        if given.size(key) != found:
            given.refuse(key, f"{keys[0]} is {found}")
    chosen = given.size("num_experts_per_tok", chosen)
    if chosen > found:
        given.refuse("num_experts_per_tok", f"there are {found} experts")
    layers = tuple(range(given.layers())) if layers is None else layers
    return Experts(layers, found, chosen, given.size(size_key), **features)


def sparse_layers(given: ConfigReader) -> tuple[int, ...]:
    """Every so many layers have experts, but those that the file names."""
    step = given.size("decoder_sparse_step", 1)
    dense = given("mlp_only_layers", COUNTS.or_none(), None) or []
    return tuple(i for i in range(given.layers()) if (i + 1) % step == 0 and i not in dense)


def plain_mlp(
    given: ConfigReader,
    bias: bool,
    key: str = "hidden_act",
    default: str = "gelu",
    inner_size: int | None = None,
) -> PlainMlp:
    """An MLP without a gate; `inner_size` None: what `intermediate_size` says."""
    activation = PLAIN_ACTIVATIONS.get(given(key, TEXT, default))
    if activation is None:
        given.refuse(key, f"only {', '.join(PLAIN_ACTIVATIONS)} are supported")
    return PlainMlp(inner_size or given.size("intermediate_size"), activation, bias)


def layer_norm(
    given: ConfigReader,
    key: str = "layer_norm_eps",
    *,
    bias: bool = True,
    placement: Placement = "before",
) -> Norm:
    """LayerNorm, whose `eps` is what `key` says."""
    eps = float(given(key, NOT_NEGATIVE, 1e-5))
    return Norm(eps, kind="layer", placement=placement, bias=bias)


def windows_by_layer(
    given: ConfigReader, window: int | None, slides: Callable[[int], bool] = lambda index: True
) -> tuple[int | None, ...]:
    """The windows that `layer_types` gives, where `window` is that of the layers which have one.
    Without `layer_types`, these are the layers whose index `slides`."""
    count = given.layers()
    kinds = given("layer_types", TEXTS.or_none(), None)
    if kinds is None:
        return tuple(window if slides(index) else None for index in range(count))
    if len(kinds) != count:
        given.refuse("layer_types", f"there are {count} layers")
    for kind in kinds:
        if kind != "full_attention" and (kind != "sliding_attention" or window is None):
            given.refuse("layer_types", f"{kind!r} with a window of {window} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def upper_windows(given: ConfigReader) -> tuple[int | None, ...]:
    """As `windows_by_layer`, of the layers from `max_window_layers` on."""
    first = given("max_window_layers", COUNT, 28)
    return windows_by_layer(given, chosen_window(given, WINDOW), lambda index: index >= first)


def chosen_window(given: ConfigReader, default: int | None) -> int | None:
    """`sliding_window`, `default` where it is not there; None unless `use_sliding_window`. Where
    nothing uses it, transformers writes 0 into some files."""
    used = given.flag("use_sliding_window", False)
    window: int | None = given("sliding_window", (SIZE if used else COUNT).or_none(), default)
    return window if used else None
