"""What llguidance is asked, against what it makes of a schema itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from rootlace.runtime.constrained.schema.guidance import accepted, grammar_of, written

SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "string", "x-guidance": {"item_separator": ", ", "whitespace_flexible": True}},
    {"$ref": "#/$defs/é", "$defs": {"é": {"properties": {"\n": {"const": 1e30}}}}},
    {"type": "array", "items": {"enum": [None, True, 2**70, "日本", -0.5]}},
    {"enum": []},
    {"type": "string", "format": "nothing"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_a_schema_is_taken_as_llguidance_writes_it_itself(schema: dict[str, Any]) -> None:
    theirs = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    said = LLMatcher.validate_grammar(theirs)
    assert accepted(schema).startswith(said) and bool(accepted(schema)) is bool(said)


@pytest.mark.parametrize("schema", SCHEMAS[:4], ids=range(4))
def test_a_schema_is_written_as_it_is(schema: dict[str, Any]) -> None:
    assert written(schema) == json.dumps(schema)
    told = json.loads(grammar_of(schema).removeprefix("start: %json "))
    assert told.pop("x-guidance").pop("whitespace_flexible") is False
    assert told == {key: value for key, value in schema.items() if key != "x-guidance"}


def test_what_llguidance_refuses_is_told() -> None:
    assert accepted({"type": "string", "pattern": "("})
    assert accepted({"type": "string", "minLength": 2, "maxLength": 1}).startswith("Unsatisfiable")
