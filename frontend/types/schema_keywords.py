"""Keywords of JSON schemas, and those that somebody may have meant.

A schema may hold any other property, and it says nothing then: a misspelt keyword constrains
nothing, in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

_MAPS = frozenset(
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"]
)
_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
_SINGLE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_VALUES = frozenset(
    [
        "$ref",
        "const",
        "dependentRequired",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "nullable",
        "pattern",
        "required",
        "type",
        "uniqueItems",
    ]
)
# What they say is for readers; nothing is lost with one that is misspelt.
_NOTES = frozenset(
    [
        "$anchor",
        "$comment",
        "$dynamicAnchor",
        "$dynamicRef",
        "$id",
        "$recursiveAnchor",
        "$recursiveRef",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "id",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    ]
)
_CONSTRAINING = _MAPS | _LISTS | _SINGLE | _VALUES
_SIMILAR = 0.8


class Misspelt(NamedTuple):
    """The keyword at `path` is none; `meant` is the one that looks like it."""

    path: str
    meant: str


@functools.lru_cache(maxsize=128)
def misspelt(schema: str) -> tuple[Misspelt, ...]:
    """The keywords in a schema, as JSON text, that look like misspelt ones."""
    try:
        return tuple(_walk(msgspec.json.decode(schema), "$"))
    except (msgspec.DecodeError, RecursionError):
        return ()


def _walk(schema: Any, path: str) -> Iterator[Misspelt]:
    if isinstance(schema, list):  # an older draft's `items`
        for index, each in enumerate(schema):
            yield from _walk(each, f"{path}[{index}]")
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        here = f"{path}.{name}"
        if name in _MAPS and isinstance(value, dict):
            for key, each in value.items():
                yield from _walk(each, f"{here}.{key}")
        elif name in _LISTS or name in _SINGLE:
            yield from _walk(value, here)
        elif name not in _VALUES and name not in _NOTES and not name.startswith("x-"):
            close = get_close_matches(name, _CONSTRAINING | _NOTES, n=1, cutoff=_SIMILAR)
            if close and close[0] in _CONSTRAINING:
                yield Misspelt(here, close[0])
