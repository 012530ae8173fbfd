"""Numbers that a mask of llguidance holds: as validators read them, after rounding."""

import json
import random
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.wire.errors import InvalidConstraint
from tests.structured.random_model import accepts, byte_vocabulary

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VOCABULARY = byte_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY)


def compiled(schema: dict[str, Any]) -> Any:
    """On llguidance: arrays of anything are not regular."""
    return COMPILER.compile(json_schema=json.dumps({"anyOf": [schema, {"type": "array"}]}))


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_after_rounding_and_lose_no_short_decimal(seed: int) -> None:
    source = random.Random(seed)

    def bound() -> float:
        few = round(source.uniform(-3, 3), source.randrange(4))
        return few if source.random() < 0.8 else source.choice([0, 1, -1, 100, 0.1, 0.001, 10.5])

    schema: dict[str, Any] = {"type": "number"}
    for key in source.sample(BOUNDS, source.choice((1, 2))):
        schema[key] = bound()
    if source.random() < 0.3:
        schema["not"] = {"const": bound()}
    validator = jsonschema.Draft202012Validator(schema)
    numbers = [value for key, value in schema.items() if key in BOUNDS]
    try:
        grammar = compiled(schema)
    except InvalidConstraint:
        assert not any(validator.is_valid(n / 1000) for n in range(-4000, 4000))
        return
    for number in numbers * 6:
        near = round(number + source.uniform(-1, 1), source.randrange(4))
        beside = round(number + source.choice((-1, 1)) * 10 ** -source.randrange(1, 12), 13)
        whole = str(number) if "." in str(number) else f"{number}.0"
        short = [repr(n) for n in (near, beside, number) if "e" not in repr(n) and n != 0]
        for text in [*short, whole + "0" * 25 + "1", "-0." + "0" * 400 + "1"]:
            valid = validator.is_valid(json.loads(text))
            taken = accepts(grammar, VOCABULARY, text.encode())
            assert taken <= valid, (schema, text)
            assert taken or not valid or text not in short, (schema, text)


@pytest.mark.parametrize(
    "schema, wrong, right",
    [
        ({"type": "number", "exclusiveMinimum": 2**53 + 1}, "9007199254740993", "9007199254740994"),
        ({"type": "integer", "not": {"const": 2**53 + 1}}, "9007199254740993", "9007199254740992"),
        ({"type": "integer", "not": {"enum": list(range(12))}}, "11", "12"),
        ({"type": "number", "not": {"enum": list(range(12))}}, "11", "12"),
        ({"type": "number", "minimum": 2.5, "not": {"const": 2.5}}, "2.5", "2.51"),
        ({"type": "number", "maximum": 2.5, "not": {"const": 2.5}}, "2.5", "2.49"),
        ({"type": "number", "minimum": 2.5, "not": {"const": 2.25}}, "2.25", "2.5"),
        # What other libraries round, leave out or write as no JSON (`findings`).
        (
            {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
            f"{2**53}",
            f"{2**53 + 1}",
        ),
        ({"type": "integer", "maximum": 1234567890123456789}, f"{10**19}", "1234567890123456789"),
        ({"type": "integer", "minimum": -(2**63)}, f"{-(2**63) - 1}", f"{-(2**63)}"),
        ({"type": "number", "minimum": 10**20}, "99999999999999999999", "100000000000000000000"),
        ({"type": "integer", "multipleOf": 5, "minimum": 0}, "13", "10"),
        ({"type": "integer", "multipleOf": 4096}, "13", "8192"),
        ({"enum": [5, 20], "maximum": 10}, "20", "5"),
        ({"enum": [True, False]}, "True", "true"),
        (
            {
                "type": "object",
                "properties": {'5" disk': {"type": "integer"}},
                "required": ['5" disk'],
            },
            '{"5" disk":1}',
            '{"5\\" disk":1}',
        ),
        ({"enum": ["1.5", "C++"]}, '"175"', '"1.5"'),
        ({"enum": ["C", "C++"]}, '"CCC"', '"C++"'),
        ({"enum": ["none (yet)"]}, '"none yet"', '"none (yet)"'),
        ({"type": "object", "properties": {"a.b": False}}, '{"a.b": 1}', '{"axb": 1}'),
        ({"type": "integer", "minimum": 0}, "-1", "12"),
        ({"type": "number", "exclusiveMinimum": 0}, "0", "0.5"),
        (
            {
                "type": "object",
                "properties": {"a": {"prefixItems": [{"type": "integer"}, {"type": "string"}]}},
            },
            '{"a": [null,{}]}',
            '{"a": [1,"x"]}',
        ),
        ({"type": "number", "minimum": 0, "maximum": 1}, "8.5", "0.5"),
        ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}', '{"a":1}'),
        ({"type": "object", "properties": {"a": {"minItems": 1}}}, '{"a": []}', '{"a": [1, 2]}'),
        ({"type": "object", "properties": {"a": {"maxItems": 2}}}, '{"a": [1,2,3]}', '{"a": [1]}'),
    ],
)
def test_numbers_that_a_mask_does_not_know(schema: Any, wrong: str, right: str) -> None:
    grammar = compiled(schema)
    assert not accepts(grammar, VOCABULARY, wrong.encode())
    assert accepts(grammar, VOCABULARY, right.encode())


@pytest.mark.parametrize("keyword", [*BOUNDS, "multipleOf"])
@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400])
def test_numbers_that_no_float_holds(keyword: str, number: str) -> None:
    text = f'{{"properties":{{"a":{{"type":"number","{keyword}":{number}}}}}}}'
    with pytest.raises(InvalidConstraint, match=f"#/properties/a/{keyword}: "):
        COMPILER.compile(json_schema=text)


def test_values_have_their_format_also_where_a_mask_does_not_say_it() -> None:
    """Values are right for validators with and without a check of formats."""
    both = {"enum": ["1", "10.0.0.1"], "format": "ipv4"}
    assert PreparedSchema(both).mask_schema["$defs"]["s0"] == {"enum": ["10.0.0.1"]}
    with pytest.raises(InvalidConstraint, match="#/const: "):
        COMPILER.compile(json_schema=json.dumps({"const": "1", "format": "ipv4"}))
    names = COMPILER.compile(json_schema=json.dumps({"propertyNames": {"format": "date"}}))
    assert accepts(names, VOCABULARY, b'{"2024-02-29":1}')
    assert not accepts(names, VOCABULARY, b'{"2023-02-29":1}')
    overlapping = {"patternProperties": {"^a": {"format": "uuid"}, "b$": {"minLength": 1}}}
    grammar = COMPILER.compile(json_schema=json.dumps(overlapping))
    assert not accepts(grammar, VOCABULARY, b'{"ab":"x"}')


def test_a_dynamic_reference_to_itself_is_refused() -> None:
    loop = {"$dynamicRef": "#/$defs/d", "$defs": {"d": {"$dynamicRef": "#/$defs/d"}}}
    with pytest.raises(InvalidConstraint, match=r"#/\$defs/d: the schema refers to itself"):
        COMPILER.compile(json_schema=json.dumps(loop))


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 7, 2**63 - 1, 2**63 + 1, 10**17, 10**20])
def test_integers_beyond_what_llguidance_reads(number: int) -> None:
    """Some such integers would end the process; others would be rounded."""
    schemas: list[dict[str, Any]] = [
        {"const": number},
        {"enum": [number, [number]]},
        {"type": "integer", "minimum": number},
        {"type": "integer", "exclusiveMaximum": number, "minimum": number - 10},
        {"type": "integer", "not": {"const": number}},
    ]
    for schema in schemas:
        grammar = compiled(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for other in (number - 1, number, number + 1):
            taken = accepts(grammar, VOCABULARY, str(other).encode())
            assert taken == validator.is_valid(other), (schema, other)


@pytest.mark.parametrize(
    "keyword, value", [("$schema", 3), ("$schema", ["a"]), ("$id", {}), ("$id", 1)]
)
def test_identifiers_that_are_no_strings(keyword: str, value: Any) -> None:
    source = json.dumps({"properties": {"a": {keyword: value}}})
    with pytest.raises(InvalidConstraint, match=rf"#/properties/a/\{keyword}: "):
        COMPILER.compile(json_schema=source)
    with pytest.raises(InvalidConstraint, match=rf"#/\{keyword}: "):
        COMPILER.compile(json_schema=json.dumps({keyword: value}))
