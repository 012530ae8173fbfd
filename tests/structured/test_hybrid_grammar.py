"""Masks that an automaton's states remember are llguidance's, at every place of random texts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.contracts.plan import MaskRow
from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.runtime.structured.checked_backend import CheckedGrammar
from rootlace.runtime.structured.dfa_backend import DfaMatcher
from rootlace.runtime.structured.json_schema.json_text import gap_of
from rootlace.runtime.structured.json_schema.writers import MARK, declared_part
from rootlace.runtime.structured.llguidance_backend import HybridGrammar, LLGuidanceGrammar
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.random_schemas import random_schema


def _declared(matcher: DfaMatcher) -> bool:
    """Whether the automaton knows where the text stands."""
    return matcher.place.number >= 0


GAP = gap_of(flexible=True)
NAME = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 120}
SCHEMAS: dict[str, Any] = {
    "required": {"type": "object", "properties": {"name": NAME, "age": COUNT}, "required": ["age"]},
    "optional": {"type": "object", "properties": {"name": NAME, "named": COUNT, "x": {}}},
    "prefixes": {
        "type": "object",
        "properties": {"ab": COUNT, "abc": {"type": "integer", "maximum": -3}, "b": {"const": "é"}},
        "additionalProperties": {"type": "string"},
    },
    "nested": {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"type": "object", "properties": {"k": COUNT}}},
            'a"b\\': {"type": ["string", "null"]},
        },
        "required": ["list"],
    },
    "values with control characters": {
        "type": "object",
        "properties": {"n": {"enum": ["x\ny", "\x0b", "z\\n"]}, "k": COUNT, "a": {}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "open, with control characters": {
        "type": "object",
        "properties": {"n": {"const": "x\ny"}, "m": {"const": "\x01"}, "a": {"type": "object"}},
    },
    "patterns": {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": "^[A-Z][a-z]{1,3} [0-9]+$"}},
        "patternProperties": {"^x-": {"type": "boolean"}},
        "required": ["id"],
    },
    "recursive": {
        "type": "object",
        "properties": {"value": {"type": "number"}, "next": {"$ref": "#"}},
        "required": ["value"],
        "additionalProperties": False,
    },
    "anything else": {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 4}}},
    "keys that share bytes of a character": {
        "type": "object",
        "properties": {"имя": COUNT, "имущество": {}, "é": NAME, "": COUNT},
    },
    "keys that patterns refuse": {
        "type": "object",
        "properties": {"foo": NAME, "bar": COUNT, "x": {}},
        "patternProperties": {"^bar": NAME, "^fo+$": False, "é": {}},
        "additionalProperties": False,
    },
    "a key declared in one case only": {
        "type": "object",
        "dependentSchemas": {"bar": {"properties": {"foo": COUNT, "bar": COUNT}}},
    },
    "a value that another case leaves open": {
        "type": "object",
        "if": {"properties": {"foo": {"const": "then"}}, "required": ["foo"]},
        "then": {"properties": {"bar": NAME}, "required": ["bar"]},
        "else": {"properties": {"baz": NAME}, "required": ["baz"]},
    },
    "numbers as constants": {
        "type": "object",
        "properties": {"x": {"enum": [0.0, 0.5, 1.0, 1e21, "a"]}, "y": {"const": 2.5}},
        "required": ["x"],
    },
    "alternatives": {
        "type": "object",
        "properties": {
            "v": {"anyOf": [{"type": "array"}, {"enum": ["on", "off"]}, {"type": "integer"}]},
            "w": {"type": "array", "prefixItems": [NAME, COUNT], "minItems": 1},
        },
        "required": ["v"],
    },
}


@pytest.fixture(scope="module")
def compilers(demo_model: Path) -> tuple[GrammarCompiler, GrammarCompiler]:
    """Ours, and llguidance alone."""
    alone = ConstraintConfig(backend="llguidance")
    tokenizer = (demo_model / "tokenizer.json").read_text("utf-8")
    ours = GrammarCompiler(Vocabulary(tokenizer, 4096, [2]))
    return ours, GrammarCompiler(ours.vocabulary, config=alone)


def mask_of(grammar: Grammar) -> Grammar:
    """Return the grammar without its check of distinct keys."""
    return grammar.inner if isinstance(grammar, CheckedGrammar) else grammar


def hybrid(grammar: Grammar) -> HybridGrammar:
    found = mask_of(grammar)
    assert isinstance(found, HybridGrammar)
    return found


class Walker:
    """Walks two matchers over the same random texts."""

    def __init__(self, vocabulary: Any, seed: int) -> None:
        self._bytes = vocabulary.token_bytes
        self._random = np.random.default_rng(seed)
        self.left = 0
        """Count of tokens that left the declared part."""

    def walk(self, ours: Matcher, other: Matcher, steps: int) -> None:
        random = self._random
        for _ in range(steps):
            allowed = ours.allowed_mask()
            np.testing.assert_array_equal(allowed, other.allowed_mask())
            assert ours.is_accepting() == other.is_accepting()
            assert ours.is_finished() == other.is_finished()
            assert ours.forced_text() == other.forced_text()
            if random.random() < 0.4:
                assert ours.forced_tokens() == other.forced_tokens()
            ids = np.flatnonzero(allowed)
            if not len(ids):
                return
            refused = int(random.choice(np.flatnonzero(~allowed)))
            assert not ours.advance(refused) and not other.advance(refused)
            assert ours.error() == other.error()
            token = self._choice(ids)
            inside = isinstance(ours, DfaMatcher) and _declared(ours)
            assert ours.advance(token) and other.advance(token)
            self.left += inside and isinstance(ours, DfaMatcher) and not _declared(ours)
            if random.random() < 0.1:
                count = int(random.integers(0, 4))
                for matcher in (ours, other):
                    matcher.reset() if count == 3 else matcher.rollback(min(count, 1))

    def _choice(self, ids: np.ndarray) -> int:
        """Choose mostly characters of JSON, so that texts get far."""
        structure = [i for i in ids.tolist() if self._bytes[i][:1] in b'",:}]{[012-']
        likely = structure if structure and self._random.random() < 0.7 else ids
        return int(self._random.choice(likely))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_llguidances(
    compilers: tuple[GrammarCompiler, GrammarCompiler], name: str
) -> None:
    ours, alone = (mask_of(c.compile(json_schema=json.dumps(SCHEMAS[name]))) for c in compilers)
    grammar = hybrid(ours)
    walker = Walker(grammar.vocabulary, 7)
    for _ in range(15):
        walker.walk(ours.matcher(), alone.matcher(), 40)
    assert grammar.trusted
    assert walker.left
    assert any(state.after for state in grammar.states._states.values()), "nothing was remembered"


@pytest.mark.slow
def test_masks_of_random_schemas_are_llguidances(
    compilers: tuple[GrammarCompiler, GrammarCompiler],
) -> None:
    found = 0
    for seed in range(40):
        schema = opened(random_schema(seed), random.Random(seed))
        ours, alone = (mask_of(c.compile(json_schema=json.dumps(schema))) for c in compilers)
        inner, other = getattr(ours, "_inner", ours), getattr(alone, "_inner", alone)
        if isinstance(inner, HybridGrammar):
            found += 1
            walker = Walker(inner.vocabulary, seed)
            for _ in range(3):
                walker.walk(inner.matcher(), other.matcher(), 30)
            assert inner.trusted, schema
    assert found > 15


def opened(schema: Any, source: random.Random) -> Any:
    """Without most `additionalProperties: false`."""
    if isinstance(schema, list):
        return [opened(item, source) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: opened(value, source)
        for key, value in schema.items()
        if key != "additionalProperties" or value is not False or source.random() < 0.2
    }


@pytest.mark.parametrize("name", SCHEMAS)
def test_tokens_taken_in_at_once_are_those_of_llguidance_also_taken_back(
    compilers: tuple[GrammarCompiler, GrammarCompiler], name: str
) -> None:
    """The first walks leave ways behind; the others go them at once, over the border and back."""
    ours, alone = (mask_of(c.compile(json_schema=json.dumps(SCHEMAS[name]))) for c in compilers)
    pick = random.Random(3)
    at_once = crossed = 0
    texts = [text_of(alone, pick) for _ in range(6)]
    for text in texts * 2:
        matcher, other = ours.matcher(), alone.matcher()
        assert isinstance(matcher, DfaMatcher)
        done = 0
        while done < len(text):
            token = text[done]
            at_once += token in matcher.place.after
            assert matcher.advance(token) and other.advance(token)
            assert not (matcher.place.unfinished and other.is_finished())
            assert not (matcher.place.unforced and other.forced_tokens())
            done += 1
            if pick.random() < 0.15:
                back = pick.randint(1, min(done, 6))
                here = _declared(matcher)
                matcher.rollback(back)
                other.rollback(back)
                crossed += _declared(matcher) and not here
                done -= back
            if pick.random() < 0.3:
                np.testing.assert_array_equal(matcher.allowed_mask(), other.allowed_mask())
                assert matcher.forced_tokens() == other.forced_tokens()
                assert matcher.is_finished() == other.is_finished()
                assert matcher.is_accepting() == other.is_accepting()
    assert at_once
    assert crossed or name in ("recursive", "anything else"), "the border was not crossed"


def text_of(grammar: Grammar, pick: random.Random) -> list[int]:
    """Tokens of a random text, not necessarily to its end."""
    matcher = grammar.matcher()
    data = grammar.vocabulary.token_bytes
    tokens: list[int] = []
    while len(tokens) < 40 and not matcher.is_finished():
        allowed = np.flatnonzero(matcher.allowed_mask()).tolist()
        structure = [i for i in allowed if data[i][:1] in b'",:}]{[012-' and data[i]]
        tokens.append(pick.choice(structure if structure and pick.random() < 0.8 else allowed))
        assert matcher.advance(tokens[-1])
    return tokens


def test_tokens_that_cross_the_border_are_allowed(
    compilers: tuple[GrammarCompiler, GrammarCompiler],
) -> None:
    """The token ends the declared part and begins an undeclared one."""
    grammar = hybrid(compilers[0].compile(json_schema=json.dumps(SCHEMAS["required"])))
    vocabulary = grammar.vocabulary
    matcher = grammar.matcher()
    for byte in b'{"age":7':
        assert matcher.advance(vocabulary.byte_tokens[byte])
    token = vocabulary.token_of(b',"')
    assert matcher.allowed_mask()[token]
    assert matcher.advance(token)
    assert isinstance(matcher, DfaMatcher) and _declared(matcher)  # a key has begun
    assert matcher.advance(vocabulary.byte_tokens[ord("z")]) and not _declared(matcher)
    matcher.rollback(1)
    assert _declared(matcher) and matcher.allowed_mask()[vocabulary.byte_tokens[ord("y")]]
    assert not matcher.is_accepting()


def test_a_second_request_does_not_ask_llguidance(
    compilers: tuple[GrammarCompiler, GrammarCompiler],
) -> None:
    grammar = hybrid(
        compilers[0].compile(json_schema={"type": "object", "properties": {"n": COUNT}})
    )
    vocabulary = grammar.vocabulary
    text = [vocabulary.byte_tokens[byte] for byte in b'{"n":12}']
    for attempt in range(2):
        matcher = grammar.matcher()
        assert isinstance(matcher, DfaMatcher)
        for token in text:
            assert matcher.allowed_mask()[token] and matcher.advance(token)
        assert matcher.is_finished() and matcher.advance(vocabulary.eos_token_ids[0])
        assert matcher.is_accepting() and not matcher.allowed_mask().any()
        assert (matcher._other is None) == bool(attempt)


@pytest.fixture
def wrong(compilers: tuple[GrammarCompiler, GrammarCompiler]) -> HybridGrammar:
    """Return a grammar with the automaton of another schema."""
    compiler, alone = compilers
    regex = declared_part({"type": "object", "properties": {"age": {"type": "boolean"}}}, GAP)
    inner = mask_of(alone.compile(json_schema=json.dumps(SCHEMAS["required"])))
    assert isinstance(inner, LLGuidanceGrammar) and regex is not None
    return HybridGrammar(
        compiler.vocabulary,
        inner,
        LazyDfa(regex, 1000),
        inner.canonicalizer,
        max_table_bytes=1 << 20,
    )


def test_an_automaton_of_something_else_is_given_up(wrong: HybridGrammar) -> None:
    Walker(wrong.vocabulary, 3).walk(wrong.matcher(), wrong.inner.matcher(), 20)
    assert not wrong.trusted
    assert not isinstance(wrong.matcher(), DfaMatcher)


def test_trust_that_is_lost_while_a_row_is_looked_up_leaves_no_mask(
    wrong: HybridGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may forget all masks before this thread stores its row."""
    matcher = wrong.matcher()
    assert isinstance(matcher, DfaMatcher)
    matcher.prepare_mask()
    looked_up = wrong.row

    def row_then_lost(state: int) -> MaskRow | None:
        row = looked_up(state)
        wrong.trusted = False
        wrong.states.forget()
        return row

    monkeypatch.setattr(wrong, "row", row_then_lost)
    matcher.place.mask = None
    assert matcher.mask_row() is None
    assert matcher.place.mask is None and matcher.mask_row() is None


def test_who_is_under_way_goes_on_in_llguidance_when_the_automaton_is_given_up(
    wrong: HybridGrammar,
) -> None:
    vocabulary = wrong.vocabulary
    start, behind, inside = (vocabulary.byte_tokens[byte] for byte in b'{"a')
    first, second = wrong.matcher(), wrong.matcher()
    assert first.allowed_mask()[start] and first.advance(start)
    assert first.mask_row() is not None, "an unfilled row"
    assert second.mask_row() is not None and second.place.mask is not None

    breaker = wrong.matcher()
    for byte in b'{"age":':
        assert breaker.advance(vocabulary.byte_tokens[byte])
    wanted = wrong.inner.matcher()
    assert all(wanted.advance(vocabulary.byte_tokens[byte]) for byte in b'{"age":')
    row = breaker.mask_row()
    assert row is not None and wrong.trusted
    np.testing.assert_array_equal(breaker.allowed_mask(), wanted.allowed_mask())
    assert not wrong.trusted
    assert not wrong.table.filled(row.row), "the mask of one text is not that of all"
    assert breaker.mask_row() is None

    for matcher, text in ((first, (behind, inside)), (second, (start, behind, inside))):
        assert isinstance(matcher, DfaMatcher)
        assert matcher.place.mask is None and matcher.mask_row() is None, "none shares a mask"
        alone = wrong.inner.matcher()
        if matcher is first:
            assert alone.advance(start)
        for token in text:
            assert not matcher.place.after
            np.testing.assert_array_equal(matcher.allowed_mask(), alone.allowed_mask())
            assert matcher.advance(token) and alone.advance(token)
            assert not _declared(matcher)
        Walker(vocabulary, 5).walk(matcher, alone, 20)


def test_no_row_is_needed(compilers: tuple[GrammarCompiler, GrammarCompiler]) -> None:
    """A table without room."""
    inner = mask_of(compilers[1].compile(json_schema=json.dumps(SCHEMAS["required"])))
    regex = declared_part(SCHEMAS["required"], GAP)
    assert isinstance(inner, LLGuidanceGrammar) and regex is not None
    grammar = HybridGrammar(
        inner.vocabulary, inner, LazyDfa(regex, 1000), inner.canonicalizer, max_table_bytes=0
    )
    assert grammar.matcher().mask_row() is None
    Walker(inner.vocabulary, 3).walk(grammar.matcher(), inner.matcher(), 40)


@pytest.mark.parametrize(
    "schema", [{"type": "number", "minimum": 0.5}, {"anyOf": [{"type": "string"}, {}]}]
)
def test_what_is_not_declared(schema: Any) -> None:
    assert declared_part(schema, GAP) is None


def test_marks_are_at_every_place_of_a_key_that_may_become_another() -> None:
    regex = declared_part({"type": "object", "properties": {"ab": {"type": "null"}}}, GAP)
    assert regex is not None
    dfa = LazyDfa(regex, 1000)
    mark = ord(MARK)
    marked = [
        text for text in ("", "{", '{"', '{"a', '{"ab', '{"ab"', '{"ab":null', '{"ab":null,"a')
        if dfa.step(dfa.run(dfa.start, text.encode()), mark) >= 0
    ]  # fmt: skip
    assert marked == ['{"', '{"a', '{"ab', '{"ab":null,"a']
