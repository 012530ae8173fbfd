"""How a `config.json` says that positions rotate queries and keys, and how many there are.

Old checkpoints say `rope_theta` and `rope_scaling`, new ones have all of it in `rope_parameters`;
what is said twice counts as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rootlace.runtime.model.families.given import NUMBER, POSITIVE, SIZE, TABLE, TEXT, Given, Kind
from rootlace.runtime.model.families.spec import Rope

_FACTORS = Kind("a list of numbers", lambda v: type(v) is list and all(map(NUMBER.fits, v)))
_TRUE_OR_FALSE = Kind("true, false or null", lambda value: value in (True, False, None))

PARAMETERS: dict[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    "factor": POSITIVE.or_none(),
    "original_max_position_embeddings": SIZE.or_none(),
    "max_position_embeddings": SIZE.or_none(),
    "attention_factor": NUMBER.or_none(),
    "beta_fast": NUMBER.or_none(),
    "beta_slow": NUMBER.or_none(),
    "mscale": NUMBER.or_none(),
    "mscale_all_dim": NUMBER.or_none(),
    "truncate": _TRUE_OR_FALSE,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "low_freq_factor": NUMBER,
    "high_freq_factor": NUMBER,
    "partial_rotary_factor": NUMBER.or_none(),
}
"""The keys of `rope_parameters`."""

NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The supported rope types, each with the parameters that it cannot do without."""
KINDS = {kind: kind for kind in NEEDED}


def read_rope(
    given: Given,
    theta: float = 10000.0,
    *,
    original: int | None = None,
    head_dim: int | None = None,
    partial: float | None = None,
    kinds: Mapping[str, str] = KINDS,
) -> Rope:
    """How a family rotates.

    `theta`, `original` (the context before it was extended) and `partial` (the share of a head that
    is rotated) are those of a file that has none. `head_dim` is given where the family can rotate a
    part of a head. `kinds` are the rope types that it has, by what it calls them.
    """
    where = "rope_scaling" if given("rope_scaling", TABLE.or_none(), None) else "rope_parameters"
    parameters: dict[str, Any] = dict(given("rope_parameters", TABLE.or_none(), None) or {})
    if where == "rope_scaling":
        parameters = dict(given("rope_scaling", TABLE))
    parameters.setdefault("rope_theta", given("rope_theta", NUMBER, theta))
    partial = given("partial_rotary_factor", NUMBER.or_none(), partial)
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", partial)
    original = given("original_max_position_embeddings", SIZE.or_none(), original)
    kind = _kind(given, where, parameters, kinds, original)
    return Rope(kind, parameters, _rotated(given, where, parameters, head_dim))


def read_two_ropes(given: Given, theta: float, local_theta: float) -> Rope:
    """How a family rotates whose layers with windows never were extended to longer contexts:
    `rope_parameters` has an object for each type of layer, an older `rope_scaling` is that of the
    layers without windows. `theta` and `local_theta` are those of a file that has none."""
    nested = given("rope_parameters", TABLE.or_none(), None) or {}
    if not nested.keys() <= {"full_attention", "sliding_attention"}:
        given.refuse("rope_parameters", "only full_attention and sliding_attention are known")
    parts: list[dict[str, Any]] = []
    for name, default in (("full_attention", theta), ("sliding_attention", local_theta)):
        if not TABLE.or_none().fits(nested.get(name)):
            given.refuse("rope_parameters", f"{name} is not {TABLE.words}")
        parts.append(dict(nested.get(name) or {}))
        if name == "full_attention":
            parts[0].update(given("rope_scaling", TABLE.or_none(), None) or {})
        parts[-1].setdefault("rope_theta", default)
    kind, local = (_kind(given, "rope_parameters", part, KINDS, None) for part in parts)
    if local != "default":
        given.refuse("rope_parameters", "only the default rope_type is supported with windows")
    for part in parts:
        if part.get("partial_rotary_factor") not in (1.0, None) or not part.get("truncate", True):
            given.refuse("rope_parameters", "partial_rotary_factor and truncate are not supported")
    return Rope(kind, parts[0], local_theta=parts[1]["rope_theta"])


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
) -> str:
    """The rope type, of one of `kinds`, after a check that its parameters are known and complete;
    those that follow from others are added. `original`: what the file says outside of them."""
    _check(given, where, parameters)
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name not in kinds:
        given.refuse(where, f"rope_type {name!r} is not supported ({', '.join(kinds)})")
    kind = kinds[name]
    for needed in NEEDED[kind]:
        if parameters.get(needed) is None:
            given.refuse(where, f"rope_type {name!r} needs {needed}")
    context = given.size("max_position_embeddings")
    if kind in ("yarn", "longrope", "llama3"):
        # Outside of `rope_parameters` it counts for more.
        original = original or parameters.get("original_max_position_embeddings") or context
        parameters["original_max_position_embeddings"] = original
        if kind == "longrope" and parameters.get("factor") is None:
            parameters["factor"] = context / original
    return kind


def _rotated(
    given: Given, where: str, parameters: dict[str, Any], head_dim: int | None
) -> int | None:
    """How many numbers of a head are rotated; None: all."""
    share = parameters.get("partial_rotary_factor")
    if share in (1.0, None):
        return None
    rotated = int((head_dim or 0) * share)
    if not rotated > 0 or rotated % 2 or rotated > (head_dim or 0):
        given.refuse(where, f"a partial_rotary_factor of {share} is not supported")
    return None if rotated == head_dim else rotated


def _check(given: Given, where: str, parameters: dict[str, Any]) -> None:
    """Refuse what is not known of a rotation."""
    unknown = sorted(parameters.keys() - PARAMETERS.keys())
    if unknown:
        given.refuse(where, f"{', '.join(unknown)} is not known")
    for name, value in parameters.items():
        if not PARAMETERS[name].fits(value):
            given.refuse(where, f"{name} is not {PARAMETERS[name].words}")
