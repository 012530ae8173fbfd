"""Keywords of older drafts in schemas that name no draft: read as the drafts have them."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.types.constraint_kinds import remarks
from rootlace.wire.errors import InvalidConstraint
from tests.structured.random_model import accepts, byte_vocabulary

I = {"type": "integer"}  # noqa: E741
S = {"type": "string"}
ARRAYS = [list(v) for n in range(4) for v in itertools.product([1, "a", None], repeat=n)]
NUMBERS = [1, 2, 3, 4, 9, 10, 2.5, 9.5]
OBJECTS = [
    {k: 1 for k, there in zip("abc", which, strict=True) if there}
    for which in itertools.product([0, 1], repeat=3)
]
CLOSED = {"type": "object", "properties": {"a": I, "b": I, "c": I}, "additionalProperties": False}
D3, D4, D7 = jsonschema.Draft3Validator, jsonschema.Draft4Validator, jsonschema.Draft7Validator

SCHEMAS: list[tuple[Any, Any, list[Any], str]] = [
    (D3, {"type": "any", "maximum": 4}, [*NUMBERS, *ARRAYS, *OBJECTS], "type"),
    (D3, {"type": ["any", "null"], "minItems": 2}, [*NUMBERS, *ARRAYS, *OBJECTS], "type"),
    (D3, {"type": "any", "uniqueItems": True}, ARRAYS, "type"),
    (D7, {"type": "array", "items": [I, S]}, ARRAYS, "items"),
    (D7, {"type": "array", "items": [I, S], "additionalItems": False}, ARRAYS, "items"),
    (D7, {"type": "array", "items": [I], "additionalItems": S, "minItems": 2}, ARRAYS, "items"),
    (
        D7,
        {"type": "array", "items": [{"$ref": "#/definitions/i"}, {"$ref": "#/items/0"}],
         "definitions": {"i": I}, "additionalItems": False},
        ARRAYS,
        "items",
    ),
    (D4, {"type": "number", "minimum": 2, "exclusiveMinimum": True, "maximum": 9}, NUMBERS,
     "exclusiveMinimum"),
    (D4, {"type": "integer", "minimum": 2, "maximum": 9, "exclusiveMaximum": True}, NUMBERS,
     "exclusiveMaximum"),
    (D4, {"type": "integer", "minimum": 2, "maximum": 9, "exclusiveMaximum": False}, NUMBERS,
     "exclusiveMaximum"),
    (D7, {**CLOSED, "dependencies": {"a": ["b"]}}, OBJECTS, "dependencies"),
    (D7, {**CLOSED, "dependencies": {"a": {"required": ["c"]}, "b": ["a"]}}, OBJECTS,
     "dependencies"),
    (
        D4,
        {"type": "array", "items": [{"$ref": "#it"}], "definitions": {"x": {"id": "#it", **I}}},
        ARRAYS,
        "items",
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=["auto", "llguidance"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), config=ConstraintConfig(backend=request.param))


@pytest.mark.parametrize("draft, schema, values, keyword", SCHEMAS, ids=lambda v: str(v)[:40])
def test_older_keywords_hold(
    compiler: GrammarCompiler, draft: Any, schema: Any, values: list[Any], keyword: str
) -> None:
    grammar = compiler.compile(json_schema=schema)
    for value in values:
        text = json.dumps(value, separators=(",", ":")).encode()
        valid = draft(schema).is_valid(value)
        assert accepts(grammar, compiler.vocabulary, text) == valid, value
    told = remarks(json.dumps(schema))
    assert f"$.{keyword}" in [one.path for one in told]
    assert not any(one.misspelt for one in told)


def test_beside_them_all_else_is_read_as_the_newest_draft_has_it(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "array",
        "items": [{"$ref": "#/$defs/i", "minimum": 5}, {"const": 7}, {"exclusiveMinimum": 3}],
        "additionalItems": False,
        "$defs": {"i": I},
    }
    grammar = compiler.compile(json_schema=schema)
    for value, valid in (([5, 7, 4], True), ([4, 7], False), ([5, 8], False), ([5, 7, 3], False)):
        text = json.dumps(value, separators=(",", ":")).encode()
        assert accepts(grammar, compiler.vocabulary, text) == valid, value


def test_a_residual_is_checked_with_the_older_meaning(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": [I, I], "additionalItems": False, "uniqueItems": True}
    grammar = compiler.compile(json_schema=schema)
    assert grammar.backend.endswith("+checked")
    for text, valid in ((b"[1,2]", True), (b"[1,1]", False), (b"[1,2,3]", False)):
        assert accepts(grammar, compiler.vocabulary, text) == valid, text


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"items": [3]}, "#/items/0: 3"),
        ({"items": [I], "prefixItems": [I]}, "#/items: a list beside prefixItems"),
        ({"dependencies": {"a": 3}}, "#/dependencies/a: 3"),
        ({"exclusiveMinimum": True, "minimum": "x"}, "#/minimum: 'x'"),
        ({"items": [{"type": "strin"}]}, "#/items/0/type: 'strin'"),
        ({"items": {"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [I]}},
         "#/items/items: "),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [I]}, "#/items: "),
    ],
)  # fmt: skip
def test_what_no_draft_has_is_refused(schema: Any, wrong: str) -> None:
    with pytest.raises(InvalidConstraint, match=f"json_schema: {wrong}"):
        PreparedSchema(schema)


def test_a_draft_that_is_named_is_worth_no_remark() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [I]}
    assert remarks(json.dumps(schema)) == ()
    assert remarks(json.dumps({"properties": {"q": schema, "items": {"enum": [[1]]}}})) == ()


@pytest.mark.parametrize("draft", [D4, jsonschema.Draft6Validator, D7])
def test_keywords_that_the_named_draft_lacks_are_told(draft: Any) -> None:
    inner = {
        "const": 1, "contains": I, "propertyNames": {}, "if": {}, "then": {}, "else": {},
        "dependentRequired": {}, "dependentSchemas": {}, "minContains": 1, "maxContains": 1,
        "prefixItems": [I], "unevaluatedItems": False, "unevaluatedProperties": False,
    }  # fmt: skip
    schema = {"$schema": draft.META_SCHEMA["$schema"], "properties": {"a": {**inner, **I}}}
    has = draft.META_SCHEMA["properties"]
    told = {one.path for one in remarks(json.dumps(schema))}
    assert told == {f"$.properties.a.{name}" for name in inner if name not in has}


def test_draft_2019_09_has_no_prefix_items(compiler: GrammarCompiler) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2019-09/schema", "prefixItems": [I]}
    (told,) = remarks(json.dumps({**schema, "dependentRequired": {}}))
    assert told.path == "$.prefixItems" and not told.misspelt
    assert accepts(compiler.compile(json_schema=schema), compiler.vocabulary, b'["a"]')


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"seat": {**I, "nullable": True}}}, ["$.properties.seat.nullable"]),
        ({"type": ["integer", "string"], "nullable": True}, ["$.nullable"]),
        ({"type": ["integer", "null"], "nullable": True}, []),
        ({**I, "nullable": False}, []),
        ({"nullable": True}, []),
        ({"type": 3, "nullable": True}, []),
    ],
)
def test_nullable_of_openapi_is_told(schema: Any, told: list[str]) -> None:
    found = remarks(json.dumps(schema))
    assert [one.path for one in found] == told
    assert not any(one.misspelt for one in found)


NULL_OR_TEXT = ["string", "null"]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"type": NULL_OR_TEXT, "enum": ["x"]}}}, ["$.properties.a.type"]),
        ({"type": NULL_OR_TEXT, "const": "x"}, ["$.type"]),
        ({"type": NULL_OR_TEXT, "enum": ["x", None]}, []),
        ({"type": NULL_OR_TEXT, "const": None}, []),
        ({"type": NULL_OR_TEXT}, []),
        ({"type": ["string", "integer"], "enum": ["x"]}, []),
        ({"type": "null", "enum": 3}, []),
    ],
)
def test_a_choice_that_leaves_null_out_is_told(schema: Any, told: list[str]) -> None:
    found = remarks(json.dumps(schema))
    assert [one.path for one in found] == told
    assert not any(one.misspelt for one in found)


CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"properties": {"counts": CLOSED}, "additionalProperties": False},
            ["$.properties.counts.additionalProperties"],
        ),
        (
            {"items": {**CLOSED, "properties": {}, "required": []}},
            ["$.items.additionalProperties"],
        ),
        (CLOSED, []),
        ({"items": {**CLOSED, "properties": {"a": I}}}, []),
        ({"items": {**CLOSED, "patternProperties": {"^x": I}}}, []),
        ({"items": {"type": "object", "additionalProperties": I}}, []),
        ({"items": {**CLOSED, "maxProperties": 0}}, []),
        ({"items": {**CLOSED, "type": "string"}}, []),
        ({"not": {"additionalProperties": False}}, []),
        ({"propertyNames": I}, ["$.propertyNames"]),
        ({"$defs": {"n": I}, "propertyNames": {"$ref": "#/$defs/n"}}, ["$.propertyNames"]),
        ({"$defs": [], "propertyNames": {"$ref": "#/$defs/n"}}, []),
        ({"propertyNames": {"type": ["integer", "string"]}}, []),
        ({"propertyNames": {"type": "any"}, "$schema": "draft-03"}, []),
        ({"propertyNames": True}, []),
    ],
)
def test_an_object_that_is_always_empty_is_told(schema: Any, told: list[str]) -> None:
    found = remarks(json.dumps(schema))
    assert [one.path for one in found] == told
    assert not any(one.misspelt for one in found)


def test_keywords_of_draft_3_are_told_as_misspelt_ones() -> None:
    told = remarks(json.dumps({"type": "integer", "divisibleBy": 3, "extends": {}}))
    assert {str(one) for one in told} == {
        "json_schema: $.divisibleBy is no keyword; did you mean 'multipleOf'?",
        "json_schema: $.extends is no keyword; did you mean 'allOf'?",
    }


def test_comparing_names_is_bounded() -> None:
    """A schema of very many strange names is no way to stop a server for minutes."""
    few = {f"propertie{i}": 1 for i in range(4000)}
    assert 0 < len(remarks(json.dumps(few))) <= 256
    assert remarks(json.dumps({f"propertie{i}": 1 for i in range(200_000)})) == ()
