"""Questions to llguidance, compared with its own treatment of schemas."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from rootlace.runtime.structured.json_schema.to_llguidance import accepted, grammar_of, written

SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "string", "x-guidance": {"item_separator": ", ", "whitespace_flexible": True}},
    {"$ref": "#/$defs/é", "$defs": {"é": {"properties": {"\n": {"const": 1e30}}}}},
    {"type": "array", "items": {"enum": [None, True, 2**70, "日本", -0.5]}},
    {"enum": []},
    {"type": "string", "format": "nothing"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_the_grammar_of_a_schema_is_llguidances(schema: dict[str, Any]) -> None:
    theirs = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    assert json.loads(grammar_of(schema)) == json.loads(theirs)
    said = LLMatcher.validate_grammar(theirs)
    assert accepted(schema) == said
    # A long one is told in another way.
    long = {**schema, "description": "x" * 20_000}
    assert (
        json.loads(grammar_of(long).removeprefix("start: %json ")).items()
        >= {key: value for key, value in long.items() if key != "x-guidance"}.items()
    )
    assert accepted(long).splitlines()[:1] == said.splitlines()[:1]


@pytest.mark.parametrize("value", [*SCHEMAS, [1, [], {}, "\n", None]], ids=repr)
def test_values_are_written_as_they_are(value: Any) -> None:
    assert written(value) == json.dumps(value)


def test_what_llguidance_refuses_is_told() -> None:
    assert accepted({"type": "string", "pattern": "("})
    assert accepted({"type": "string", "minLength": 2, "maxLength": 1}).startswith("Unsatisfiable")
