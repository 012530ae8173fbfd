"""Drafts of JSON Schema: which one a schema is written in, and its keywords in the newest shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jsonschema
from referencing import Specification
from referencing.jsonschema import (
    DRAFT4,
    DRAFT6,
    DRAFT7,
    DRAFT201909,
    DRAFT202012,
)

ONE = frozenset(
    [
        "additionalProperties", "additionalItems", "contains", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
    ]
)  # fmt: skip
"""Keywords that hold one schema."""
LIST = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
"""Keywords that hold a list of schemas."""
MAP = frozenset(
    [
        "$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties",
        "properties",
    ]
)  # fmt: skip
"""Keywords that hold schemas by name."""
IN_PLACE = frozenset(
    ["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"]
)
"""Keywords whose subschemas apply to the very value that the schema applies to."""
EXCLUDED = "!excluded"
"""Our own keyword for a negated `const` or `enum`: the values that are not allowed."""
UNMET = "!unmet"
"""Our own keyword for a negated keyword that no mask holds: the keyword and its value."""
OWN = "\0"
"""Stands in pointers to schemas of our own, behind the pointer to what they are made of."""
_READ_WITH_OTHERS = {
    "exclusiveMinimum": 4, "exclusiveMaximum": 4, "then": 7, "else": 7,
    "minContains": 2019, "maxContains": 2019,
}  # fmt: skip
"""Keywords that jsonschema has no function of their own for, and the draft from which on they
say something."""


def is_tuple(schema: dict[str, Any]) -> bool:
    """Whether its `items` are a list, which drafts before 2020-12 have."""
    return isinstance(schema.get("items"), list)


def _any_draft() -> Specification[Any]:
    """How identifiers are read: as 2020-12 has it, and as draft 4 has it, whose `id` counts where
    it is the name of a place."""

    def anchors(specification: Specification[Any], contents: Any) -> list[Any]:
        older = isinstance(contents, dict) and isinstance(contents.get("id"), str)
        return [*DRAFT202012.anchors_in(contents), *(DRAFT4.anchors_in(contents) if older else ())]

    def below(contents: Any) -> list[Any]:
        return [one for _, one in subschemas(contents)] if isinstance(contents, dict) else []

    made: Any = Specification  # its fields have other names than its arguments
    return made(
        name="undated",
        id_of=DRAFT202012.id_of,
        subresources_of=below,
        maybe_in_subresource=DRAFT201909.maybe_in_subresource,
        anchors_in=anchors,
    )


@dataclass(frozen=True, eq=False)
class Dialect:
    """A draft. `validator` is jsonschema's class for it."""

    number: int  # 4, 6, 7, 2019, 2020
    validator: Any
    specification: Specification[Any]
    own: tuple[str, ...] = ()

    @cached_property
    def keywords(self) -> frozenset[str]:
        """The keywords that assert something in this draft."""
        others = (key for key, since in _READ_WITH_OTHERS.items() if self.number >= since)
        return frozenset([*self.validator.VALIDATORS, *others, *self.own])


NEWEST = Dialect(2020, jsonschema.Draft202012Validator, DRAFT202012)
OURS = replace(NEWEST, own=(EXCLUDED, UNMET))
"""The dialect of schemas that we write ourselves."""
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_DIALECTS = {
    dialect.validator.META_SCHEMA["$schema"].rstrip("#"): dialect
    for dialect in (
        Dialect(4, jsonschema.Draft4Validator, DRAFT4),
        Dialect(6, jsonschema.Draft6Validator, DRAFT6),
        Dialect(7, jsonschema.Draft7Validator, DRAFT7),
        Dialect(2019, jsonschema.Draft201909Validator, DRAFT201909),
        NEWEST,
    )
}


DRAFT_7 = _DIALECTS["http://json-schema.org/draft-07/schema"]


def _either(keyword: str, older: Any, is_older: Callable[[dict[str, Any]], bool]) -> Any:
    """jsonschema's function for a keyword: an older draft's, where that is meant."""
    newer = NEWEST.validator.VALIDATORS.get(keyword)

    def check(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Any:
        chosen = older.VALIDATORS.get(keyword) if is_older(schema) else newer
        return chosen(validator, value, instance, schema) if chosen is not None else ()

    return check


def _of_bound(exclusive: str, bound: str) -> dict[str, Any]:
    def is_older(schema: dict[str, Any]) -> bool:
        return isinstance(schema.get(exclusive), bool)

    older = jsonschema.Draft4Validator
    return {keyword: _either(keyword, older, is_older) for keyword in (exclusive, bound)}


UNDATED = replace(
    NEWEST,
    validator=jsonschema.validators.extend(
        NEWEST.validator,
        {
            "items": _either("items", DRAFT_7.validator, is_tuple),
            "additionalItems": _either("additionalItems", DRAFT_7.validator, is_tuple),
            "dependencies": DRAFT_7.validator.VALIDATORS["dependencies"],
            "$recursiveRef": jsonschema.Draft201909Validator.VALIDATORS["$recursiveRef"],
            **{k: v for pair in _EXCLUSIVE.items() for k, v in _of_bound(*pair).items()},
        },
    ),
    specification=_any_draft(),
)
"""The dialect of a schema that names no draft and has keywords of older ones: these are read as
their drafts have them, and all else as the newest has it."""


def undated_as_today(flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema in the dialect `UNDATED`: what it has of draft 7, and the rest in the newest shape.
    Booleans for exclusive bounds are in neither."""
    rest = {k: v for k, v in flat.items() if k not in _EXCLUSIVE or not isinstance(v, bool)}
    names = ("dependencies", "additionalItems")
    older: dict[str, Any] = {name: rest.pop(name) for name in names if name in rest}
    if is_tuple(flat):
        older["items"] = rest.pop("items")
    return older, rest


def dialect_of(schema: Any, default: Dialect = NEWEST) -> Dialect:
    """The draft that `$schema` names; `default` where it names none that is known."""
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        return _DIALECTS.get(schema["$schema"].rstrip("#"), default)
    return default


def keywords(schema: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The assertions of a schema in the shape they have in 2020-12. What asserts nothing in its own
    draft is left out."""
    if dialect.number <= 7 and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    found = {key: value for key, value in schema.items() if key in dialect.keywords}
    if isinstance(found.get("items"), list):  # refused where the draft has no such thing
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)
    for key, needed in found.pop("dependencies", {}).items():
        into = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        found.setdefault(into, {})[key] = needed
    for exclusive, bound in _EXCLUSIVE.items():
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    return found


def subschemas(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schemas directly below one: (path below it, as in a pointer; the schema)."""
    found: list[tuple[str, Any]] = []
    for key, value in schema.items():
        if key in ONE and isinstance(value, dict | bool):
            found.append((f"/{key}", value))
        elif key in LIST and isinstance(value, list):
            found += [(f"/{key}/{index}", item) for index, item in enumerate(value)]
        elif key in MAP and isinstance(value, dict):
            found += [
                (f"/{key}/{pointer_part(name)}", item)
                for name, item in value.items()
                if isinstance(item, dict | bool)
            ]
    return found


def pointer_part(name: str) -> str:
    """A name as a part of a JSON pointer, in which `OWN` is nobody's but ours."""
    return without_own(name.replace("~", "~0").replace("/", "~1"))


def without_own(pointer: str) -> str:
    """A pointer that a user wrote."""
    return pointer.replace(OWN, "~2")
