"""A key is the same key in every spelling."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from tests.structured.random_model import accepts, byte_vocabulary

KEYS = ["a", "b", "a\n", "é", 'a"\\', "a\x01", "a/", "a\x7f", "😀", ""]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {key: {"type": "null"} for key in KEYS}},
    {"type": "object", "properties": dict.fromkeys(KEYS[1:], False)},
    {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^[aé😀]": {"type": "null"}}},
    {"type": "object", "patternProperties": {"[\x00-\x1f]": {"type": "null"}}},
    {
        "type": "object",
        "properties": {"a\n": {"type": "null"}},
        "patternProperties": {"^a": {}},
        "additionalProperties": False,
    },
    {"type": "object", "minProperties": 2, "required": ["a"]},
    {"type": "object", "propertyNames": {"pattern": "^[^a]*$"}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^\x01$"}}},
    {"anyOf": [{"type": "array"}, {"properties": {"a": {"type": "null"}}}]},
]


def spellings(key: str) -> set[str]:
    """Return the JSON spellings of a key: with no, some or all characters escaped."""
    plain = json.dumps(key, ensure_ascii=False)
    units = key.encode("utf-16-be")
    codes = [units[i] << 8 | units[i + 1] for i in range(0, len(units), 2)]
    lower = '"' + "".join(f"\\u{code:04x}" for code in codes) + '"'
    upper = '"' + "".join(f"\\u{code:04X}" for code in codes) + '"'
    last = plain[:-2] + f'\\u{codes[-1]:04x}"' if key == "a" or key == "b" else plain
    return {plain, json.dumps(key), lower, upper, last, plain.replace("/", "\\/")}


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_no_spelling_of_a_key_slips_through(schema: dict[str, Any]) -> None:
    vocabulary = byte_vocabulary()
    grammar = GrammarCompiler(vocabulary).compile(json_schema=json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    taken = 0
    for key in KEYS:
        for spelled, value in itertools.product(sorted(spellings(key)), ("1", "null", '"\\u0001"')):
            for more in ("", '"a":null,', '"a":"\\u0001",', '"b":1,'):
                text = f"{{{more}{spelled}:{value}}}"
                if accepts(grammar, vocabulary, text.encode()):
                    taken += 1
                    assert validator.is_valid(json.loads(text)), text
    assert taken


def test_patterns_of_control_characters_are_served() -> None:
    """If strings must have `\\u` escapes, keys are checked instead."""
    schema = {"properties": {"a": {"type": "string", "pattern": "^\x01$"}}}
    prepared = PreparedSchema(schema)
    assert [str(note.pointer) for note in prepared.residuals] == ["#/properties"]
    vocabulary = byte_vocabulary()
    grammar = GrammarCompiler(vocabulary).compile(json_schema=json.dumps(schema))
    assert accepts(grammar, vocabulary, b'{"a":"\\u0001"}')
    assert not accepts(grammar, vocabulary, b'{"\\u0061":"b"}')


@pytest.mark.parametrize("schema", [{"type": "object"}, {"items": {"type": "string"}}, {}])
def test_where_no_key_is_told_apart_control_characters_may_be_written(schema: Any) -> None:
    vocabulary = byte_vocabulary()
    grammar = GrammarCompiler(vocabulary).compile(json_schema=json.dumps(schema))
    text = b'["a\\u0001"]' if "items" in schema else b'{"a":"\\u0001"}'
    assert accepts(grammar, vocabulary, text)
