"""Small schemas of every keyword, and small values: so small that a random value often satisfies
a random schema, and as often does not."""

import itertools
import random
from typing import Any

KEYS = ("a", "b", "c")
STRINGS = ("", "a", "b", "ab", "ba", "é")
NUMBERS = (0, 1, 2, 3, 5, -1, 1.5, 2.5)
PATTERNS = ("^a", "b$", "^[ab]$", "a", "^(?:a|é)$")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def value(source: random.Random, depth: int = 2) -> Any:
    kind = source.randrange(8 if depth else 5)
    if kind == 0:
        return None
    if kind == 1:
        return source.random() < 0.5
    if kind in (2, 3):
        return source.choice(NUMBERS)
    if kind == 4:
        return source.choice(STRINGS)
    if kind == 5:
        return [value(source, depth - 1) for _ in range(source.randrange(4))]
    keys = source.sample(KEYS, source.randrange(4))
    return {key: value(source, depth - 1) for key in keys}


def orders(given: Any) -> list[Any]:
    """The value with its keys in every order."""
    if isinstance(given, list):
        return [list(items) for items in itertools.product(*map(orders, given))]
    if isinstance(given, dict):
        found = []
        for keys in itertools.permutations(given):
            for members in itertools.product(*(orders(given[key]) for key in keys)):
                found.append(dict(zip(keys, members, strict=True)))
        return found
    return [given]


def schema(source: random.Random, depth: int = 3) -> Any:
    if source.random() < 0.08:
        return source.random() < 0.7
    found: dict[str, Any] = {}
    for _ in range(source.choice((1, 1, 2, 2, 3))):
        found |= _keyword(source, depth)
    return found


def rooted(source: random.Random) -> Any:
    """Return a schema with definitions that any part may refer to."""
    found = schema(source)
    if not isinstance(found, dict):
        return found
    return {**found, "$defs": {"d": _part(source, 1), "e": _part(source, 1)}}


def _part(source: random.Random, depth: int) -> dict[str, Any]:
    found = schema(source, depth)
    return found if isinstance(found, dict) else {}


def _some(source: random.Random, depth: int, most: int = 3) -> list[Any]:
    return [schema(source, depth - 1) for _ in range(source.randint(1, most))]


def _named(source: random.Random, depth: int) -> dict[str, Any]:
    return {key: schema(source, depth - 1) for key in source.sample(KEYS, source.randint(1, 2))}


def _keyword(source: random.Random, depth: int) -> dict[str, Any]:
    simple = [
        "type",
        "type",
        "type",
        "const",
        "enum",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
        "uniqueItems",
        "required",
        "minProperties",
        "maxProperties",
        "dependentRequired",
    ]
    nested = [
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "items",
        "prefixItems",
        "contains",
        "properties",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
    ]
    if depth and source.random() < 0.1:
        return {"$ref": source.choice(("#/$defs/d", "#/$defs/e"))} if depth > 1 else {}
    key = source.choice(simple + nested * 2 if depth else simple)
    if key == "type":
        return {key: source.choice((source.choice(_TYPES), source.sample(_TYPES, 2)))}
    if key in ("const", "enum"):
        return {key: value(source, 1)} if key == "const" else {key: [value(source, 1), 1, "a"]}
    if key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        return {key: source.choice((0, 1, 2, 1.5))}
    if key == "multipleOf":
        return {key: source.choice((2, 0.5, 3))}
    if key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        return {key: source.randrange(4)}
    if key == "pattern":
        return {key: source.choice(PATTERNS)}
    if key == "uniqueItems":
        return {key: source.random() < 0.8}
    if key == "required":
        return {key: source.sample(KEYS, source.randint(1, 2))}
    if key == "dependentRequired":
        first, second = source.sample(KEYS, 2)
        return {key: {first: [second]}}
    if key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        return {key: _some(source, depth)}
    if key == "if":
        found = {"if": schema(source, depth - 1)}
        if source.random() < 0.8:
            found["then"] = schema(source, depth - 1)
        if source.random() < 0.5:
            found["else"] = schema(source, depth - 1)
        return found
    if key in ("properties", "dependentSchemas"):
        return {key: _named(source, depth)}
    if key == "patternProperties":
        return {key: {source.choice(PATTERNS): schema(source, depth - 1)}}
    if key == "contains":
        found = {"contains": schema(source, depth - 1)}
        if source.random() < 0.4:
            found[source.choice(("minContains", "maxContains"))] = source.randrange(3)
        return found
    return {key: schema(source, depth - 1)}
