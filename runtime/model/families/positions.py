"""How a `config.json` says that positions rotate queries and keys, and how many there are.

Old checkpoints say `rope_theta` and `rope_scaling`, new ones have all of it in `rope_parameters`;
what is said twice counts as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rootlace.runtime.model.families.given import (
    FLAG,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SIZE,
    TABLE,
    TEXT,
    Given,
    Kind,
)
from rootlace.runtime.model.families.spec import Rope

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
"""The keys of `rope_parameters` of every rope type."""

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
        "finetuned": _TRUE_OR_FALSE,  # a remark: how the checkpoint was made
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
"""The supported rope types, each with the keys that it has beside those."""

NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The parameters that each of them cannot do without."""
KINDS = {kind: kind for kind in NEEDED}
NONE: Mapping[str, Kind] = {}


def read_rope(
    given: Given,
    theta: float = 10000.0,
    *,
    original: int | None = None,
    head_dim: int | None = None,
    partial: float | None = None,
    kinds: Mapping[str, str] = KINDS,
    theta_key: str = "rope_theta",
    partial_key: str = PARTIAL,
    own: Mapping[str, Kind] = NONE,
) -> Rope:
    """How a family rotates.

    `theta`, `original` (the context before it was extended) and `partial` (the share of a head that
    is rotated) are those of a file that has none. `head_dim` is given where the family can rotate a
    part of a head. `kinds` are the rope types that it has, by what it calls them. Outside of
    `rope_parameters`, theta and share are called `theta_key` and `partial_key`; inside, there may
    be keys of its `own`.
    """
    where = "rope_scaling" if given("rope_scaling", TABLE.or_none(), None) else "rope_parameters"
    parameters: dict[str, Any] = dict(given("rope_parameters", TABLE.or_none(), None) or {})
    if where == "rope_scaling":
        parameters = dict(given("rope_scaling", TABLE))
    _set_theta(given, theta_key, parameters, theta)
    partial = given(partial_key, NUMBER.or_none(), partial)
    key = where if PARTIAL in parameters else partial_key
    if partial is not None:
        parameters.setdefault(PARTIAL, partial)
    original = given(ORIGINAL, SIZE.or_none(), original)
    kind = _kind(given, where, parameters, kinds, original, own)
    if ORIGINAL in OF_KIND[kind] and original is None and ORIGINAL in given:
        given.refuse(ORIGINAL, f"rope_type {kind!r} needs it")
    return Rope(kind, parameters, _rotated(given, key, parameters, head_dim))


def read_two_ropes(
    given: Given, theta: float, local_theta: float, local_key: str = "rope_theta"
) -> Rope:
    """How a family rotates whose layers with windows never were extended to longer contexts:
    `rope_parameters` has an object for each type of layer, an older `rope_scaling` is that of the
    layers without windows. `theta` and `local_theta` are those of a file without `rope_theta` and
    `local_key`."""
    nested = given("rope_parameters", TABLE.or_none(), None) or {}
    if not nested.keys() <= {"full_attention", "sliding_attention"}:
        given.refuse("rope_parameters", "only full_attention and sliding_attention are known")
    for name, part in nested.items():
        if not TABLE.or_none().fits(part):
            given.refuse("rope_parameters", f"{name} is not {TABLE.words}")
    scaling = given("rope_scaling", TABLE.or_none(), None) or {}
    if "type" in scaling and "rope_type" not in scaling:
        given.refuse(
            "rope_scaling",
            "transformers ignores a `type` here; write `rope_type` for what is meant, or remove "
            "rope_scaling for transformers' numbers",
        )
    full = dict(nested.get("full_attention") or {}) | scaling
    local = dict(nested.get("sliding_attention") or {})
    _set_theta(given, "rope_theta", full, theta)
    _set_theta(given, local_key, local, local_theta)
    kind = _kind(given, "rope_scaling" if scaling else "rope_parameters", full, KINDS, None)
    if _kind(given, "rope_parameters", local, KINDS, None) != "default":
        given.refuse("rope_parameters", "only the default rope_type is supported with windows")
    for part in (full, local):
        if part.get(PARTIAL) not in (1.0, None) or not part.get("truncate", True):
            given.refuse("rope_parameters", "partial_rotary_factor and truncate are not supported")
    return Rope(kind, full, local_theta=local["rope_theta"])


def check_factors(given: Given, rope: Rope, head_dim: int) -> None:
    """Refuse `longrope` whose factors are not one for each pair of a head."""
    pairs = (rope.rotated or head_dim) // 2
    for key in ("short_factor", "long_factor") if rope.kind == "longrope" else ():
        if len(rope.parameters[key]) != pairs:
            old = given("rope_scaling", TABLE.or_none(), None)
            given.refuse(
                "rope_scaling" if old else "rope_parameters",
                f"{key} has {len(rope.parameters[key])} numbers, and {pairs} pairs of a head are "
                f"rotated (head_dim or hidden_size, {PARTIAL})",
            )


def read_context(given: Given, rope: Rope) -> int:
    """How many positions the model was made for.

    `max_position_embeddings` of a checkpoint that is to be extended by interpolation is mostly the
    length before that: those who add YaRN to a `config.json` (as model cards of Qwen tell them to)
    add `rope_scaling` alone, and of `linear` transformers' documentation says not to change it. So
    the length that scaling gives counts, unless the file names a longer one. With `llama3` and
    `longrope` it is the length that was reached, and `dynamic` leaves it as it is: its angles
    depend on the length of the text beyond it, which cached keys cannot follow.
    """
    stated = given.size("max_position_embeddings")
    if rope.kind == "linear":
        return max(stated, int(rope.parameters["factor"] * stated))
    if rope.kind == "yarn":
        original = rope.parameters["original_max_position_embeddings"]
        return max(stated, int(rope.parameters["factor"] * original))
    return stated


def _kind(
    given: Given,
    where: str,
    parameters: dict[str, Any],
    kinds: Mapping[str, str],
    original: int | None,
    own: Mapping[str, Kind] = NONE,
) -> str:
    """The rope type, of one of `kinds`, after a check that its parameters are known and complete;
    those that follow from others are added. `original`: what the file says outside of them; `own`:
    keys of the family's own."""
    name, kind = _named_kind(given, where, parameters, kinds)
    for needed in NEEDED[kind]:
        if parameters.get(needed) is None:
            given.refuse(where, f"rope_type {name!r} needs {needed}")
    _check(given, where, parameters, name, COMMON | OF_KIND[kind] | dict(own))
    context = given.size("max_position_embeddings")
    if ORIGINAL in OF_KIND[kind]:
        # Outside of `rope_parameters` it counts for more.
        parameters[ORIGINAL] = original or parameters.get(ORIGINAL) or context
    if kind == "longrope":
        if parameters[ORIGINAL] == 1:
            given.refuse(where, f"{ORIGINAL} is 1")
        if parameters.get("factor") is None:
            parameters["factor"] = context / parameters[ORIGINAL]
    if kind == "yarn" and parameters["rope_theta"] == 1:
        given.refuse(where, f"rope_type {name!r} cannot have a rope_theta of 1")
    return kind


def _named_kind(
    given: Given, where: str, parameters: dict[str, Any], kinds: Mapping[str, str]
) -> tuple[str, str]:
    """What the file calls the rope type, and which it is. `type` is the older key."""
    names = [parameters[key] for key in ("rope_type", "type") if key in parameters] or ["default"]
    for name in names:
        if not TEXT.fits(name):
            given.refuse(where, f"rope_type is not {TEXT.words}")
        if name not in kinds:
            given.refuse(where, f"rope_type {name!r} is not supported ({', '.join(kinds)})")
    if len({kinds[name] for name in names}) > 1:
        given.refuse(where, "rope_type and type contradict each other")
    return names[0], kinds[names[0]]


def _set_theta(given: Given, key: str, parameters: dict[str, Any], default: float) -> None:
    """Add `rope_theta`, unless it is there: then `key` of the file does not count, nor its null."""
    theta = given(key, POSITIVE.or_none() if "rope_theta" in parameters else POSITIVE, default)
    parameters.setdefault("rope_theta", theta)


def _rotated(
    given: Given, key: str, parameters: dict[str, Any], head_dim: int | None
) -> int | None:
    """How many numbers of a head are rotated; None: all."""
    share = parameters.get(PARTIAL)
    if share in (1.0, None):
        return None
    rotated = int((head_dim or 0) * share)
    if not rotated > 0 or rotated % 2 or rotated > (head_dim or 0):
        given.refuse(key, f"a partial_rotary_factor of {share} is not supported")
    return None if rotated == head_dim else rotated


def _check(
    given: Given, where: str, parameters: dict[str, Any], name: str, known: Mapping[str, Kind]
) -> None:
    """Refuse what a rotation of this name, whose `known` keys these are, does not use, unless it
    has no value."""
    if "beta_fast" in known and parameters.get("attn_factor") is not None:
        given.refuse(where, _of_attn_factor(parameters))
    for key, value in sorted(parameters.items()):
        if key in known and not known[key].fits(value):
            given.refuse(where, f"{key} is not {known[key].words}")
        if key not in known and value is not None:
            given.refuse(where, f"{key} is not known with rope_type {name!r}")


def _of_attn_factor(parameters: dict[str, Any]) -> str:
    """What to write for a key that other programs multiply YaRN's own factor by."""
    share: Any = parameters["attn_factor"]
    factor: Any = parameters.get("factor")
    meant = ""
    if POSITIVE.fits(share) and POSITIVE.fits(factor):
        meant = f" ({share * (0.1 * math.log(max(factor, 1.0)) + 1.0):.4g})"
    return (
        "transformers ignores attn_factor; write attention_factor, which is attn_factor times "
        f"0.1 ln(factor) + 1{meant}, for what is meant, or remove it for transformers' numbers"
    )
