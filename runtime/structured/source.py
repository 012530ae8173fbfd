"""What a `Constraint` was written as: from Python values to its text, and read back from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

MAX_CHOICES = 65536


def constraint_of(sources: Mapping[str, Any], whitespace: str, strict: bool) -> Constraint:
    """The constraint that exactly one of `sources` (by kind; None: not given) names.

    A schema is a dict, a bool, its JSON text or a Python type. Raises InvalidConstraint where it is
    none, or several sources are given.
    """
    given = [kind for kind, value in sources.items() if value is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidConstraint(
            f"a constraint has exactly one of {', '.join(sources)}, not {found}"
        )
    if whitespace not in ("compact", "flexible"):
        raise InvalidConstraint(f'whitespace: must be "compact" or "flexible", not {whitespace!r}')
    (kind,) = given
    return Constraint(
        kind,  # type: ignore[arg-type]
        _text(kind, sources[kind]),
        whitespace=whitespace,  # type: ignore[arg-type]
        strict=bool(strict),
    )


def _text(kind: str, value: Any) -> str:
    if kind == "choices" and not isinstance(value, str):
        value = _dumped(kind, list(value))
    elif kind == "structural_tag" and isinstance(value, dict):
        value = _dumped(kind, value)
    elif kind == "json_schema" and not isinstance(value, str):
        if not isinstance(value, dict | bool):
            # Only here: it knows pydantic's and dataclasses' ways, which most schemas do not need.
            from rootlace.types.values import schema_of

            value = schema_of(value)
        value = _dumped(kind, value)
    if not isinstance(value, str):
        raise InvalidConstraint(f"{kind}: must be text, not {type(value).__name__}")
    return value


def _dumped(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConstraint(f"{kind}: cannot be written as JSON: {error}") from None


def parsed(kind: str, source: str) -> Any:
    """The value that a JSON source spells. Raises InvalidConstraint."""
    try:
        return json.loads(source, parse_constant=_not_json)
    except RecursionError:
        raise InvalidConstraint(f"{kind}: nested too deeply") from None
    except ValueError as error:
        raise InvalidConstraint(f"{kind}: not JSON: {error}") from None


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def is_text(value: str) -> bool:
    """Whether it has no lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def parsed_choices(source: str) -> list[str]:
    """The texts of a `choices` constraint, each once. Raises InvalidConstraint."""
    choices = parsed("choices", source)
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidConstraint(f"choices: must be a JSON array of 1 to {MAX_CHOICES} strings")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidConstraint(f"choices[{index}]: must be a string of at least one character")
        if not is_text(choice):
            raise InvalidConstraint(f"choices[{index}]: a lone surrogate is no character")
    return list(dict.fromkeys(choices))


def parsed_schema(source: str) -> dict[str, Any] | bool:
    """The schema of a `json_schema` constraint. Raises InvalidConstraint."""
    schema = parsed("json_schema", source)
    if not isinstance(schema, dict | bool):
        raise InvalidConstraint("json_schema: must be a JSON object or boolean")
    if schema is False:
        raise InvalidConstraint("json_schema: the schema false allows nothing")
    return schema
