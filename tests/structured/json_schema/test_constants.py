"""Constants keep their spelling, with every backend and for every kind of request."""

import itertools
import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.checked_backend import CheckedGrammar
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.runtime.structured.json_schema.writers import MOST_RULES, lark_of
from rootlace.runtime.structured.llguidance_backend import HybridGrammar
from rootlace.runtime.structured.regex.syntax import BLANK
from rootlace.wire.errors import InvalidConstraint
from tests.structured.json_schema import small_schemas
from tests.structured.random_model import RandomModel, accepts, byte_vocabulary
from tests.structured.test_digits import tag_of

VALUES: list[Any] = [
    0.0, 0.5, 1.0, -0.0, 1e21, 1e-7, 1.5e300, 5e-324, 12345678901234567890.0, 0.1 + 0.2, 7, None,
    "a", "é", "x\x7fy", "\x01", "\n", 'q"\\', [1.0, [2.50]], {"k": 1e3, "\x7f": []}, [], {},
]  # fmt: skip
NEAR = [
    "0", "1", "-0", "0.50", "1.00", "1e21", "0.0000001", "7.0", "2", "nil", '"\\u0061"',
    "[1,[2.5]]",
]  # fmt: skip
CONSTANT = {"enum": VALUES}
OBJECT = {"type": "object", "properties": {"x": CONSTANT}, "required": ["x"]}
CLOSED = {**OBJECT, "additionalProperties": False}
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {"t": {**CLOSED, "properties": {"x": CONSTANT, "t": {"$ref": "#/$defs/t"}}}},
}
NUMBERS = {"n": {"type": "number", "minimum": 0, "exclusiveMaximum": 1.55}, "s": {"format": "date"}}
HALVES = {"type": "number", "multipleOf": 0.5}
LONG = {"type": "string", "maxLength": 9000}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "bare": ("%s", {"json_schema": CONSTANT}),
    "closed": ('{"x":%s}', {"json_schema": CLOSED}),
    "open": ('{"x":%s}', {"json_schema": OBJECT}),
    "open, another key behind": ('{"x":%s,"xy":{"x":2.00}}', {"json_schema": OBJECT}),
    "optional, before others": (
        '{"x":%s,"n":1.5,"z":[]}',
        {"json_schema": {"type": "object", "properties": {"x": CONSTANT, **NUMBERS}}},
    ),
    "of any key": (
        '{"b":1,"x":%s}',
        {
            "json_schema": {
                "type": "object",
                "properties": {"b": {}},
                "additionalProperties": CONSTANT,
            }
        },
    ),
    "of a pattern": (
        '{"ab":%s,"b":2}',
        {"json_schema": {"type": "object", "patternProperties": {"^a": CONSTANT}}},
    ),
    "array": ("[7,%s]", {"json_schema": {"type": "array", "items": CONSTANT, "minItems": 2}}),
    "tuple": (
        "[%s,1,{}]",
        {
            "json_schema": {
                "type": "array",
                "prefixItems": [CONSTANT, {"type": "integer"}],
                "minItems": 1,
            }
        },
    ),
    "union": ('{"x":%s}', {"json_schema": {"anyOf": [{"type": "boolean"}, OBJECT]}}),
    "recursive": ('{"x":7,"t":{"x":%s}}', {"json_schema": TREE}),
    "checked": ('{"x":%s,"y":2}', {"json_schema": {**OBJECT, "not": {"required": ["z"]}}}),
    "beside multiples of a fraction": (
        '{"x":%s,"n":1.5}',
        {"json_schema": {**OBJECT, "properties": {"x": CONSTANT, "n": HALVES}}},
    ),
    "beside a long string": (
        '{"x":%s,"n":"q"}',
        {"json_schema": {**OBJECT, "properties": {"x": CONSTANT, "n": LONG}}},
    ),
    "of so many properties": (
        '{"x":%s,"y":2}',
        {"json_schema": {**OBJECT, "minProperties": 2, "maxProperties": 3}},
    ),
    "in a tag": ('<a>{"x":%s}</a>', tag_of(OBJECT)),
    "closed, in a tag": ('<a>{"x":%s}</a>', tag_of(CLOSED)),
    "in a grammar": ('={"x":%s};', {"ebnf": f'start: "=" %json {json.dumps(OBJECT)} ";"'}),
}
VOCABULARY = byte_vocabulary()
COMPILERS = {
    backend: GrammarCompiler(VOCABULARY, config=ConstraintConfig(backend=backend))
    for backend in ("auto", "llguidance")
}


def written(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("name", ROUTES)
def test_all_routes_write_a_constant_as_it_is(name: str, backend: str) -> None:
    form, given = ROUTES[name]
    for whitespace, separators in (("flexible", None), ("compact", (",", ":"))):
        grammar = COMPILERS[backend].compile(**given, whitespace=whitespace)
        texts = {written(value, separators=separators): True for value in VALUES}
        texts |= dict.fromkeys(NEAR, False)
        found = {t: accepts(grammar, VOCABULARY, (form % t).encode()) for t in texts}
        assert found == texts
        inner = grammar.inner if isinstance(grammar, CheckedGrammar) else grammar
        assert not isinstance(inner, HybridGrammar) or inner.trusted


@pytest.mark.parametrize("name", ["open", "optional, before others", "recursive", "tuple", "union"])
def test_what_comes_of_it_is_one_of_them(name: str) -> None:
    _, given = ROUTES[name]
    grammar = COMPILERS["auto"].compile(**given)
    ended = 0
    for seed in range(12):
        text = RandomModel(VOCABULARY, seed).generate(grammar).text
        if text is not None:
            ended += 1
            value = json.loads(text)
            if isinstance(value, dict) and "x" in value:
                assert value["x"] in VALUES, text
    assert ended > 6
    inner = grammar.inner if isinstance(grammar, CheckedGrammar) else grammar
    assert isinstance(inner, HybridGrammar) and inner.trusted


def halves(schema: Any, within: bool = False) -> Any:
    """Return the schema with the whole numbers among its constants increased by a half."""
    if isinstance(schema, dict):
        return {k: halves(v, within or k in ("const", "enum")) for k, v in schema.items()}
    if isinstance(schema, list):
        return [halves(item, within) for item in schema]
    return schema + 0.5 if within and type(schema) is int else schema


@pytest.mark.slow
def test_agrees_with_jsonschema_where_constants_are_rules_of_our_own() -> None:
    count: Counter[bool] = Counter()
    for seed in range(1000, 1200):
        source = random.Random(seed)
        schema = halves(small_schemas.rooted(source))
        try:
            grammar = COMPILERS["auto"].compile(json_schema=schema, whitespace="compact")
            mask = PreparedSchema(schema).mask_schema
        except InvalidConstraint:
            continue
        if lark_of(mask, BLANK) is None:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for number in range(20):
            value = halves(small_schemas.value(source), within=number % 2 == 0)
            orders = small_schemas.orders(value)
            texts = [written(one, separators=(",", ":")).encode() for one in orders]
            valid = validator.is_valid(value)
            count[valid] += 1
            assert any(accepts(grammar, VOCABULARY, t) for t in texts) == valid, (schema, value)
        inner = grammar.inner if isinstance(grammar, CheckedGrammar) else grammar
        assert not isinstance(inner, HybridGrammar) or inner.trusted
    assert min(count.values()) > 100


@pytest.mark.parametrize("least", [0, 1, 60])
def test_long_tuples_with_a_constant_of_our_own(least: int) -> None:
    items = [{"const": 0.5}, *[{"type": "integer"}] * 60]
    tuples = {"type": "array", "prefixItems": items, "items": False, "minItems": least}
    # Open, so that no automaton holds it.
    schema = {"type": "object", "properties": {"t": tuples}, "required": ["t"]}
    grammar = COMPILERS["llguidance"].compile(json_schema=schema)
    for count in (0, 1, 2, 59, 60, 61, 62):
        value = {"t": [0.5, *range(60), 7][:count]}
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert accepts(grammar, VOCABULARY, written(value).encode()) == valid, count


@pytest.mark.parametrize("given", ["json_schema", "ebnf"])
@pytest.mark.parametrize("count", [28, 29, 150])
def test_tuples_may_end_behind_each_of_many_items(given: str, count: int) -> None:
    items = [{"type": "number"}, {"enum": [1.0]}, *[{"type": "integer"}] * (count - 2)]
    schema = {"type": "array", "prefixItems": items, "items": False}
    source: Any = schema if given == "json_schema" else f"start: %json {json.dumps(schema)}"
    grammar = COMPILERS["llguidance"].compile(**{given: source})
    for length in (0, 1, 2, count - 1, count, count + 1):
        for one in (1.0, 1):
            value = [2, one, *range(count)][:length]
            fits = length <= count and (length < 2 or type(one) is float)
            assert accepts(grammar, VOCABULARY, written(value).encode()) == fits, (length, one)


def test_many_items_are_counted_by_rules_of_our_own() -> None:
    schema = {"type": "array", "items": {"enum": [1.0]}, "maxItems": 9000}
    grammar = COMPILERS["llguidance"].compile(json_schema=schema)
    assert accepts(grammar, VOCABULARY, b"[1.0, 1.0]") and not accepts(grammar, VOCABULARY, b"[1]")


def test_a_schema_of_too_many_rules_is_written_by_llguidance() -> None:
    """Rules within rules take room on the stack."""
    many = {f"p{number}": {"type": "integer"} for number in range(MOST_RULES)}
    for others, ours in (({}, True), (many, False)):
        schema = {"type": "object", "properties": {"x": {"const": 0.5}, **others}}
        assert (lark_of(PreparedSchema(schema).mask_schema, BLANK) is not None) is ours


@pytest.mark.parametrize("others", [False, True, {"enum": [0.5]}])
def test_a_number_of_properties_with_a_constant_of_our_own(others: Any) -> None:
    """Every object of up to four keys, against jsonschema; named keys come in their order."""
    texts = {}
    for keys in itertools.chain.from_iterable(itertools.combinations("abyz", n) for n in range(5)):
        value = dict.fromkeys(keys, 0.5)
        texts[json.dumps(value)] = value
    for required, least, most in itertools.product(
        ([], ["a"], ["b"], ["a", "b"]), (None, 0, 1, 2, 3), (None, 1, 2, 3)
    ):
        schema = {
            "type": "object",
            "properties": {key: {"enum": [0.5]} for key in "ab"},
            "required": required,
            "additionalProperties": others,
        }
        bounds = {"minProperties": least, "maxProperties": most}
        schema |= {key: bound for key, bound in bounds.items() if bound is not None}
        valid = jsonschema.Draft202012Validator(schema).is_valid
        expected = {text: valid(value) for text, value in texts.items()}
        if not any(expected.values()):
            continue
        grammar = COMPILERS["llguidance"].compile(json_schema=schema)
        found = {text: accepts(grammar, VOCABULARY, text.encode()) for text in texts}
        assert found == expected, schema
