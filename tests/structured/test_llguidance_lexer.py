"""llguidance's lexer is shared by all matchers of a grammar: what one does must not end another."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.structured import llguidance_backend as llguidance_grammar
from rootlace.runtime.structured.compiler import GrammarCompiler
from tests.structured.canonical_tokens import encode
from tests.structured.random_model import byte_vocabulary

VOCABULARY = byte_vocabulary()
LETTERS = [encode(VOCABULARY, letter)[0] for letter in (b"a", b"b")]
WIDE = "(a|b)*a(a|b){30}x"


def on_llguidance(**source: Any) -> Grammar:
    config = ConstraintConfig(backend="llguidance")
    return GrammarCompiler(VOCABULARY, config=config).compile(**source)


def walked(grammar: Grammar, seed: int, length: int) -> str:
    """Walk at random; return why no further token came, or "" after `length` tokens."""
    source = random.Random(seed)
    matcher = grammar.matcher()
    for _ in range(length):
        if not matcher.allowed_mask().any() or not matcher.advance(source.choice(LETTERS)):
            return matcher.error()
    return ""


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask may cost next to nothing."""

    def limits(_: ConstraintConfig) -> LLParserLimits:
        return LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200,
            step_max_items=50_000,
            max_lexer_states=250_000,
            max_grammar_size=500_000,
            verbose_errors=False,
        )

    monkeypatch.setattr(llguidance_grammar, "parser_limits", limits)


def test_a_mask_beyond_its_bounds_ends_no_other_request(cheap: None) -> None:
    grammar = on_llguidance(regex=WIDE)
    for seed in range(5):
        assert "too many expressions" in walked(grammar, seed, 200)
        assert grammar.matcher().allowed_mask()[LETTERS].all()


def test_a_request_goes_on_where_another_wore_the_lexer_out(cheap: None) -> None:
    grammar = on_llguidance(regex=f"c*|{WIDE}")
    c = encode(VOCABULARY, b"c")[0]
    matcher = grammar.matcher()
    for length in range(200):
        if length % 50 == 0:
            assert walked(grammar, length, 200)
        assert matcher.allowed_mask()[c], matcher.error()
        assert matcher.advance(c), matcher.error()
    assert matcher.is_accepting()
    matcher.rollback(199)
    assert matcher.allowed_mask()[c]


def test_special_tokens_are_taken_in_again(cheap: None) -> None:
    """By a matcher that goes on with another lexer, and goes back behind them."""
    vocabulary = byte_vocabulary("XY")
    schema = {"type": "string", "pattern": f"^{WIDE}$"}
    tag = {"structures": [{"begin": "X", "schema": schema, "end": "Y"}], "triggers": ["X"]}
    grammar = GrammarCompiler(vocabulary).compile(structural_tag=tag)
    x, y = (vocabulary.special_tokens[name] for name in "XY")
    quote, c = encode(vocabulary, b'"') + encode(vocabulary, b"c")
    matcher = grammar.matcher()
    for seed in range(4):
        source, other = random.Random(seed), grammar.matcher()
        tokens = [x, quote, *source.choices(LETTERS, k=200)]
        assert not all(other.allowed_mask().any() and other.advance(token) for token in tokens)
        assert "too many" in other.error()
        for token in [c, y]:
            assert matcher.allowed_mask()[token], matcher.error()
            assert matcher.advance(token), matcher.error()
    assert matcher.advance(x) and matcher.forced_text() == b'"'
    matcher.rollback(2)
    assert matcher.is_accepting() and matcher.allowed_mask()[[x, y, c]].all()


def test_masks_beside_other_matchers_of_the_grammar() -> None:
    """Masks are filled on one thread while others advance, copy and go back on another."""
    schema = {"properties": {"a": {"type": "string", "pattern": "^[a-f]+(0|1)*$"}, "b": {}}}
    text = b'{"a":"abcdef0101","b":[1,{"c":"d"},null]}'
    expected = []
    alone = on_llguidance(json_schema=schema).matcher()
    for token in encode(VOCABULARY, text):
        expected.append(alone.allowed_mask())
        assert alone.advance(token)
    shared = on_llguidance(json_schema=schema)

    def masks(_: int) -> bool:
        matcher = shared.matcher()
        for place, token in enumerate(encode(VOCABULARY, text)):
            if not np.array_equal(matcher.allowed_mask(), expected[place]):
                return False
            if not matcher.advance(token):
                return False
            matcher.rollback(1)
            matcher.forced_tokens()
            matcher.advance(token)
        return matcher.is_accepting()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(masks, range(24)))


def test_what_was_tried_and_taken_back_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token beyond the parser's bounds, as a draft may have one: the text goes on without it."""
    limits = LLParserLimits(max_items_in_row=100)
    monkeypatch.setattr(llguidance_grammar, "parser_limits", lambda _: limits)
    names = [f"h{i}" for i in range(60)]
    heavy = "\n".join(f'{name} ::= "b" {name} "c" | "d"' for name in names)
    root = f'root ::= "x" root | "y" | "a" heavy\nheavy ::= {" | ".join(names)}'
    matcher = on_llguidance(ebnf=f"{root}\n{heavy}").matcher()
    x, a = (encode(VOCABULARY, letter)[0] for letter in (b"x", b"a"))
    assert matcher.advance(x) and matcher.advance(x)
    before = matcher.allowed_mask()
    for tried in (0, 1):
        assert not tried or matcher.advance(x)
        assert not matcher.advance(a) and "items" in matcher.error()
        matcher.rollback(tried)
        assert not matcher.error()
        assert np.array_equal(matcher.allowed_mask(), before)
    assert matcher.advance(x) and not matcher.error()
