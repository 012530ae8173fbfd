"""Bound of a number's digits: the same with every backend and for every kind of request."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.json_schema.json_text import EXPONENT_DIGITS, MAX_DIGITS
from rootlace.runtime.structured.json_schema.validate import digits_needed
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.random_model import accepts, byte_vocabulary

NUMBER = {"type": "number"}
OPEN = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}
CLOSED = {**OPEN, "additionalProperties": False}
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {
        "t": {
            "type": "object",
            "properties": {"x": NUMBER, "below": {"$ref": "#/$defs/t"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def tag_of(schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return {"structural_tag": {"type": "structural_tag", "format": tag}}


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "bare": ("%s", {"json_schema": NUMBER}),
    "closed": ('{"x":%s}', {"json_schema": CLOSED}),
    "open": ('{"x":%s}', {"json_schema": OPEN}),
    "undeclared": ('{"x":1,"y":%s}', {"json_schema": OPEN}),
    "anything": ("[[%s]]", {"json_schema": True}),
    "recursive": ('{"x":1,"below":{"x":%s}}', {"json_schema": TREE}),
    "array": ("[1,%s]", {"json_schema": {"type": "array", "items": NUMBER}}),
    "tuple": ("[1,%s]", {"json_schema": {"type": "array", "prefixItems": [NUMBER, NUMBER]}}),
    "union": ('{"x":%s}', {"json_schema": {"anyOf": [{"type": "null"}, OPEN]}}),
    "checked": ('{"x":%s}', {"json_schema": {**OPEN, "not": {"required": ["z"]}}}),
    "closed, in a tag": ('<a>{"x":%s}</a>', tag_of(CLOSED)),
    "open, in a tag": ('<a>{"x":%s}</a>', tag_of(OPEN)),
    "in a grammar": ('={"x":%s};', {"ebnf": f'start: "=" %json {json.dumps(CLOSED)} ";"'}),
}
MOST = "6" * MAX_DIGITS
TAKEN = [MOST, f"-{MOST}", f"0.{MOST}", f"{MOST}.{MOST}", "1e99", "1.5E-07", f"{MOST}.{MOST}e+99"]
REFUSED = [MOST + "6", f"-{MOST}6", f"0.{MOST}6", f"1.{MOST}6e1", "1e100", "1E-100"]


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return Vocabulary((demo_model / "tokenizer.json").read_text("utf-8"), 4096, [2])


@pytest.fixture(scope="module")
def compilers(vocabulary: Vocabulary) -> dict[str, GrammarCompiler]:
    return {
        backend: GrammarCompiler(vocabulary, config=ConstraintConfig(backend=backend))
        for backend in ("auto", "llguidance")
    }


@pytest.mark.parametrize("name", ROUTES)
def test_numbers_end_after_as_many_digits(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], name: str
) -> None:
    form, given = ROUTES[name]
    for backend, compiler in compilers.items():
        grammar = compiler.compile(**given)
        found = {t: accepts(grammar, vocabulary, (form % t).encode()) for t in TAKEN + REFUSED}
        assert found == {**dict.fromkeys(TAKEN, True), **dict.fromkeys(REFUSED, False)}, backend


@pytest.mark.parametrize("name", ROUTES)
def test_a_model_that_always_wants_a_digit_comes_to_an_end(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], name: str
) -> None:
    form, given = ROUTES[name]
    for wanted in (b"6", b"666", b".6", b"e6"):
        matcher = compilers["auto"].compile(**given).matcher()
        for token in vocabulary.bytewise(form.partition("%s")[0].encode() + b"6") or []:
            assert matcher.advance(token)
        text = b""
        order = [*vocabulary.order.beginning_with(wanted), *vocabulary.digits[1]]
        while len(text) < 400:
            mask = matcher.allowed_mask()
            token = next((token for token in order if mask[token]), None)
            if token is None:
                break
            assert matcher.advance(int(token))
            text += vocabulary.token_bytes[token]
        assert len(text) <= 2 * MAX_DIGITS + EXPONENT_DIGITS + 3
        assert np.flatnonzero(matcher.allowed_mask()).size, "the number cannot end"


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "const"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_that_a_schema_wants_longer(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], keyword: str, kind: str
) -> None:
    number = 10**25
    inner = {"type": kind, keyword: number}
    for form, schema in (
        ("%s", inner),
        ('{"x":%s}', {"type": "object", "properties": {"x": inner}}),
        ('{"x":%s}', {**CLOSED, "properties": {"x": inner}}),
    ):
        grammar = compilers["auto"].compile(json_schema=schema)
        for value in (number - 1, number, 2 * number):
            valid = value > number or (value == number and keyword != "exclusiveMinimum")
            valid = value == number if keyword == "const" else valid
            assert accepts(grammar, vocabulary, (form % value).encode()) == valid, (form, value)


def test_digits_that_a_schema_needs() -> None:
    usual = (MAX_DIGITS, EXPONENT_DIGITS)
    assert digits_needed({"type": "number", "minimum": -5, "maximum": 1e99}) == usual
    assert digits_needed({"maximum": -1e30}) == (31, EXPONENT_DIGITS)
    assert digits_needed({"properties": {"a": {"enum": ["x", [10**22]]}}}) == (23, EXPONENT_DIGITS)
    assert digits_needed({"exclusiveMaximum": 1e-25, "enum": [True]}) == (26, EXPONENT_DIGITS)
    assert digits_needed({"exclusiveMinimum": 10**20 - 1}) == (21, EXPONENT_DIGITS)
    assert digits_needed({"maximum": 10**400}) == (401, EXPONENT_DIGITS)
    remarks = {"default": 10**400, "examples": [1e300], "x-remark": 1e300}
    assert digits_needed({"properties": {"default": {"minimum": 10**25}}, **remarks}) == (26, 2)
    assert digits_needed([{"const": 1e300}]) == (301, 3)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_that_has_to_be_a_multiple_ends_as_one(kind: str) -> None:
    """If no multiple is left within the digits, some digits are taken back."""
    vocabulary = byte_vocabulary()
    number = {"type": kind, "minimum": 1, "multipleOf": 264}
    schema = {"type": "object", "properties": {"x": number}, "additionalProperties": number}
    wanted = [vocabulary.token_of(one.encode()) for one in "7139502468}</a>"]
    for given, before in (({"json_schema": schema}, b""), (tag_of(schema), b"<a>")):
        matcher = GrammarCompiler(vocabulary).compile(**given).matcher()
        text = vocabulary.bytewise(before + b'{"x":') or []
        assert all(map(matcher.advance, text))
        refused = 0
        for _ in range(600):
            mask = matcher.allowed_mask()
            assert mask.any(), "nothing is allowed"
            token = next((t for t in wanted if mask[t]), int(np.flatnonzero(mask)[0]))
            if matcher.advance(token):
                text.append(token)
                if matcher.is_finished():
                    break
            else:
                refused += 1
                undone = matcher.rollback_refused()
                assert undone is not None, matcher.error()
                del text[len(text) - undone :]
        assert refused and matcher.is_accepting()
        found = b"".join(vocabulary.token_bytes[token] for token in text).decode()
        jsonschema.validate(json.loads(found.removeprefix("<a>").removesuffix("</a>")), schema)
