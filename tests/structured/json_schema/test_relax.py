"""Masks of schemas: never too narrow, and too wide only where a residual says so."""

import calendar
import json
import random
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema import normal_form
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.runtime.structured.source import parsed_schema
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint
from tests.structured.json_schema import small_schemas
from tests.structured.random_model import accepts, byte_vocabulary


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), config=ConstraintConfig(backend="llguidance"))


@pytest.mark.slow
def test_agrees_with_jsonschema_on_small_schemas_and_values(compiler: GrammarCompiler) -> None:
    """Every value in every order of its keys: accepted only if valid, and then in some order."""
    counts = {"valid": 0, "invalid": 0, "exact": 0}
    for seed in range(150):
        source = random.Random(seed)
        schema = small_schemas.rooted(source)
        values = [small_schemas.value(source) for _ in range(20)]
        if not isinstance(schema, dict):
            continue
        validator = jsonschema.Draft202012Validator(schema)
        try:
            grammar = compiler.compile(json_schema=schema)
        except InvalidConstraint as error:
            assert "nothing satisfies" in str(error)
            assert not any(map(validator.is_valid, values)), schema
            continue
        counts["exact"] += grammar.backend == "llguidance"
        for value in values:
            taken = [
                accepts(grammar, compiler.vocabulary, _dumped(ordered))
                for ordered in small_schemas.orders(value)
            ]
            valid = validator.is_valid(value)
            counts["valid" if valid else "invalid"] += 1
            assert any(taken) == valid, (schema, value)
    assert counts["valid"] > 900
    assert counts["invalid"] > 450
    assert counts["exact"] > 60


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "integer", "not": {"const": 5}},
        {"type": "object", "not": {"required": ["a"]}},
        {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["v"]}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        {"properties": {"a": True, "b": True}, "minProperties": 1, "additionalProperties": False},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"type": "string", "format": "date-time"}},
        {"propertyNames": {"pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5}},
        {"propertyNames": {"format": "unheard-of", "maxLength": 3}},
        {"properties": {"a": {"type": "string", "format": "uuid", "maxLength": 20}}},
        {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^a$", "minLength": 2}]},
        {"enum": [1, "a", [2]], "not": {"type": "string"}},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 1, "uniqueItems": True},
    ],
    ids=json.dumps,
)
def test_what_a_mask_can_hold_has_no_residuals(schema: Any) -> None:
    assert PreparedSchema(schema).residuals == ()


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems", "uniqueItems"),
        ({"items": {"contains": {"const": 1}}}, "#/items/contains", "contains"),
        ({"type": "string", "not": {"pattern": "a"}}, "#/not/pattern", "pattern"),
        ({"type": "number", "multipleOf": 0.01}, "#/multipleOf", "multipleOf"),
    ],
    ids=str,
)
def test_strict_names_what_no_mask_holds(schema: Any, pointer: str, keyword: str) -> None:
    prepared = PreparedSchema(schema)
    assert [(note.pointer, note.keyword) for note in prepared.residuals] == [(pointer, keyword)]
    assert prepared.verifier_factory is not None
    with pytest.raises(InvalidConstraint, match=f"json_schema: {pointer}: .*'{keyword}'"):
        prepared.refuse_residuals("here (strict)")


def test_keys_that_may_match_several_patterns(compiler: GrammarCompiler) -> None:
    schema = {"patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 3}}}
    schema |= {"type": "object", "additionalProperties": False}
    grammar = compiler.compile(json_schema=schema)
    validator = jsonschema.Draft202012Validator(schema)
    for value in ({"ax": 4}, {"xb": 3}, {"ab": 2}, {"ax": "4"}, {"ab": 4}, {"x": 1}):
        taken = accepts(grammar, compiler.vocabulary, _dumped(value))
        assert taken == validator.is_valid(value), value


@pytest.mark.parametrize("negated", [{"const": {}}, {"maxProperties": 20}], ids=str)
def test_strict_names_the_users_own_keyword(negated: Any) -> None:
    """Too many cases for the mask to tell apart."""
    properties = {f"p{number}": True for number in range(30)}
    keyword = next(iter(negated))
    with pytest.raises(InvalidConstraint) as caught:
        schema = {"type": "object", "properties": properties, "not": negated}
        PreparedSchema(schema).refuse_residuals("here (strict)")
    assert str(caught.value).startswith(
        f"json_schema: #/not/{keyword}: no mask can hold '{keyword}'"
    )


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 4}, "#"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#/minLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "#/minItems"),
        ({"type": "object", "minProperties": 3, "maxProperties": 2}, "#/maxProperties"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#/allOf/1/type"),
        ({"enum": [1, 2], "type": "string"}, "#/enum"),
        ({"const": "a", "maxLength": 0}, "#/const"),
        ({"type": "string", "format": "uuid", "maxLength": 20}, "#/format"),
        ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "^b"}]}, "#/pattern"),
        ({"type": "string", "format": "date", "allOf": [{"format": "email"}]}, "#/format"),
        (
            {
                "type": "array",
                "items": {"type": "string", "pattern": "^a$", "minLength": 2},
                "minItems": 1,
            },
            "#/minItems",
        ),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}},
            "#/properties/a/enum",
        ),
        # findings/smolagents_mcp_unions_are_texts.sh
        (
            {
                "type": "object",
                "required": ["a", "b"],
                "properties": {
                    "a": {},
                    "b": {"oneOf": [{"type": "integer"}, {"type": "boolean"}], "type": "string"},
                },
            },
            "#/properties/b/oneOf/0/type",
        ),
        (
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {
                    "b": {
                        "type": "object",
                        "required": ["c"],
                        "properties": {"c": {"enum": [1, 2], "type": "string"}},
                    }
                },
            },
            "#/$defs/b/properties/c/enum",
        ),
        ({"type": "array", "prefixItems": [True, False], "minItems": 2}, "#/minItems"),
        ({"anyOf": [{"type": "null", "const": 1}, False]}, "#/anyOf/0"),
        ({"not": {}}, "#/not"),
        ({"type": "string", "not": {"type": "string"}}, "#/not/type"),
        ({"type": "object", "required": ["a"], "not": {"required": ["a"]}}, "#/not/required"),
        ({"type": "string", "pattern": "^a+$", "not": {"pattern": "^a+$"}}, "#/not/pattern"),
        ({"pattern": "^a", "not": {"pattern": "^a"}}, "#/not/pattern"),  # numbers match all
        ({"type": "integer", "multipleOf": 4, "not": {"multipleOf": 2}}, "#/not/multipleOf"),
        ({"type": "string", "maxLength": 0, "not": {"const": ""}}, "#/not/const"),
        ({"type": "array", "maxItems": 0, "not": {"enum": [[], 1]}}, "#/not/enum"),
        ({"type": "object", "maxProperties": 0, "not": {"const": {}}}, "#/maxProperties"),
        ({"properties": {"a!b": False}, "type": "object", "required": ["a!b"]}, "#/properties/a!b"),
        ({"type": "object", "propertyNames": False, "required": ["b"]}, "#/propertyNames"),
        (
            {"type": "object", "propertyNames": {"pattern": "^a"}, "required": ["b"]},
            "#/propertyNames",
        ),
        (
            {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 1}, "required": [""]},
            "#/propertyNames",
        ),
        *(
            ({"type": "object", "propertyNames": names, "minProperties": 1}, "#/minProperties")
            for names in (
                {"not": {}},
                {"minLength": 5, "maxLength": 3},
                {"pattern": "^.$", "minLength": 2},
                {"allOf": [{"const": "a"}, {"const": "b"}]},
                {"type": ["null", "string"], "not": {"type": "string"}},
            )
        ),
        (
            {
                "allOf": [
                    {"type": "object", "propertyNames": {"pattern": "^a$"}},
                    {"propertyNames": {"$ref": "#/$defs/long"}, "minProperties": 1},
                ],
                "$defs": {"long": {"minLength": 2}},
            },
            "#/allOf/1/minProperties",
        ),
        ({"$ref": "#/$defs/no", "$defs": {"no": False}}, "#/$defs/no"),
    ],
    ids=str,
)
def test_what_nothing_satisfies_is_refused(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidConstraint, match="nothing satisfies") as caught:
        PreparedSchema(schema)
    assert str(caught.value).startswith(f"json_schema: {pointer}")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 1}},
        {"type": "object", "propertyNames": {"not": {}}, "properties": {"a": {"type": "null"}}},
        {"type": ["string", "array", "object"], "not": {"enum": ["", [], {}]}},
        {"type": "object", "properties": {"a": True}, "not": {"const": {}}},
        {"type": "integer", "multipleOf": 2, "not": {"multipleOf": 4}},
        {"type": "string", "pattern": "^a", "not": {"pattern": "^ab"}},
        {"anyOf": [{"pattern": "^a"}, {"const": ""}], "not": {"pattern": "^a"}},
        {"type": "array", "uniqueItems": True, "not": {"uniqueItems": True, "minItems": 1}},
    ],
    ids=str,
)
def test_what_looks_like_a_contradiction(compiler: GrammarCompiler, schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compiler.compile(json_schema=schema)
    values = ["", "a", "ab", "ac", 1, 2, 4, 6, [], [1], {}, {"a": None}, {"b": 1}, {"a": 1, "b": 2}]
    for value in values:
        taken = accepts(grammar, compiler.vocabulary, _dumped(value))
        assert taken == validator.is_valid(value), value
    assert any(map(validator.is_valid, values))


ENDLESS = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/endless"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/endless"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {"prefixItems": [True, {"$ref": "#"}], "minItems": 2, "type": "array"},
        {
            "anyOf": [
                {"$ref": "#/$defs/endless"},
                {"type": "array", "minItems": 2, "items": {"$ref": "#"}},
            ]
        },
    ],
    ids=str,
)
def test_a_schema_of_values_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidConstraint, match=r"#: nothing satisfies .* without end"):
        PreparedSchema({**schema, "$defs": {"endless": ENDLESS}})


def test_definitions_in_any_order_are_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each needs the one before: none is known to have an end until that one is."""
    looked = 0

    def counted(*arguments: Any) -> bool:
        nonlocal looked
        looked += 1
        return may_end(*arguments)

    may_end = normal_form._may_end
    monkeypatch.setattr(normal_form, "_may_end", counted)
    count = 600
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(count)},
        "$defs": {
            f"d{i}": {**ENDLESS, "items": {"$ref": f"#/$defs/d{i - 1}"}} for i in range(1, count)
        }
        | {"d0": {"type": "null"}},
    }
    assert PreparedSchema(schema).mask_schema
    assert looked <= 4 * count


RECURSIVE = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
NESTED = {"type": ["object", "null"], "properties": {"a": {"$ref": "#/properties/a"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#/$defs/endless"}, {"type": "null"}]},
        {"type": ["object", "array"], "properties": {"a": {"$ref": "#/$defs/endless"}}},
        {"type": "array", "items": {"$ref": "#/$defs/endless"}},
        {"type": "array", "prefixItems": [True], "items": {"$ref": "#/$defs/endless"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/endless"}},
        {"not": {"$ref": "#/$defs/endless"}, "type": "array", "items": {"type": "null"}},
        {"type": "object", "patternProperties": {"^a": RECURSIVE}, "properties": {"a": True}},
        {
            "type": "object",
            "patternProperties": {"^a": RECURSIVE},
            "properties": {"a": True},
            "required": ["a"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"a": NESTED},
            "patternProperties": {"a": {"anyOf": [NESTED, {"type": "null"}]}},
        },
        {
            "type": "object",
            "properties": {"a": {"patternProperties": {"a": {"type": "null"}}}},
            "patternProperties": {"^a": {"patternProperties": {"^a": {"enum": [None, "x"]}}}},
            "additionalProperties": {"type": "object"},
        },
    ],
    ids=str,
)
def test_recursive_schemas_and_keys_by_name_and_pattern_have_their_finite_values(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    schema = {**schema, "$defs": {"endless": ENDLESS}}
    grammar = compiler.compile(json_schema=schema)
    validator = jsonschema.Draft202012Validator(schema)
    simple: list[Any] = [None, 1, [], {}]
    keyed = [{key: one} for key in ("a", "ab", "b") for one in simple]
    values = [*simple, *([one] for one in simple), *keyed, [None, None], {"a": {"a": None}}]
    values += [{"a": None, "ab": one} for one in [*simple, {"a": None}]]
    verdicts = {validator.is_valid(value) for value in values}
    for value in values:
        taken = accepts(grammar, compiler.vocabulary, _dumped(value))
        assert taken == validator.is_valid(value), value
    assert verdicts == {True, False}


@pytest.mark.parametrize("draft", ["04", "06", "07"])
def test_older_drafts_mean_what_they_meant(compiler: GrammarCompiler, draft: str) -> None:
    schema: dict[str, Any] = {
        "$schema": f"http://json-schema.org/draft-{draft}/schema#",
        "type": "array",
        "items": [{"type": "integer", "minimum": 3}, {"$ref": "#/definitions/s", "type": "null"}],
        "additionalItems": False,
        "definitions": {"s": {"type": "object", "dependencies": {"a": ["b"]}}},
    }
    if draft == "04":
        schema["items"][0]["exclusiveMinimum"] = True
    validator = jsonschema.validators.validator_for(schema)(schema)
    grammar = compiler.compile(json_schema=schema)
    for value in ([3], [4], [4, None], [4, {}], [4, {"a": 1}], [4, {"a": 1, "b": 2}], [4, {}, 1]):
        taken = accepts(grammar, compiler.vocabulary, _dumped(value))
        assert taken == validator.is_valid(value), value


def test_hostile_schemas_end_soon_and_cleanly() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidConstraint, match="nested more than"):
        PreparedSchema(deep)
    with pytest.raises(InvalidConstraint):
        parsed_schema('{"items":' * 100_000 + "{}" + "}" * 100_000)
    twisted = {f"d{i}": {"items": {"allOf": _two(i, 40)}} for i in range(40)}
    PreparedSchema({"$defs": twisted, "$ref": "#/$defs/d0"})
    wide = {f"k{i}": {"type": "string", "maxLength": i % 50} for i in range(3000)}
    assert PreparedSchema({"type": "object", "properties": wide}).residuals == ()
    choices = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]
    assert PreparedSchema({"allOf": choices}).residuals
    many = {"enum": [f"value {i}" for i in range(20_000)], "minLength": 3}
    assert PreparedSchema(many).residuals == ()


def _two(index: int, count: int) -> list[dict[str, str]]:
    return [{"$ref": f"#/$defs/d{(index + 1) % count}"}, {"$ref": f"#/$defs/d{index * 3 % count}"}]


@pytest.mark.parametrize(
    ("schema", "backend"),
    [
        ({"type": "string", "format": "date"}, "automaton"),
        ({"format": "date"}, "llguidance"),  # any other value as well: no finite automaton
        ({"type": ["array", "string"], "items": {"$ref": "#"}, "format": "date"}, "llguidance"),
    ],
)
def test_leap_days_whoever_holds_the_mask(schema: Any, backend: str) -> None:
    vocabulary = byte_vocabulary()
    grammar = GrammarCompiler(vocabulary).compile(Constraint("json_schema", json.dumps(schema)))
    assert grammar.backend == backend
    for year in (1900, 2000, 2021, 2023, 2024, 2100, 2400):
        text = json.dumps(f"{year}-02-29").encode()
        assert accepts(grammar, vocabulary, text) == calendar.isleap(year), year


@pytest.mark.parametrize(
    "schema",
    [
        {"if": {"prefixItems": [{"const": "a"}]}},
        {"if": {"prefixItems": [{"const": "a"}]}, "then": True},
        {"anyOf": [{"prefixItems": [{"const": "a"}]}, True]},
        {"contains": {"const": "a"}},
        {"allOf": [{"prefixItems": [{"const": "a"}]}]},
    ],
    ids=json.dumps,
)
def test_items_that_an_alternative_evaluates(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    schema = {"type": "array", "minItems": 1, "unevaluatedItems": False, **schema}
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compiler.compile(json_schema=schema)
    for value in ([], ["a"], ["b"], ["a", "a"], ["a", "b"], ["a", "a", "a"]):
        taken = accepts(grammar, compiler.vocabulary, _dumped(value))
        assert taken == validator.is_valid(value), value


MANY = {"type": "integer"}


@pytest.mark.parametrize(
    "wide, said",
    [
        ({f"p{i}": {"type": "integer"} for i in range(1_400)}, "1400 properties here.*1200"),
        ({f"p{i}": {} for i in range(3_000)}, "3000 properties here.*1200"),
        pytest.param(
            {f"p{i}": {"properties": {f"q{j}": MANY for j in range(110)}} for i in range(130)},
            "130 properties here, 14433 schemas in all.*schema too large",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["integers", "anything", "together"],
)
def test_a_schema_that_no_mask_holds_is_refused(
    compiler: GrammarCompiler, wide: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names its place and size; no weaker schema is served."""
    monkeypatch.setattr(normal_form, "MAX_PROPERTIES", 1_200)
    schema = {"properties": {"rows": {"items": {"properties": wide, "required": list(wide)}}}}
    place = "json_schema: #/properties/rows/items"
    with pytest.raises(InvalidConstraint, match=f"{place}: .*{said}"):
        compiler.compile(json_schema=schema)
