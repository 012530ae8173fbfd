"""Hypothesis strategies for schemas that should be finite automata."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ["a", "b", "id", "naïve", 'q"uote', "back\\slash", "tab\there", "😀", ""]
PATTERNS = [
    "^[a-z]+$", "[0-9]", "^a|b$", "^(ab|c)*$", r"^\d{3}-\d{4}$", r"\s", r"^\S+$", r"^[^\W_]+$",
    r"^.{2,5}$", r"^(\+|-)?\d+\.\d{2}$", r'["\\]', r"^[\x00-\x1f]$", "^$", r"\D\W", "^(^x|y$)$",
]  # fmt: skip
FORMATS = ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "uri"]

numbers = st.one_of(
    st.integers(-2000, 2000),
    st.integers(-(10**18), 10**18),
    st.decimals(-100, 100, places=3).map(float),
    st.floats(-1e12, 1e12, allow_nan=False),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.text(max_size=5),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["free", "length", "pattern", "format", "both"]))
    schema: Schema = {"type": "string"}
    if kind in ("length", "both"):
        low = draw(st.integers(0, 4))
        schema["minLength"] = low
        if draw(st.booleans()):
            schema["maxLength"] = low + draw(st.integers(0, 6))
    if kind in ("pattern", "both"):
        schema["pattern"] = draw(st.sampled_from(PATTERNS))
    if kind == "format":
        schema["format"] = draw(st.sampled_from(FORMATS))
    return schema


@st.composite
def numerics(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    low, high = sorted([draw(numbers), draw(numbers)])
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 3, 5, 8, 10, 100, 0.5, 0.1, 0.01, 2.0]))
    return schema


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    @st.composite
    def array(draw: st.DrawFn) -> Schema:
        schema: Schema = {"type": "array"}
        if draw(st.booleans()):
            schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=3))
        schema["items"] = draw(st.one_of(inner, st.just(False)))
        if draw(st.booleans()):
            schema["minItems"] = draw(st.integers(0, 3))
        if draw(st.booleans()):
            schema["maxItems"] = draw(st.integers(0, 5))
        return schema

    return array()


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    @st.composite
    def closed(draw: st.DrawFn) -> Schema:
        properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=5))
        required = [name for name in properties if draw(st.booleans())]
        closing = draw(st.sampled_from(["additionalProperties", "unevaluatedProperties"]))
        schema: Schema = {"type": "object", "properties": properties, closing: False}
        if required:
            schema["required"] = required
        if draw(st.integers(0, 4)) == 0:
            schema["minProperties"] = 1
        if draw(st.integers(0, 4)) == 0:
            schema["propertyNames"] = {"maxLength": 4}
        if draw(st.integers(0, 3)) == 0 and properties:
            chosen = st.sampled_from(list(properties))
            schema["anyOf" if closing == "additionalProperties" else "allOf"] = [
                {"required": [draw(chosen)]},
                {"properties": {draw(chosen): draw(inner)}},
            ]
        return schema

    return closed()


def unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    kind = st.sampled_from(["anyOf", "oneOf", "allOf"])
    return st.builds(
        lambda keyword, options: {keyword: options}, kind, st.lists(inner, min_size=1, max_size=3)
    )


leaves = st.one_of(
    strings(),
    numerics(),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["boolean", "null"]}]),
    st.lists(values, max_size=4).map(lambda listed: {"enum": listed}),
    values.map(lambda value: {"const": value}),
    st.sampled_from([{"enum": [1, "a", None, 2.5], "type": ["string", "number"]}]),
)
schemas = st.recursive(
    leaves, lambda inner: st.one_of(arrays(inner), objects(inner), unions(inner)), max_leaves=8
)
