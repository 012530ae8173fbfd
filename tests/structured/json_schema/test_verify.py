"""The incremental check agrees with the whole one, however the text is cut."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.json_schema.load import CheckedSchema
from rootlace.runtime.structured.json_schema.pattern import PatternSearch
from rootlace.runtime.structured.json_schema.validate import Rules, Verifier
from rootlace.wire.errors import InvalidConstraint
from tests.structured.json_schema import small_schemas
from tests.structured.random_model import accepts, byte_vocabulary


def _verifier(schema: object) -> Verifier:
    return Verifier(Rules(CheckedSchema(schema, {})))  # type: ignore[arg-type]


def test_agrees_with_jsonschema_whatever_the_pieces() -> None:
    checked = valid = 0
    for seed in range(400):
        source = random.Random(seed)
        schema = small_schemas.rooted(source)
        if not isinstance(schema, dict):
            continue
        validator = jsonschema.Draft202012Validator(schema)
        rules = Rules(CheckedSchema(schema, {}))
        for _ in range(6):
            value = small_schemas.value(source)
            indent = source.choice((None, 1))
            text = json.dumps(value, indent=indent, ensure_ascii=source.random() < 0.5).encode()
            verifier = Verifier(rules)
            position, refused = 0, False
            while position < len(text) and not refused:
                end = position + source.randint(1, 6)
                refused = verifier.feed(text[position:end]) is not None
                if refused:
                    assert verifier.feed(text[position:end]) is not None  # nothing has changed
                position = end
            accepted = not refused and verifier.accepts()
            assert accepted == validator.is_valid(value), (schema, value)
            checked += 1
            valid += accepted
    assert checked > 1500 and 300 < valid < checked - 300


def test_recursive_references_evaluate_keys() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "properties": {"below": {"$recursiveRef": "#", "unevaluatedProperties": False}},
    }
    validator = jsonschema.Draft201909Validator(schema)
    rules = Rules(CheckedSchema(schema, {}))
    for value in ({"below": {"below": {}}}, {"below": {"other": 1}}, {"other": 1}):
        verifier = Verifier(rules)
        refused = verifier.feed(json.dumps(value).encode()) is not None
        assert (not refused and verifier.accepts()) == validator.is_valid(value)


_EVEN = {"$defs": {"even": {"multipleOf": 2}}, "definitions": {"whole": {"type": "integer"}}}


@pytest.mark.parametrize(
    "draft",
    [
        jsonschema.Draft4Validator,
        jsonschema.Draft7Validator,
        jsonschema.Draft201909Validator,
        jsonschema.Draft202012Validator,
    ],
)
@pytest.mark.parametrize(
    "schema",
    [
        {"$dynamicRef": "#/$defs/even", **_EVEN},
        {"$ref": "#/definitions/whole", "$dynamicRef": "#/$defs/even", **_EVEN},
        {"$ref": "#/definitions/whole", "$dynamicRef": "#/nowhere", **_EVEN},
        {"anyOf": [{"type": "array", "items": {"$recursiveRef": "#"}}, {"type": "integer"}]},
        {"type": "array", "prefixItems": [{"type": "null"}]},
        {"anyOf": [{"not": {"unevaluatedItems": False}}, {"type": "string"}]},
    ],
    ids=str,
)  # fmt: skip
def test_keywords_of_another_draft_say_nothing(draft: Any, schema: dict[str, Any]) -> None:
    schema = {"$schema": draft.META_SCHEMA["$schema"], **schema}
    validator = draft(schema)
    values = (1, 2, "a", None, [], [1], [None], ["a"], [["a"]], {})
    try:
        wanted = [validator.is_valid(value) for value in values]
    except jsonschema.exceptions._WrappedReferencingError:
        with pytest.raises(InvalidConstraint, match="nothing is known"):
            CheckedSchema(schema, {})
        return
    rules = Rules(CheckedSchema(schema, {}))
    found = []
    for value in values:
        verifier = Verifier(rules)
        found.append(not verifier.feed(json.dumps(value).encode()) and verifier.accepts())
    assert found == wanted
    grammar = GrammarCompiler(byte_vocabulary()).compile(json_schema=schema)
    texts = [json.dumps(value, separators=(",", ":")).encode() for value in values]
    assert [accepts(grammar, byte_vocabulary(), text) for text in texts] == wanted


@pytest.mark.parametrize(
    ("schema", "good", "bad", "pointer"),
    [
        ({"items": {"multipleOf": 3}}, b"[3,6", b",7,", "#/items/multipleOf"),
        ({"uniqueItems": True}, b'[{"a":1,"b":2},1', b',{"b":2,"a":1.0}', "#/uniqueItems"),
        ({"propertyNames": {"not": {"const": "x"}}}, b'{"y":1,', b'"x"', "#/propertyNames/not"),
        ({"allOf": [{"properties": {"a": {"not": {}}}}]}, b'{"a":', b"1,", "#/allOf/0"),
        ({"prefixItems": [{}, False]}, b"[1,", b"2", "#/prefixItems/1"),
        ({}, b'{"a":{"b":1},', b'"a"', "#"),
    ],
    ids=str,
)
def test_a_violation_is_found_as_soon_as_it_is_there(
    schema: object, good: bytes, bad: bytes, pointer: str
) -> None:
    verifier = _verifier(schema)
    for index in range(len(good)):
        assert verifier.feed(good[index : index + 1]) is None
    for index in range(len(bad) - 1):
        assert verifier.feed(bad[index : index + 1]) is None
    violation = verifier.feed(bad[-1:])
    assert violation is not None
    assert violation.length == 1
    assert violation.pointer.startswith(pointer)


def test_one_feed_may_complete_several_values() -> None:
    verifier = _verifier({"items": {"properties": {"a": {"items": {"maximum": 3}}}}})
    assert verifier.feed(b'[{"a":[1,2,') is None
    violation = verifier.feed(b"3,4]},5")
    assert violation is not None and violation.length == 4 and violation.number
    assert verifier.feed(b'3]},{"a":[]}]') is None
    assert verifier.accepts()
    verifier.undo(1)
    assert not verifier.accepts()
    assert verifier.feed(b"0]}]") is None and verifier.accepts()


def test_values_nested_beyond_the_bound_are_a_violation() -> None:
    verifier = _verifier({"uniqueItems": True})
    violation = verifier.feed(b"[" * 5000)
    assert violation is not None and "nested" in violation.message


def test_catastrophic_patterns_take_linear_time() -> None:
    schema = {"items": {"pattern": "^(a+)+$"}, "patternProperties": {"^(a|aa)+$": False}}
    many = 400_000 * "a"  # in a time that grows with the square, no test would end
    violation = _verifier(schema).feed(f'["{many}!"]'.encode())
    assert violation is not None and "pattern" in violation.message
    assert _verifier(schema).feed(f'{{"{many}!":1}}'.encode()) is None


def test_patterns_are_found_where_re_finds_them() -> None:
    texts = ["", "a", "aaab", "ab", "foo bar", "12", "b12", "aé", "x-y", "A", "a.b", "\n"]
    for pattern in (
        "^a+$",
        "(a+)+",
        "^(?=a)ab",
        "a(?!b)",
        "[0-9]{2,}",
        "^.{0,3}$",
        "1|^b",
        "^(?:x|$)",
        "[^a]",
        "a\\.b",
        "^[\\w.-]+$",
        "\\s",
    ):
        search = PatternSearch(pattern)
        for text in texts:
            python = re.search(pattern.replace("$", r"\Z"), text, re.ASCII)
            assert search(text) == bool(python), (pattern, text)


def test_patterns_are_ecmas() -> None:
    assert not PatternSearch("^\\d$")("٣")
    assert not PatternSearch("^a$")("a\n")
    assert PatternSearch("^\\cC$")("\x03")
    assert PatternSearch("^\\u{1F409}$")("\U0001f409")
    assert PatternSearch("^(?<year>\\d{4})$")("1984")
    assert PatternSearch("^\\p{Letter}+$")("aé")
    with pytest.raises(InvalidConstraint, match="back-reference"):
        PatternSearch("(a)\\1")
