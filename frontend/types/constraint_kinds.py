"""The kinds of constraints: what users give for each, and the source that travels.

To add a kind, name it in `rootlace.wire.protocol.ConstraintKind`, describe it here, add a line to
`rootlace.runtime.structured.compiler.KINDS`, and document it in docs/constraints.md. The keywords
of `gen` and of `GrammarCompiler.compile`, the HTTP fields and all messages follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypedDict

import msgspec

from rootlace.types import schema_of, schema_text
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import ConstraintKind


class KindKeywords(TypedDict, total=False):
    """The keywords of a constraint, but `choices`, for type checkers."""

    regex: str | None
    json_schema: str | bool | Mapping[str, Any] | Any
    ebnf: str | None
    structural_tag: str | Mapping[str, Any] | None


class ConstraintKeywords(KindKeywords, total=False):
    """The keywords of a constraint; in `gen`, `choices` makes a `select`."""

    choices: Iterable[str] | None


class KindSource(NamedTuple):
    """How one kind of constraint is given."""

    write: Callable[[Any], str]
    """`Constraint.source` for a Python value. Raises InvalidConstraint."""
    field: Any
    """The type of the HTTP field."""


def _pattern(value: Any) -> str:
    return _text(value, "regex")


def _grammar(value: Any) -> str:
    return _text(value, "ebnf")


def _schema(value: Any) -> str:
    """A schema, or the schema of a Python type."""
    if isinstance(value, (str, Mapping, bool)):
        return _json(value, "json_schema")
    return schema_text(value)


def _choices(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidConstraint("choices must be a list of strings")
    texts = list(value)
    if not texts:
        raise InvalidConstraint("choices must not be empty")
    for index, choice in enumerate(texts):
        _text(choice, f"choices[{index}]")
    return json.dumps(texts, ensure_ascii=False)


def _structural_tag(value: Any) -> str:
    """Free text with islands; a structure's `schema` may be a Python type."""
    if isinstance(value, Mapping) and isinstance(value.get("structures"), (list, tuple)):
        value = {**value, "structures": [_structure(given) for given in value["structures"]]}
    elif not isinstance(value, (str, Mapping)):
        raise InvalidConstraint(
            "structural_tag must be a dictionary with 'structures' and 'triggers' (or that as JSON "
            f"text), not {type(value).__name__}"
        )
    return _json(value, "structural_tag")


def _structure(given: Any) -> Any:
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if schema is None or isinstance(schema, (Mapping, bool, list)):
        return given
    return {**given, "schema": schema_of(schema)}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidConstraint(f"{name} must be a string, not {type(value).__name__}")
    return value


def _json(value: Any, name: str) -> str:
    """`value` as JSON text; a string has to be that already."""
    try:
        if isinstance(value, str):
            try:
                msgspec.json.decode(value, type=msgspec.Raw)  # looked through, not built
            except ValueError:
                json.loads(value)  # says where it is wrong, and takes lone surrogates
            return value
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConstraint(f"{name} is not JSON: {error}") from None


KINDS: dict[ConstraintKind, KindSource] = {
    "regex": KindSource(_pattern, str),
    "json_schema": KindSource(_schema, dict[str, Any] | str | bool),
    "ebnf": KindSource(_grammar, str),
    "choices": KindSource(_choices, list[str]),
    "structural_tag": KindSource(_structural_tag, dict[str, Any] | str),
}
