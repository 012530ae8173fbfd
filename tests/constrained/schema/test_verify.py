"""The incremental check agrees with the whole one, however the text is cut."""

from __future__ import annotations

import json
import random
import re
import time

import jsonschema
import pytest

from rootlace.runtime.constrained.schema.check import CheckedSchema
from rootlace.runtime.constrained.schema.search import PatternSearch
from rootlace.runtime.constrained.schema.verify import Rules, Verifier
from rootlace.wire.errors import InvalidConstraint
from tests.constrained.schema import small_schemas


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
    hostile = '["' + "a" * 20_000 + '!"]'
    start = time.process_time()
    for text in (hostile, '{"' + "a" * 20_000 + '!":1}'):
        _verifier(schema).feed(text.encode())
    assert time.process_time() - start < 5  # for `re` it would be longer than the universe is old


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
