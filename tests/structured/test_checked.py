"""Mask, verify, roll back: exact at every token, and convergent."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.structured.checked_backend import CheckedGrammar
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.canonical_tokens import encode
from tests.structured.random_model import RandomModel, accepts, byte_vocabulary

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2}
NOT_TWO_FOUR = {
    "type": "object",
    "properties": {"n": {"type": "integer", "not": {"multipleOf": 2}}, "t": {"type": "string"}},
    "required": ["n", "t"],
    "additionalProperties": False,
}
CONTAINS = {"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"type": "null"}}
SEVEN = {"type": "integer", "not": {"not": {"multipleOf": 7}}, "minimum": 1}
CHECKED: list[Any] = [
    UNIQUE,
    NOT_TWO_FOUR,
    CONTAINS,
    {
        "type": "string",
        "maxLength": 5,
        "oneOf": [{"pattern": "a"}, {"pattern": "b"}],
    },
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 3}}},
    {"type": "number", "not": {"type": "integer"}},
    {"type": "array", "uniqueItems": True, "items": {"type": "array", "maxItems": 2}},
    {"properties": {"a": {"not": {"pattern": "^x"}}}, "not": {"type": ["string", "number"]}},
    {"type": "object", "not": {"propertyNames": {"pattern": "^a"}}},
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return byte_vocabulary()


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, config=ConstraintConfig(backend="llguidance"))


def feed(matcher: Matcher, vocabulary: Vocabulary, text: bytes) -> None:
    for token in encode(vocabulary, text):
        assert matcher.advance(token), (text, matcher.error())


def first(vocabulary: Vocabulary, text: bytes) -> int:
    return encode(vocabulary, text)[0]


@pytest.mark.parametrize("schema", CHECKED, ids=lambda schema: json.dumps(schema)[:60])
def test_what_a_random_model_writes_is_valid(compiler: GrammarCompiler, schema: Any) -> None:
    grammar = compiler.compile(json_schema=schema)
    assert grammar.backend == "llguidance+checked"
    validator = jsonschema.Draft202012Validator(schema)
    written = 0
    for seed in range(6):
        generated = RandomModel(compiler.vocabulary, seed).generate(grammar)
        if generated.text is not None:
            validator.validate(json.loads(generated.text))
            written += 1
        else:
            assert generated.reason
    assert written >= 4


def test_masks_and_advance_agree_but_for_what_is_found_later(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    """A token outside the mask is refused without a way back; one in it is taken, or refused
    with one; the end is in the mask exactly where the text is complete."""
    for schema, text in ((UNIQUE, b"[1,12,3]"), (NOT_TWO_FOUR, b'{"n":5,"t":"x"}'), (SEVEN, b"77")):
        matcher = compiler.compile(json_schema=schema).matcher()
        for byte in [*encode(vocabulary, text), None]:
            mask = matcher.allowed_mask()
            (end,) = vocabulary.eos_token_ids
            assert mask[end] == matcher.is_accepting()
            for token in range(vocabulary.size):
                if matcher.advance(token):
                    assert mask[token]
                    matcher.rollback(1)
            if byte is not None:
                assert matcher.advance(byte)
        assert matcher.is_accepting()


def test_a_refused_token_changes_nothing_and_is_excluded_with_its_like(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    matcher = compiler.compile(json_schema=UNIQUE).matcher()
    feed(matcher, vocabulary, b"[5,5")
    before = matcher.allowed_mask()
    assert not matcher.advance(first(vocabulary, b"]"))
    assert "#/uniqueItems" in matcher.error()
    assert (matcher.allowed_mask() == before).all()
    assert matcher.rollback_refused() == 0
    after = matcher.allowed_mask()
    assert not after[first(vocabulary, b"]")]
    assert not after[first(vocabulary, b",")]  # the number would end there, too
    assert after[first(vocabulary, b"5")]
    feed(matcher, vocabulary, b"5]")
    assert matcher.is_accepting()


def test_exclusions_are_of_one_place(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    matcher = compiler.compile(json_schema=UNIQUE).matcher()
    comma = first(vocabulary, b",")
    feed(matcher, vocabulary, b"[5,5")
    assert not matcher.advance(comma)
    assert matcher.rollback_refused() == 0
    matcher.rollback(1)
    feed(matcher, vocabulary, b"6")
    assert matcher.allowed_mask()[comma]
    matcher.rollback(1)
    feed(matcher, vocabulary, b"5")
    assert not matcher.allowed_mask()[comma]
    assert not matcher.advance(comma)
    matcher.reset()
    feed(matcher, vocabulary, b"[5,5")
    assert matcher.allowed_mask()[comma]


def test_a_value_that_fails_again_and_again_is_begun_differently(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "not": {"pattern": "^x"}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    matcher = compiler.compile(json_schema=schema).matcher()
    feed(matcher, vocabulary, b'{"a":"x')
    quote = first(vocabulary, b'"')
    undone = []
    for _ in range(3):
        assert not matcher.advance(quote)
        assert "#/properties/a/not" in matcher.error()
        step = matcher.rollback_refused()
        assert step is not None
        undone.append(step)
        if step == 0:
            feed(matcher, vocabulary, b"y")
    assert undone[:2] == [0, 0]
    assert undone[2] == 3  # x, y, y: back behind the opening quote
    assert not matcher.allowed_mask()[first(vocabulary, b"x")]
    feed(matcher, vocabulary, b'z"}')
    assert matcher.is_accepting()


def test_the_tries_are_bounded_and_the_reason_is_said(vocabulary: Vocabulary) -> None:
    config = ConstraintConfig(backend="llguidance", max_retreats=5)
    compiler = GrammarCompiler(vocabulary, config=config)
    schema = {"type": "string", "allOf": [{"not": {"minLength": 1}}, {"not": {"pattern": "^$"}}]}
    grammar = compiler.compile(json_schema=schema)
    assert isinstance(grammar, CheckedGrammar)
    matcher = grammar.matcher()
    rollbacks = 0
    while True:
        allowed = np.flatnonzero(matcher.allowed_mask())
        if matcher.advance(int(allowed[0])):
            continue
        if matcher.rollback_refused() is None:
            break
        rollbacks += 1
    assert rollbacks <= 5
    assert "#/allOf/1/not" in matcher.error()
    assert "tries" in matcher.error()


def test_rollback_is_as_if_the_tokens_had_never_been(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    source = np.random.default_rng(3)
    for schema in CHECKED:
        grammar = compiler.compile(json_schema=schema)
        matcher = grammar.matcher()
        tokens: list[int] = []
        for _ in range(60):
            if tokens and source.random() < 0.3:
                count = int(source.integers(1, len(tokens) + 1))
                matcher.rollback(count)
                del tokens[len(tokens) - count :]
                fresh = grammar.matcher()
                assert all(map(fresh.advance, tokens))
                assert (fresh.allowed_mask() == matcher.allowed_mask()).all()
                assert fresh.is_accepting() == matcher.is_accepting()
                assert fresh.forced_text() == matcher.forced_text()
            allowed = np.flatnonzero(matcher.allowed_mask())
            if len(allowed) == 0:
                continue
            token = int(source.choice(allowed))
            if matcher.advance(token):
                tokens.append(token)
        matcher.reset()
        assert (matcher.allowed_mask() == grammar.matcher().allowed_mask()).all()
        with pytest.raises(ValueError):
            matcher.rollback(1)


def test_what_is_excluded_is_not_forced(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    schema = {"type": "array", "items": {"enum": ["ax", "ay"]}, "uniqueItems": True, "minItems": 2}
    matcher = compiler.compile(json_schema=schema).matcher()
    feed(matcher, vocabulary, b'["ax","a')
    assert matcher.advance(first(vocabulary, b"x"))
    assert matcher.forced_text() == b'"'
    assert not matcher.advance(first(vocabulary, b'"'))
    assert matcher.rollback_refused() == 1  # nothing but the quote can follow x
    assert not matcher.allowed_mask()[first(vocabulary, b"x")]
    feed(matcher, vocabulary, b'y"')
    assert matcher.forced_tokens() in ([], [first(vocabulary, b"]")])


def test_keys_come_once(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    grammar = compiler.compile(json_schema={"type": "object", "minProperties": 2})
    assert accepts(grammar, vocabulary, b'{"a":1,"b":1}')
    assert not accepts(grammar, vocabulary, b'{"a":1,"a":1}')
    matcher = grammar.matcher()
    feed(matcher, vocabulary, b'{"a":1,"a')
    assert not matcher.advance(first(vocabulary, b'"'))
    assert "twice" in matcher.error()


@pytest.mark.slow
def test_with_large_tokens(shared_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(shared_dir / "data/tokenizers/gpt2/tokenizer.json"),
        eos_token="<|endoftext|>",
    )
    compiler = GrammarCompiler(tokenizer, config=ConstraintConfig(backend="llguidance"))
    schemas = [UNIQUE, NOT_TWO_FOUR, {"type": "string", "not": {"maxLength": 4}, "maxLength": 9}]
    for seed, schema in enumerate(schemas):
        grammar = compiler.compile(json_schema=schema)
        generated = RandomModel(compiler.vocabulary, seed, patience=4).generate(grammar)
        assert generated.text is not None, generated.reason
        jsonschema.Draft202012Validator(schema).validate(json.loads(generated.text))
