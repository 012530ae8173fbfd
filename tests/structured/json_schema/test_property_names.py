"""`propertyNames` with any schema of strings: held by the mask, whatever the schema is made of."""

import enum
import json
from typing import Any, Literal

import jsonschema
import pydantic
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.types import schema_of
from tests.structured.random_model import RandomModel, accepts, byte_vocabulary

COLOURS = {"enum": ["red", "green", "blue"]}
SHORT = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}


def _of(names: Any, **more: Any) -> dict[str, Any]:
    return {
        "$defs": {"colour": COLOURS, "short": SHORT, "also": {"$ref": "#/$defs/colour"}},
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": names,
        **more,
    }


SCHEMAS: list[dict[str, Any]] = [
    _of({"$ref": "#/$defs/colour"}),
    _of({"$ref": "#/$defs/also"}),
    _of({"$ref": "#/$defs/short"}),
    _of({"$ref": "#/$defs/short", "minLength": 2}),
    _of({"anyOf": [{"$ref": "#/$defs/colour"}, {"pattern": "^x[0-9]$"}]}),
    _of({"anyOf": [{"const": "red"}, {"enum": ["ab", 7, None]}]}),
    _of({"oneOf": [{"const": "red"}, {"pattern": "^a"}]}),
    _of({"allOf": [{"$ref": "#/$defs/short"}, {"pattern": "a"}]}),
    _of({"allOf": [{"$ref": "#/$defs/colour"}, {"pattern": "e"}]}),
    _of({"type": ["string", "null"], "format": "uuid"}),
    _of({"pattern": "^[a-z]+$", "format": "note"}),
    _of({"pattern": "e$", "minLength": 2, "maxLength": 4}),
    _of({"if": {"pattern": "^a"}, "then": {"maxLength": 2}, "else": {"$ref": "#/$defs/colour"}}),
    _of({"$ref": "#/$defs/short"}, patternProperties={"^a": {"type": "null"}}),
    _of({"$ref": "#/$defs/colour"}, patternProperties={"^r": {"type": "null"}}),
    _of({"pattern": "[ab]"}, patternProperties={"^a": {"type": "null"}, "^b": {"type": "string"}}),
    _of({"$ref": "#/$defs/short"}, properties={"red": {"type": "null"}, "ab": {"type": "null"}}),
    _of({"$ref": "#/$defs/short"}, allOf=[{"propertyNames": {"pattern": "b"}}]),
    _of({"type": "integer"}),
    _of(False),
    _of({"anyOf": [SHORT, {"$ref": "#/$defs/colour"}]}, required=["red"]),
]
KEYS = [
    "red", "green", "blue", "a", "ab", "abc", "abcd", "b", "ba", "x1", "e", "re", "", "A", "note",
]  # fmt: skip
UUID = "123e4567-e89b-12d3-a456-426614174000"


@pytest.fixture(scope="module", params=["auto", "llguidance"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), config=ConstraintConfig(backend=request.param))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[147:210])
def test_keys_are_those_of_the_schema(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert PreparedSchema(schema).residuals == ()
    grammar = compiler.compile(json_schema=schema, strict=True)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for key in [*KEYS, UUID]:
        for member in (7, None, "s"):
            value = {key: member}
            if "required" in schema:
                value = {"red": 1, **value}
            text = json.dumps(value, separators=(",", ":")).encode()
            assert accepts(grammar, compiler.vocabulary, text) == validator.is_valid(value), text
    ended = 0
    for seed in range(5):
        generated = RandomModel(compiler.vocabulary, seed, patience=5).generate(grammar)
        if generated.text is not None:
            validator.validate(json.loads(generated.text))
            ended += 1
    assert ended >= 3


class Colour(enum.Enum):
    red = "red"
    green = "green"


class Stock(pydantic.BaseModel):
    counts: dict[Colour, int]


def test_a_dictionary_of_an_enum_is_an_automaton(compiler: GrammarCompiler) -> None:
    schema = Stock.model_json_schema()
    assert schema["properties"]["counts"]["propertyNames"] == {"$ref": "#/$defs/Colour"}
    schema["additionalProperties"] = False
    grammar = compiler.compile(json_schema=schema, strict=True)
    if compiler.config.backend == "auto":
        assert grammar.backend == "automaton"
    for text, valid in (
        (b'{"counts":{"red":1,"green":2}}', True),
        (b'{"counts":{"green":2}}', True),
        (b'{"counts":{"pink":2}}', False),
        (b'{"counts":{"red":1,"red":2}}', False),
    ):
        assert accepts(grammar, compiler.vocabulary, text) == valid, text


class Place(enum.IntEnum):
    first = 1
    last = -1


@pytest.mark.parametrize("kind", [bool, Place, Literal["a b", 1]])
def test_a_dictionary_with_few_keys_ends_when_it_has_all(
    compiler: GrammarCompiler, kind: Any
) -> None:
    model = pydantic.create_model("Counts", counts=(dict[kind, bool], ...))
    grammar = compiler.compile(json_schema=schema_of(model), strict=True)
    for seed in range(20):
        text = RandomModel(compiler.vocabulary, seed, patience=5).generate(grammar).text
        assert text is not None
        model.model_validate_json(text)


@pytest.mark.parametrize("pattern", ["^(a|b)$", "^x[01]$", "^(red|dark-?red)$", "^a[bc]d?$"])
def test_an_object_with_few_keys_of_a_pattern_ends_when_it_has_all(
    compiler: GrammarCompiler, pattern: str
) -> None:
    schema = {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer", "maximum": 9, "minimum": 0}},
        "minProperties": 2,
        "additionalProperties": False,
    }
    assert PreparedSchema(schema).residuals == ()
    grammar = compiler.compile(json_schema=schema, strict=True)
    for seed in range(20):
        text = RandomModel(compiler.vocabulary, seed, patience=300).generate(grammar).text
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "bounds", [{"minProperties": 1}, {"maxProperties": 1}, {"maxProperties": 3}]
)
@pytest.mark.parametrize("pattern", ["^[a-z]$", "^x[0-9]$", "^[a-c]$"])
def test_the_number_of_a_patterns_keys_is_held(pattern: str, bounds: dict[str, int]) -> None:
    schema = {"patternProperties": {pattern: {}}, "additionalProperties": False, **bounds}
    assert PreparedSchema({"type": "object", **schema}).residuals == ()


def test_no_key_is_allowed_where_names_contradict_each_other() -> None:
    regex = PreparedSchema(
        _of({"$ref": "#/$defs/colour"}, allOf=[{"propertyNames": {"pattern": "^x"}}])
    ).regex("compact")
    assert regex is not None


def test_a_pattern_that_llguidance_alone_reads(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(json_schema=_of({"pattern": r"^\p{L}+$"}), strict=True)
    for text, valid in (('{"é":1}', True), ('{"1":1}', False)):
        assert accepts(grammar, compiler.vocabulary, text.encode()) == valid
