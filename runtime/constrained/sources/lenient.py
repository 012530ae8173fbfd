"""Structural tags whose schemas are held as far as they can be: what is left where they cannot."""

from __future__ import annotations

from typing import Any

import msgspec

from rootlace.runtime.constrained.sources.source import parsed
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint


def least_of(schema: Any) -> dict[str, Any]:
    """What is held in any case of a lenient schema: that it is an object, if it says so."""
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    return {"type": "object"} if is_object else {}


def is_lenient(constraint: Constraint) -> bool:
    """Whether it may have a lenient schema: to be sure takes time where it is large."""
    return constraint.kind == "structural_tag" and '"lenient"' in constraint.source


def weakest(constraint: Constraint) -> Constraint | None:
    """The constraint with the least of all its lenient schemas; None if it has none, or is none."""
    if not is_lenient(constraint):
        return None
    try:
        value = parsed("structural_tag", constraint.source)
        found = _weakened(value)
    except (InvalidConstraint, RecursionError):
        return None
    if found == value:
        return None
    return msgspec.structs.replace(constraint, source=msgspec.json.encode(found).decode())


def _weakened(value: Any) -> Any:
    if isinstance(value, list):
        return [_weakened(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") != "json_schema":
        return {key: _weakened(item) for key, item in value.items()}
    if value.get("lenient") is not True:
        return value
    return {"type": "json_schema", "json_schema": least_of(value.get("json_schema"))}
