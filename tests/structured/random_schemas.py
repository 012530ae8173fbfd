"""Varied satisfiable JSON schemas, made from a seed."""

import random
from typing import Any

Schema = dict[str, Any]

_KEYS = ("name", "age", "tags", "id", "note", "size", "kind", "at", "ok", "items")
_WORDS = ("red", "green", "blue", "dark blue", "naïve", 'say "hi"', "a/b", "")
_PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{4}$", "[0-9]", "^(yes|no)$", "^\\d{3}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> Schema:
    """A schema that some instance satisfies; nested at most three deep."""
    return _any(random.Random(seed), 3)


def _any(source: random.Random, depth: int) -> Schema:
    leaves = [_string, _integer, _number, _boolean, _enum, _const]
    inner = [_object, _object, _object, _array, _array, _union, _conditional, _tree]
    makers = leaves + inner if depth else leaves
    if depth == 3 and source.random() < 0.7:  # at the top, what people ask for
        makers = inner
    return source.choice(makers)(source, depth)


def _string(source: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "string"}
    kind = source.randrange(6)
    if kind == 0:
        low = source.randrange(4)
        schema |= {"minLength": low, "maxLength": low + source.randrange(1, 9)}
    elif kind == 1:
        schema["pattern"] = source.choice(_PATTERNS)
    elif kind == 2:
        schema["format"] = source.choice(_FORMATS)
    elif kind == 3:
        schema["not"] = {"enum": list(source.sample(_WORDS, 2))}
    else:
        schema["maxLength"] = source.randrange(3, 20)
    return schema


def _integer(source: random.Random, _: int) -> Schema:
    low = source.randrange(-200, 200)
    schema: Schema = {"type": "integer"}
    if source.random() < 0.7:
        schema |= {"minimum": low, "maximum": low + source.randrange(10, 3000)}
    if source.random() < 0.3:
        schema["multipleOf"] = source.choice((2, 3, 5, 7, 10))
    return schema


def _number(source: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "number"}
    if source.random() < 0.6:
        low = source.choice((-10, 0, 0.5, 1, 17.25))
        schema |= {source.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + 40}
    return schema


def _boolean(source: random.Random, _: int) -> Schema:
    return {"type": source.choice(("boolean", ["boolean", "null"]))}


def _enum(source: random.Random, _: int) -> Schema:
    return {"enum": [*source.sample(_WORDS, 3), source.randrange(100), None]}


def _const(source: random.Random, _: int) -> Schema:
    return {"const": source.choice((*_WORDS, 7, True, None, [1, "a"], {"k": 2}))}


def _object(source: random.Random, depth: int) -> Schema:
    names = source.sample(_KEYS, source.randrange(1, 5))
    required = [name for name in names if source.random() < 0.7]
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(source, depth - 1) for name in names},
        "required": required,
    }
    roll = source.random()
    if roll < 0.6:
        schema["additionalProperties"] = False
    elif roll < 0.75:
        schema["additionalProperties"] = _any(source, 0)
    elif roll < 0.85:
        schema["maxProperties"] = len(names) + 1
        schema["minProperties"] = 1
    if source.random() < 0.2 and len(names) > 1:
        schema["dependentRequired"] = {names[0]: [names[1]]}
    if source.random() < 0.1:
        schema["propertyNames"] = {"maxLength": 12}
    return schema


def _array(source: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(source, depth - 1)}
    roll = source.randrange(5)
    if roll == 0:
        schema = {"type": "array", "items": {"enum": list(range(8))}, "uniqueItems": True}
        schema["minItems"] = source.randrange(3)
    elif roll == 1:
        schema["prefixItems"] = [_any(source, 0), _any(source, 0)]
    elif roll == 2:
        schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}}
        schema |= {"contains": {"multipleOf": 5}, "minContains": 1, "maxItems": 5}
    if roll:
        schema["maxItems"] = source.randrange(1, 6) + schema.get("minContains", 0)
    return schema


def _union(source: random.Random, depth: int) -> Schema:
    options = [_any(source, depth - 1) for _ in range(source.randrange(2, 4))]
    if source.random() < 0.6:
        return {"anyOf": options}
    # Integers and strings of these forms overlap: only what fits exactly one is valid.
    return {
        "oneOf": [
            {"type": "integer", "minimum": 0, "maximum": 60},
            {"type": "integer", "minimum": 40, "maximum": 100},
            {"type": "string", "maxLength": 6},
        ]
    }


def _conditional(source: random.Random, depth: int) -> Schema:
    kind, other = source.sample(("card", "cash", "bank"), 2)
    return {
        "type": "object",
        "properties": {
            "pay": {"enum": [kind, other]},
            "number": {"type": "string", "pattern": "^[0-9]{4}$"},
            "more": _any(source, depth - 1),
        },
        "required": ["pay"],
        "additionalProperties": False,
        "if": {"properties": {"pay": {"const": kind}}},
        "then": {"required": ["number"]},
    }


def _tree(source: random.Random, depth: int) -> Schema:
    name = f"node{source.randrange(10**6)}"
    return {
        "$id": f"https://example.com/{name}",
        "type": "object",
        "properties": {
            "value": _any(source, 0),
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
