"""Read the parts of a `config.json` that families have in common into a spec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rootlace.runtime.model.families.config_reader import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SIZE,
    TABLE,
    TEXT,
    TEXTS,
    ConfigReader,
    Kind,
)
from rootlace.runtime.model.families.spec import (
    Activation,
    Attention,
    Experts,
    Mlp,
    ModelSpec,
    Norm,
    Placement,
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
"""Activations of MLPs without a gate."""
WINDOW = 4096
"""Sliding window of a file that states none, in all families with windows."""


COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts."""


class Family(msgspec.Struct, frozen=True, eq=False):
    """Models whose configuration one function reads. `model_types`: transformers' names for the
    configurations of these `architectures`. The token ids begin and end a text if the folder states
    none."""

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[ConfigReader], ModelSpec]
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


def family(
    architectures: str,
    model_types: str,
    bos: int | None = None,
    eos: int | tuple[int, ...] | None = None,
) -> Callable[[Callable[[ConfigReader], ModelSpec]], Family]:
    """Make a `Family` of the function below; several names are separated by spaces."""
    names = tuple(architectures.split()), tuple(model_types.split())
    return lambda read: Family(*names, read, bos, eos)


LLAMA = WeightNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    parts={
        "input_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "post_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    final_norm="model.norm",
    head="lm_head",
)
"""Names of Llama's weights, which most families share."""
QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def decoder(
    config: ConfigReader,
    attention: Attention,
    names: WeightNames = LLAMA,
    mlp: Mlp | None = None,
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
    """Read a decoder, by default with RMSNorm (see `Norm`) and `gated_mlp`. `eps` and `tied` are
    defaults for missing keys. `rope` and `context` None: from `read_rope` and `read_context`.
    `features` are fields of `ModelSpec`."""
    rope = rope or read_rope(config)
    check_factors(config, rope, attention.head_dim)
    if norm is None:
        eps = float(config.get("rms_norm_eps", NOT_NEGATIVE, eps))
        norm = Norm(eps, placement=placement, offset=norm_offset)
    return ModelSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        num_layers=config.layers(),
        max_context=context or read_context(config, rope),
        norm=norm,
        attention=attention,
        mlp=mlp or gated_mlp(config),
        rope=rope,
        names=names,
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        **features,
    )


def grouped_attention(
    config: ConfigReader,
    windows: tuple[int | None, ...] | None = None,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **features: Any,
) -> Attention:
    """Read attention. `windows` None: full attention in all layers. `kv_heads` and `head_dim` are
    defaults for missing keys; None: as many as heads, hidden_size / heads. `features` are fields of
    `Attention`."""
    heads = config.size("num_attention_heads")
    kv_heads = config.get("num_key_value_heads", SIZE.or_none(), kv_heads) or heads
    head_dim = config.get("head_dim", SIZE.or_none(), head_dim)
    head_dim = head_dim or config.size("hidden_size") // heads
    if heads % kv_heads:
        config.refuse(
            "num_key_value_heads", f"num_attention_heads ({heads}) is not a multiple of it"
        )
    if head_dim % 2 or head_dim == 0:
        key = "head_dim" if "head_dim" in config else "hidden_size"
        config.refuse(key, f"a head of {head_dim} numbers is not supported")
    return Attention(
        **{
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "windows": windows or windows_by_layer(config, None),
        }
        | features
    )


def multi_head_attention(config: ConfigReader, **features: Any) -> Attention:
    """Read `grouped_attention` with as many heads of keys as of queries."""
    divided_heads(config)
    config.only("num_key_value_heads", config.size("num_attention_heads"))
    return grouped_attention(config, **features)


def divided_heads(config: ConfigReader) -> None:
    """Refuse heads that do not have hidden_size / heads numbers each."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if hidden % heads:
        name = config.name("hidden_size")
        config.refuse("num_attention_heads", f"{name} ({hidden}) is not a multiple of it")
    config.only("head_dim", hidden // heads)


def no_rope(config: ConfigReader) -> Rope:
    """Rotate nothing: for a family with learned positions."""
    return Rope("default", {"rope_theta": 1e4}, unrotated_layers=tuple(range(config.layers())))


def biases(config: ConfigReader) -> dict[str, Any]:
    """Read `attention_bias` for all projections; return fields of `Attention`."""
    biased = config.flag("attention_bias", False)
    return {"qkv_bias": biased, "output_bias": biased}


def gated_mlp(
    config: ConfigReader, bias: bool = False, key: str = "hidden_act", default: str = "silu"
) -> Mlp:
    """Read an MLP with the activation at `key`, by default `default`."""
    activation = _activation(config, key, default, ACTIVATIONS)
    return Mlp(config.size("intermediate_size"), activation, True, bias)


def plain_mlp(
    config: ConfigReader, bias: bool, default: str = "gelu", inner_size: int | None = None
) -> Mlp:
    """Read an MLP without a gate. `inner_size` None: `intermediate_size`."""
    activation = _activation(config, "hidden_act", default, PLAIN_ACTIVATIONS)
    return Mlp(inner_size or config.size("intermediate_size"), activation, False, bias)


def _activation(
    config: ConfigReader, key: str, default: str, known: Mapping[str, Activation]
) -> Activation:
    activation = known.get(config.get(key, TEXT, default))
    if activation is None:
        config.refuse(key, f"only {', '.join(known)} are supported")
    return activation


def read_experts(
    config: ConfigReader,
    *,
    count: int,
    chosen: int,
    size_key: str = "intermediate_size",
    layers: tuple[int, ...] | None = None,
    **features: Any,
) -> Experts:
    """Read a mixture of experts in `layers`; None: in all. `count` and `chosen` are defaults for
    missing keys; `features` are fields of `Experts`."""
    keys = [key for key in COUNT_KEYS if key in config]
    found = config.size(keys[0], count) if keys else count
    for key in keys[1:]:
        if config.size(key) != found:
            config.refuse(key, f"{keys[0]} is {found}")
    chosen = config.size("num_experts_per_tok", chosen)
    if chosen > found:
        config.refuse("num_experts_per_tok", f"there are {found} experts")
    layers = tuple(range(config.layers())) if layers is None else layers
    return Experts(layers, found, chosen, config.size(size_key), **features)


def layer_norm(
    config: ConfigReader,
    key: str = "layer_norm_eps",
    *,
    bias: bool = True,
    placement: Placement = "before",
) -> Norm:
    """Read LayerNorm, with `eps` at `key`."""
    eps = float(config.get(key, NOT_NEGATIVE, 1e-5))
    return Norm(eps, kind="layer", placement=placement, bias=bias)


def same_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Read `sliding_window` for all layers."""
    return (config.get("sliding_window", SIZE.or_none(), None),) * config.layers()


def windows_by_layer(
    config: ConfigReader, window: int | None, slides: Callable[[int], bool] = lambda index: True
) -> tuple[int | None, ...]:
    """Read each layer's window from `layer_types`: `window` or none. Without `layer_types`, layers
    whose index `slides` have the window."""
    count = config.layers()
    kinds = config.get("layer_types", TEXTS.or_none(), None)
    if kinds is None:
        return tuple(window if slides(index) else None for index in range(count))
    if len(kinds) != count:
        config.refuse("layer_types", f"there are {count} layers")
    for kind in kinds:
        if kind != "full_attention" and (kind != "sliding_attention" or window is None):
            config.refuse("layer_types", f"{kind!r} with a window of {window} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def chosen_window(config: ConfigReader, default: int | None) -> int | None:
    """Return `sliding_window`, by default `default`; None unless `use_sliding_window`. transformers
    writes 0 into some files without windows."""
    used = config.flag("use_sliding_window", False)
    window: int | None = config.get("sliding_window", (SIZE if used else COUNT).or_none(), default)
    return window if used else None


# Positions ----------------------------------------------------------------------------------------
#
# Read the rotation of queries and keys by positions, and the number of positions. Old
# checkpoints have `rope_theta` and `rope_scaling`, new ones have all of it in `rope_parameters`; a
# value that stands in two places counts as in transformers.

_FACTORS = Kind(
    "a list of positive numbers", lambda v: type(v) is list and all(map(POSITIVE.fits, v))
)
_TRUE_OR_FALSE = FLAG.or_none()
ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"

COMMON: dict[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    PARTIAL: NUMBER.or_none(),
}
"""Keys of `rope_parameters` of every rope type."""

OF_KIND: dict[str, dict[str, Kind]] = {
    "default": {},
    "linear": {"factor": POSITIVE},
    "dynamic": {"factor": POSITIVE},
    "yarn": {
        "factor": POSITIVE,
        ORIGINAL: SIZE.or_none(),
        "attention_factor": NUMBER.or_none(),
        "beta_fast": NOT_NEGATIVE.or_none(),
        "beta_slow": NOT_NEGATIVE.or_none(),
        "mscale": NOT_NEGATIVE.or_none(),
        "mscale_all_dim": NOT_NEGATIVE.or_none(),
        "truncate": _TRUE_OR_FALSE,
        "finetuned": _TRUE_OR_FALSE,  # a remark on the checkpoint's training
    },
    "longrope": {
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
        ORIGINAL: SIZE.or_none(),
        "factor": POSITIVE.or_none(),
        "attention_factor": NUMBER.or_none(),
    },
    "llama3": {
        "factor": POSITIVE,
        "low_freq_factor": POSITIVE,
        "high_freq_factor": POSITIVE,
        ORIGINAL: SIZE.or_none(),
    },
}
"""Supported rope types, each with its further keys; keys that may not be null are required."""

KINDS = {kind: kind for kind in OF_KIND}
NONE: Mapping[str, Any] = {}


def read_rope(
    config: ConfigReader,
    theta: float = 10000.0,
    *,
    original: int | None = None,
    head_dim: int | None = None,
    partial: float | None = None,
    kinds: Mapping[str, str] = KINDS,
    theta_key: str = "rope_theta",
    partial_key: str = PARTIAL,
    own: Mapping[str, Kind] = NONE,
    unstated: Mapping[str, Any] = NONE,
) -> Rope:
    """Read a family's rotation.

    `theta`, `original` (the context before extension) and `partial` (the rotated share of a head)
    are defaults. `head_dim` is given if the family can rotate a part of a head. `kinds`: the file's
    names of the family's rope types -> rope types. Outside of `rope_parameters`, theta and share
    have the keys `theta_key` and `partial_key`; inside, there may be keys of the family's `own`.
    `unstated`: the parameters of a file that states none.
    """
    where, parameters = "rope_parameters", config.get("rope_parameters", TABLE.or_none(), None)
    if scaling := config.get("rope_scaling", TABLE.or_none(), None):
        where, parameters = "rope_scaling", scaling
    parameters = dict(unstated if parameters is None else parameters)
    _set_theta(config, theta_key, parameters, theta)
    partial = config.get(partial_key, NUMBER.or_none(), partial)
    key = where if PARTIAL in parameters else partial_key
    if partial is not None:
        parameters.setdefault(PARTIAL, partial)
    original = config.get(ORIGINAL, SIZE.or_none(), original)
    kind = _kind(config, where, parameters, kinds, original, own)
    if ORIGINAL in OF_KIND[kind] and original is None and ORIGINAL in config:
        config.refuse(ORIGINAL, f"rope_type {kind!r} needs it")
    return Rope(kind, parameters, _rotated(config, key, parameters, head_dim))


def read_two_ropes(
    config: ConfigReader, theta: float, local_theta: float, local_key: str = "rope_theta"
) -> Rope:
    """Read a family's two rotations; that of layers with windows is never extended.
    `rope_parameters` has an object for each type of layer; the older `rope_scaling` is for layers
    without windows. `theta` and `local_theta` are defaults for `rope_theta` and `local_key`."""
    nested = config.get("rope_parameters", TABLE.or_none(), None) or {}
    if not nested.keys() <= {"full_attention", "sliding_attention"}:
        config.refuse("rope_parameters", "only full_attention and sliding_attention are known")
    for name, part in nested.items():
        if not TABLE.or_none().fits(part):
            config.refuse("rope_parameters", f"{name} is not {TABLE.words}")
    scaling = config.get("rope_scaling", TABLE.or_none(), None) or {}
    if "type" in scaling and "rope_type" not in scaling:
        config.refuse(
            "rope_scaling",
            "transformers ignores a `type` here; write `rope_type` for what is meant, or remove "
            "rope_scaling for transformers' numbers",
        )
    full = dict(nested.get("full_attention") or {}) | scaling
    local = dict(nested.get("sliding_attention") or {})
    _set_theta(config, "rope_theta", full, theta)
    _set_theta(config, local_key, local, local_theta)
    kind = _kind(config, "rope_scaling" if scaling else "rope_parameters", full, KINDS, None)
    if _kind(config, "rope_parameters", local, KINDS, None) != "default":
        config.refuse("rope_parameters", "only the default rope_type is supported with windows")
    for part in (full, local):
        if part.get(PARTIAL) not in (1.0, None) or not part.get("truncate", True):
            config.refuse("rope_parameters", "partial_rotary_factor and truncate are not supported")
    return Rope(kind, full, local_theta=local["rope_theta"])


def check_factors(config: ConfigReader, rope: Rope, head_dim: int) -> None:
    """Refuse `longrope` whose factors are not one for each pair of a head."""
    pairs = (rope.rotated or head_dim) // 2
    for key in ("short_factor", "long_factor") if rope.kind == "longrope" else ():
        if len(rope.parameters[key]) != pairs:
            old = config.get("rope_scaling", TABLE.or_none(), None)
            config.refuse(
                "rope_scaling" if old else "rope_parameters",
                f"{key} has {len(rope.parameters[key])} numbers, and {pairs} pairs of a head are "
                f"rotated (head_dim or hidden_size, {PARTIAL})",
            )


def read_context(config: ConfigReader, rope: Rope) -> int:
    """Return the number of positions that the model was made for.

    `max_position_embeddings` is mostly the length before an extension by interpolation. YaRN is
    usually added to a `config.json` as `rope_scaling` alone (as Qwen's model cards advise). With
    `linear`, transformers' documentation says not to change the key. So the length after scaling
    counts, unless the file states a longer one. With `llama3` and `longrope` the key is the length
    after scaling. `dynamic` leaves the length as stated: beyond, angles depend on the length of the
    text, which cached keys cannot follow.
    """
    stated = config.size("max_position_embeddings")
    if rope.kind == "linear":
        return max(stated, int(rope.parameters["factor"] * stated))
    if rope.kind == "yarn":
        original = rope.parameters["original_max_position_embeddings"]
        return max(stated, int(rope.parameters["factor"] * original))
    return stated


def _kind(
    config: ConfigReader,
    where: str,
    parameters: dict[str, Any],
    kinds: Mapping[str, str],
    original: int | None,
    own: Mapping[str, Kind] = NONE,
) -> str:
    """Return the rope type, one of `kinds`. Checks that parameters are known and complete, and adds
    parameters that follow from others. `original`: the file's value outside the parameters; `own`:
    the family's own keys."""
    name, kind = _named_kind(config, where, parameters, kinds)
    for needed, values in OF_KIND[kind].items():
        if not values.fits(None) and parameters.get(needed) is None:
            config.refuse(where, f"rope_type {name!r} needs {needed}")
    _check(config, where, parameters, name, COMMON | OF_KIND[kind] | dict(own))
    context = config.size("max_position_embeddings")
    if ORIGINAL in OF_KIND[kind]:
        # The value outside of `rope_parameters` goes first.
        parameters[ORIGINAL] = original or parameters.get(ORIGINAL) or context
    if kind == "longrope":
        if parameters[ORIGINAL] == 1:
            config.refuse(where, f"{ORIGINAL} is 1")
        if parameters.get("factor") is None:
            parameters["factor"] = context / parameters[ORIGINAL]
    if kind == "yarn" and parameters["rope_theta"] == 1:
        config.refuse(where, f"rope_type {name!r} cannot have a rope_theta of 1")
    return kind


def _named_kind(
    config: ConfigReader, where: str, parameters: dict[str, Any], kinds: Mapping[str, str]
) -> tuple[str, str]:
    """Return the file's name for the rope type, and the type. `type` is the older key."""
    names = [parameters[key] for key in ("rope_type", "type") if key in parameters] or ["default"]
    for name in names:
        if not TEXT.fits(name):
            config.refuse(where, f"rope_type is not {TEXT.words}")
        if name not in kinds:
            config.refuse(where, f"rope_type {name!r} is not supported ({', '.join(kinds)})")
    if len({kinds[name] for name in names}) > 1:
        config.refuse(where, "rope_type and type contradict each other")
    return names[0], kinds[names[0]]


def _set_theta(config: ConfigReader, key: str, parameters: dict[str, Any], default: float) -> None:
    """Add `rope_theta` if missing; if present, `key` of the file and its null do not count."""
    theta = config.get(key, POSITIVE.or_none() if "rope_theta" in parameters else POSITIVE, default)
    parameters.setdefault("rope_theta", theta)


def _rotated(
    config: ConfigReader, key: str, parameters: dict[str, Any], head_dim: int | None
) -> int | None:
    """Return the number of rotated numbers of a head; None: all."""
    share = parameters.get(PARTIAL)
    if share in (1.0, None):
        return None
    rotated = int((head_dim or 0) * share)
    if not rotated > 0 or rotated % 2 or rotated > (head_dim or 0):
        config.refuse(key, f"a partial_rotary_factor of {share} is not supported")
    return None if rotated == head_dim else rotated


def _check(
    config: ConfigReader,
    where: str,
    parameters: dict[str, Any],
    name: str,
    known: Mapping[str, Kind],
) -> None:
    """Refuse keys, unless null, that are not among the `known` keys of a rotation's name."""
    if "beta_fast" in known and parameters.get("attn_factor") is not None:
        config.refuse(where, _of_attn_factor(parameters))
    for key, value in sorted(parameters.items()):
        if key in known and not known[key].fits(value):
            config.refuse(where, f"{key} is not {known[key].words}")
        if key not in known and value is not None:
            config.refuse(where, f"{key} is not known with rope_type {name!r}")


def _of_attn_factor(parameters: dict[str, Any]) -> str:
    """Advise on `attn_factor`, by which other programs multiply YaRN's own factor."""
    share: Any = parameters["attn_factor"]
    factor: Any = parameters.get("factor")
    meant = ""
    if POSITIVE.fits(share) and POSITIVE.fits(factor):
        meant = f" ({share * (0.1 * math.log(max(factor, 1.0)) + 1.0):.4g})"
    return (
        "transformers ignores attn_factor; write attention_factor, which is attn_factor times "
        f"0.1 ln(factor) + 1{meant}, for what is meant, or remove it for transformers' numbers"
    )
