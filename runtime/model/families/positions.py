"""How a `config.json` says that positions rotate queries and keys, and how many there are.

Old checkpoints say `rope_theta` and `rope_scaling`, new ones have all of it in `rope_parameters`;
what is said twice counts as in transformers.
"""

from __future__ import annotations

from typing import Any

from rootlace.runtime.model.families.given import NUMBER, SIZE, TABLE, TEXT, Given, Kind
from rootlace.runtime.model.families.spec import Rope

_POSITIVE = Kind("a positive number", lambda value: NUMBER.fits(value) and value > 0)
_FACTORS = Kind("a list of numbers", lambda v: type(v) is list and all(map(NUMBER.fits, v)))
_TRUE_OR_FALSE = Kind("true, false or null", lambda value: value in (True, False, None))

PARAMETERS: dict[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": _POSITIVE,
    "factor": _POSITIVE.or_none(),
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


def read_rope(given: Given, theta: float = 10000.0) -> Rope:
    """The rotation of all layers; `theta` is the family's where the file has none."""
    where = "rope_scaling" if given("rope_scaling", TABLE.or_none(), None) else "rope_parameters"
    parameters: dict[str, Any] = dict(given("rope_parameters", TABLE.or_none(), None) or {})
    if where == "rope_scaling":
        parameters = dict(given("rope_scaling", TABLE))
    parameters.setdefault("rope_theta", given("rope_theta", NUMBER, theta))
    partial = given("partial_rotary_factor", NUMBER.or_none(), None)
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", partial)
    kind: str = parameters.get("rope_type", parameters.get("type", "default"))
    _check(given, where, kind, parameters)
    context = given.size("max_position_embeddings")
    original = given("original_max_position_embeddings", SIZE.or_none(), None)
    if kind in ("yarn", "longrope", "llama3"):
        # Outside of `rope_parameters` it counts for more.
        original = original or parameters.get("original_max_position_embeddings") or context
        parameters["original_max_position_embeddings"] = original
    if kind == "longrope" and parameters.get("factor") is None:
        parameters["factor"] = context / parameters["original_max_position_embeddings"]
    return Rope(kind, parameters)


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


def _check(given: Given, where: str, kind: str, parameters: dict[str, Any]) -> None:
    """Refuse what is not known of a rotation, or is not complete."""
    unknown = sorted(parameters.keys() - PARAMETERS.keys())
    if unknown:
        given.refuse(where, f"{', '.join(unknown)} is not known")
    for name, value in parameters.items():
        if not PARAMETERS[name].fits(value):
            given.refuse(where, f"{name} is not {PARAMETERS[name].words}")
    if kind not in NEEDED:
        given.refuse(where, f"rope_type {kind!r} is not supported ({', '.join(NEEDED)})")
    for name in NEEDED[kind]:
        if parameters.get(name) is None:
            given.refuse(where, f"rope_type {kind!r} needs {name}")
    if parameters.get("partial_rotary_factor") not in (1.0, None):
        given.refuse(where, "partial rotation is not supported")
