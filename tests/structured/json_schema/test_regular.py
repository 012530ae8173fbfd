"""Schemas as regular forms, against `jsonschema`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from tests.structured.json_schema import finite_schemas
from tests.structured.json_schema.regex_texts import draw, regex_of_schema

FORMATS = Draft202012Validator.FORMAT_CHECKER
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741


def closed(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return schema | ({"required": list(required)} if required else {})


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def matches(schema: Any, text: str, whitespace: Any = "compact") -> bool:
    regex = regex_of_schema(schema, whitespace)
    assert regex is not None, "not regular"
    dfa = LazyDfa(regex, 1 << 16)
    state = dfa.run(dfa.start, text.encode())
    return state >= 0 and dfa.accepting(state)


# --- soundness ------------------------------------------------------------------------------------


@given(finite_schemas.schemas, st.sampled_from(["compact", "flexible"]), st.integers(0, 2**32))
@QUICK
def test_every_text_is_valid(schema: Any, whitespace: Any, seed: int) -> None:
    regex = regex_of_schema(schema, whitespace)
    if regex is None or regex == syntax.NOTHING:
        return
    validator = Draft202012Validator(schema, format_checker=FORMATS)
    source = random.Random(seed)
    for _ in range(20):
        text = draw(regex, source)
        value = json.loads(text)
        assert validator.is_valid(value), (schema, text)
        text.encode()
        if whitespace == "compact":
            assert not any(c in text for c in "\n\r\t")


@given(finite_schemas.schemas, finite_schemas.values)
@QUICK
def test_nothing_is_said_only_where_nothing_is_valid(schema: Any, value: Any) -> None:
    if regex_of_schema(schema) == syntax.NOTHING:
        assert not Draft202012Validator(schema, format_checker=FORMATS).is_valid(value)


@given(finite_schemas.schemas, st.integers(0, 2**32))
@QUICK
def test_what_flexible_writes_is_what_compact_writes_with_blanks(schema: Any, seed: int) -> None:
    tight, loose = (regex_of_schema(schema, layout) for layout in ("compact", "flexible"))
    if tight is None or loose is None or tight == syntax.NOTHING:
        return
    dfa = LazyDfa(loose, 1 << 16)
    text = draw(tight, random.Random(seed))
    state = dfa.run(dfa.start, text.encode())
    assert state >= 0 and dfa.accepting(state), text


# --- completeness ---------------------------------------------------------------------------------

ADDRESS = closed({"street": S, "zip": {"type": "string", "pattern": r"^\d{5}$"}}, "zip")
ORDER = closed(
    {
        "id": {"type": "string", "format": "uuid"},
        "placed": {"type": "string", "format": "date-time"},
        "total": {"type": "number", "minimum": 0, "maximum": 99999.99},
        "lines": {
            "type": "array",
            "items": closed({"sku": S, "count": {"type": "integer", "minimum": 1}}, "sku"),
            "maxItems": 5,
        },
        "to": ADDRESS,
        "note": {"type": ["string", "null"], "maxLength": 20},
    },
    "id",
    "lines",
)

CASES: list[tuple[Any, list[str], list[str]]] = [
    (S, ['""', '"é😀"', r'"\u00e9\ud83d\ude00\n\/"'], ['"', '"\n"', r'"\ud800"', r'"\x"', "a"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"é😀"', r'"\n\"a"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
    ({"type": "string", "pattern": "^ab"}, ['"abc"', '"ab"'], ['"xab"']),
    ({"type": "string", "pattern": "ab"}, ['"xabc"'], ['"xa"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"axx"', '"xxb"'], ['"xax"']),
    ({"type": "string", "pattern": r'^"\\$'}, [r'"\"\\"'], [r'"\""']),
    (I, ["0", "-1", "120"], ["-0", "01", "1.0", "1e2", ""]),
    ({"type": "number"}, ["0", "-1.50", "1e9", "2.5E-7"], ["01", ".5", "1.", "+1"]),
    ({"enum": ["a", 1, None, {"k": [True]}]}, ['"a"', "1", "null", '{"k":[true]}'], ['"b"', "2"]),
    ({"enum": [1, "a"], "type": "string"}, ['"a"'], ["1"]),
    ({"const": {"b": 1, "a": 2}}, ['{"b":1,"a":2}'], ['{"b":1}']),
    (closed({}), ["{}"], ['{"a":1}']),
    (closed({"a": I}), ["{}", '{"a":1}'], ['{"a":"x"}', "{,}"]),
    (
        closed({"a": I, "b": I, "c": I}),
        ["{}", '{"a":1}', '{"b":1}', '{"c":1}', '{"a":1,"c":1}', '{"a":1,"b":2,"c":3}'],
        ['{"a":1,}', '{,"b":1}', '{"b":1,"a":1}', '{"a":1"c":1}', '{"a":1,"a":1}'],
    ),
    (
        closed({"a": I, "b": I, "c": I, "d": I}, "c"),
        ['{"c":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1,"d":1}', '{"a":1,"c":1}'],
        ["{}", '{"a":1,"b":1}', '{"c":1,}', '{"a":1,,"c":1}'],
    ),
    (closed({"a": I, "b": I}, minProperties=1), ['{"a":1}', '{"b":1}'], ["{}"]),
    (closed({"a": I, "b": False}), ['{"a":1}'], ['{"b":1}']),
    ({"type": "array", "items": I}, ["[]", "[1]", "[1,2,3]"], ["[1,]", '["a"]', "[,1]"]),
    (
        {"type": "array", "items": I, "minItems": 2, "maxItems": 3},
        ["[1,2]", "[1,2,3]"],
        ["[]", "[1]", "[1,2,3,4]"],
    ),
    (
        {"type": "array", "prefixItems": [I, S], "items": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', '[1,"a",1]'],
    ),
    (
        {"type": "array", "prefixItems": [I, S], "items": {"type": "null"}, "minItems": 1},
        ["[1]", '[1,"a"]', '[1,"a",null,null]'],
        ["[]", "[1,null]"],
    ),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"anyOf": [I, {"type": "null"}]}, ["1", "null"], ['"a"']),
    ({"oneOf": [I, S]}, ["1", '"a"'], ["null"]),
    (I | {"not": {"oneOf": [{"minimum": 5}, {"maximum": 10}]}}, ["5", "10"], ["4", "11"]),
    (
        {
            "oneOf": [
                closed({"kind": {"const": "cat"}, "lives": I}, "kind"),
                closed({"kind": {"const": "dog"}, "breed": S}, "kind"),
            ]
        },
        ['{"kind":"cat","lives":9}', '{"kind":"dog"}'],
        ['{"kind":"cat","breed":"x"}', "{}"],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/n"}, {"maximum": 9}], "$defs": {"n": I | {"minimum": 3}}},
        ["3", "9"],
        ["2", "10"],
    ),
    (
        closed({"a": {"$ref": "#/$defs/b"}, "c": {"$ref": "#/$defs/b"}})
        | {"$defs": {"b": closed({"x": I})}},
        ['{"a":{"x":1},"c":{}}'],
        ['{"a":1}'],
    ),
    (
        {
            "type": "object",
            "allOf": [{"properties": {"a": I}}, {"properties": {"b": S}, "required": ["b"]}],
            "unevaluatedProperties": False,
        },
        ['{"a":1,"b":"x"}', '{"b":"x"}'],
        ["{}", '{"b":"x","c":1}'],
    ),
    (
        closed({"a": I, "b": I}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ["{}"],
    ),
    ({"type": "integer", "multipleOf": 5}, ["0", "5", "10", "-15", "1005"], ["1", "51", "05"]),
    (
        {"type": "integer", "multipleOf": 4, "allOf": [{"multipleOf": 10}]},
        ["0", "-20"],
        ["4", "10"],
    ),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "2"], ["0", "0.0", "-1"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
    ({"const": 2**60}, [str(2**60)], [str(2**60 + 1)]),
    ({"type": "integer", "minimum": 2**60}, [str(2**60)], [str(2**60 - 1)]),
    ({"type": "string", "format": "unheard-of"}, ['""'], ["1"]),
    ({"type": "integer", "x-unheard-of": 1}, ["1"], ['""']),
    ({"oneOf": [S | {"format": "time"}, {"const": ""}]}, ['"12:00:00Z"'], ['""']),
    ({"if": I, "then": {"maximum": 3}, "else": S, "type": ["integer", "string"]}, ["1"], ["4"]),
    (
        closed({"a": I, "b": I}, dependentRequired={"a": ["b"]}),
        ["{}", '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1}'],
    ),
    (closed({"a": I, "b": I}, maxProperties=1), ["{}", '{"b":1}'], ['{"a":1,"b":1}']),
    (closed({"a": I, "bc": I}, propertyNames={"maxLength": 1}), ['{"a":1}'], ['{"bc":1}']),
    (
        ORDER,
        [
            '{"id":"123e4567-e89b-12d3-a456-426614174000","lines":[]}',
            '{"id":"123e4567-e89b-12d3-a456-426614174000","placed":"2024-02-29T23:59:59.5+02:00",'
            '"total":12.50,"lines":[{"sku":"A-1","count":2},{"sku":"B"}],'
            '"to":{"street":"Rue de l\'Été","zip":"01234"},"note":null}',
        ],
        ['{"lines":[]}', '{"id":"123e4567-e89b-12d3-a456-426614174000","lines":[{"count":2}]}'],
    ),
]


@pytest.mark.parametrize("schema, inside, outside", CASES)
def test_texts_in_and_out(schema: Any, inside: list[str], outside: list[str]) -> None:
    for text in inside:
        assert matches(schema, text), text
    for text in outside:
        assert not matches(schema, text), text


def test_order_may_be_pretty_printed_when_flexible() -> None:
    value = {
        "id": "123e4567-e89b-12d3-a456-426614174000",
        "lines": [{"sku": "A", "count": 2}, {"sku": "B"}],
        "to": {"zip": "01234"},
    }
    for options in ({}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}):
        text = json.dumps(value, **options)  # type: ignore[arg-type]
        assert matches(ORDER, text, "flexible"), text
        assert not matches(ORDER, text)
    assert not matches(ORDER, json.dumps(value, indent=40), "flexible")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_every_subset_of_properties(count: int) -> None:
    names = [f"p{i}" for i in range(count)]
    for required in ([], names[:1], names[-1:], names[1:2], names):
        schema = closed({name: {"const": 1} for name in names}, *required)
        for bits in range(2**count):
            chosen = {name: 1 for i, name in enumerate(names) if bits >> i & 1}
            assert matches(schema, compact(chosen)) == (set(required) <= set(chosen))


# --- bounds and refusals --------------------------------------------------------------------------

OPEN: list[Any] = [
    True,
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": I}},
    closed({"a": {}}),
    {"type": "array"},
    {"type": "array", "items": True},
    {"$ref": "#"},
    {"$defs": {"t": closed({"next": {"$ref": "#/$defs/t"}})}, "$ref": "#/$defs/t"},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"type": "string", "maxLength": 100_000},
    {"type": "string", "pattern": r"^(a)\1$"},
    {"type": "string", "pattern": "a{,3}"},
    {"type": "string", "pattern": "("},
    {"type": "string", "not": {"const": "a"}},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "minimum": 10**30},
    {"type": "number", "multipleOf": 0.01},
    {"type": "array", "items": I, "uniqueItems": True},
    {"type": "array", "items": I, "contains": {"const": 1}},
    {"oneOf": [I, {"type": "number"}]},
    {"oneOf": [closed({"a": I}), closed({"b": I})]},
    {"type": "integer", "minimum": True},
    {"type": "nothing"},
    {"type": "string", "minLength": "3"},
    closed({"a": I}, patternProperties={"^x": I}),
    {"const": float("nan")},
    {"const": "\ud800"},
]


def test_several_looks_are_one_automaton() -> None:
    """The text contains the parts of all look-aheads, in any order."""
    regex = regex_of_schema({"type": "string", "pattern": "^(?=.*a.{40})(?=.*b.{40})(?=.*c.{40})"})
    assert regex is not None


@pytest.mark.parametrize("schema", OPEN, ids=lambda schema: compact(schema)[:60])
def test_not_regular(schema: Any) -> None:
    assert regex_of_schema(schema) is None


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
        {"enum": [1, 2], "type": "string"},
        {"allOf": [I, S]},
        closed({"a": I}, "b"),
        closed({"a": False}, "a"),
        closed({"a": I}, minProperties=2),
        {"type": "array", "items": I, "minItems": 3, "maxItems": 2},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
    ],
    ids=compact,
)
def test_unsatisfiable(schema: Any) -> None:
    assert regex_of_schema(schema) == syntax.NOTHING


def _nested(levels: int, width: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": width, "maxItems": width}
    return schema


def _doubling(levels: int) -> Any:
    """Each definition names the next one twice."""
    definitions: dict[str, Any] = {f"d{levels}": I}
    for i in range(levels):
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        definitions[f"d{i}"] = closed({"a": ref, "b": ref}, "a", "b")
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _in_place(levels: int, keyword: str) -> Any:
    schema: Any = I
    for _ in range(levels):
        schema = {keyword: [schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        _nested(5, 100_000),
        _nested(60, 2),
        _doubling(25),
        _in_place(5000, "anyOf"),
        {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)], **I},
        {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
        {"type": "array", "items": S, "maxItems": 10**30},
        {"enum": ["a" * 40 + "!"], "pattern": "^(a+)+$"},
        closed({f"p{i}": {"type": "string", "maxLength": 50} for i in range(2000)}),
        {"enum": list(range(100_000))},
    ],
    ids=["arrays", "depth", "refs", "anyOf", "choices", "pattern", "items", "search",
         "properties", "enum"],
)  # fmt: skip
def test_a_blow_up_ends(schema: Any) -> None:
    """No test would end if all of the texts were written."""
    assert regex_of_schema(schema) in (None, syntax.NOTHING)


def test_size_is_linear_where_something_is_required() -> None:
    sizes = [
        syntax.size(regex, 10**9)
        for count in (50, 100)
        for regex in [regex_of_schema(closed({f"p{i:03}": I for i in range(count)}, "p000"))]
        if regex is not None
    ]
    assert sizes[1] < 2.1 * sizes[0]


# --- the official suite ---------------------------------------------------------------------------


def test_the_suite(shared_dir: Path) -> None:
    """No instance that is marked invalid is matched, and enough schemas are finite."""
    folder = shared_dir / "data" / "json-schema-test-suite" / "tests" / "draft2020-12"
    finite = valid = 0
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_text()):
            regex = regex_of_schema(group["schema"])
            if regex is None:
                continue
            finite += 1
            dfa = LazyDfa(regex, 1 << 16)
            for case in group["tests"]:
                state = dfa.run(dfa.start, compact(case["data"]).encode("utf-8", "replace"))
                matched = state >= 0 and dfa.accepting(state)
                valid += matched
                assert case["valid"] or not matched, (file.name, group["description"], case)
    assert finite >= 60 and valid >= 60
