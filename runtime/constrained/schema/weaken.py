"""Makes a schema weaker where llguidance refuses it, until it takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rootlace.runtime.constrained.schema.guidance import accepted

Definitions = dict[str, Any]

_STEPS = (
    ("minProperties", "maxProperties"),
    ("patternProperties",),
    ("allOf",),
    ("multipleOf",),
    ("format",),
    ("pattern",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("properties", "required", "additionalProperties", "prefixItems", "items"),
)
"""The keywords that are given up, one group after the other, until a shape is taken."""


@dataclass(frozen=True)
class Weakened:
    """`lost`: the definition (its name) and the keyword that it does not hold any more."""

    root: dict[str, Any]
    definitions: Definitions
    lost: tuple[tuple[str, str], ...]


def weaken(root: dict[str, Any], definitions: Definitions) -> Weakened:
    """`root` refers to one of the definitions; these refer to each other only."""
    if not accepted({**root, "$defs": definitions}):
        return Weakened(root, definitions, ())
    lost: list[tuple[str, str]] = []
    for name, definition in definitions.items():
        if _alone(definition):
            definitions[name] = _weakened(definition, name, lost)
    if accepted({**root, "$defs": definitions}):
        # Something about how they stand together: only the types are left of all.
        for name in definitions:
            lost.append((name, "type"))
        definitions = {}
        root = {}
    return Weakened(root, definitions, tuple(dict.fromkeys(lost)))


def _alone(definition: Any) -> str:
    """Why llguidance refuses a definition whatever its parts are; empty if it does not."""
    return accepted(_hollow(definition))


def _hollow(definition: Any) -> Any:
    """With the references to other definitions replaced by what allows everything."""
    if isinstance(definition, dict):
        if "$ref" in definition:
            return {}
        return {
            key: _hollow(value) if key != "enum" else value for key, value in definition.items()
        }
    if isinstance(definition, list):
        return [_hollow(item) for item in definition]
    return definition


def _weakened(definition: dict[str, Any], name: str, lost: list[tuple[str, str]]) -> Any:
    if "anyOf" in definition:
        options = [
            _weakened(option, name, lost) if _alone(option) else option
            for option in definition["anyOf"]
        ]
        return {"anyOf": options}
    left = dict(definition)
    for group in _STEPS:
        given_up = [key for key in group if key in left]
        if not given_up:
            continue
        if group == ("patternProperties",):
            # Keys that match a pattern may have any value then; `additionalProperties` must not
            # forbid them.
            left.pop("additionalProperties", None)
        for key in given_up:
            del left[key]
            lost.append((name, key))
        if not _alone(left):
            return left
    lost.append((name, "enum" if "enum" in left else "type"))
    return {"type": left["type"]} if "type" in left and not _alone({"type": left["type"]}) else {}
