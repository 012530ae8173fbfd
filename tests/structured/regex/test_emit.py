"""Trees as text for Rust's regex engines: the same language there and, transcribed, in `re`."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    Regex,
    Repeat,
    TooLarge,
    pattern_of,
)
from rootlace.wire.errors import InvalidConstraint
from tests.structured.regex import patterns

BYTES = LLTokenizer("byte")


def in_python(pattern: str) -> str:
    r"""Return the pattern with `\x{…}` in the spelling of `re`."""
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", pattern)


def accepted_by_llguidance(pattern: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_regex(pattern))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@settings(max_examples=60, deadline=None)
@given(patterns.regular, st.integers(0, 2**32))
def test_random_patterns_mean_the_same_elsewhere(pattern: str, seed: int) -> None:
    regex = parse(pattern)
    emitted = pattern_of(regex)
    assert emitted.isascii()
    dfa = LazyDfa(regex, 16384)
    theirs = re.compile(in_python(emitted))
    for number, text in enumerate(patterns.texts_near(dfa, random.Random(seed), 20)):
        expected = dfa.accepting(dfa.run(dfa.start, text.encode()))
        assert bool(theirs.fullmatch(text)) == expected, text
        if number % 4 == 1:
            assert accepted_by_llguidance(emitted, text) == expected, text


@pytest.mark.parametrize(
    ("regex", "emitted"),
    [
        (Literal(""), "(?:)"),
        (Literal("a.b"), r"a\x{2E}b"),
        (Concat((Either((Literal("a"), Literal("bc"))), Literal("d"))), "(?:a|bc)d"),
        (Repeat(Literal("ab"), 2, None), "(?:ab){2,}"),
        (Repeat(Repeat(Literal("a"), 2, 2), 0, 3), "(?:a{2}){0,3}"),
        (Chars(((45, 45), (91, 94))), r"[\x{2D}\x{5B}-\x{5E}]"),
        (Either((Literal(""), Literal("a"), Literal("b"))), "(?:)|a|b"),
        (Either(()), r"[^\x{0}-\x{10FFFF}]"),
    ],
)
def test_spelling(regex: Regex, emitted: str) -> None:
    assert pattern_of(regex) == emitted


def test_nothing_is_accepted_as_a_pattern() -> None:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_regex(pattern_of(Chars(()))))
    assert not (matcher.is_accepting() and not matcher.is_error())


def test_many_choices_reach_llguidance() -> None:
    emitted = pattern_of(Either(tuple(Literal(f"choice {number}") for number in range(2000))))
    assert accepted_by_llguidance(emitted, "choice 1999")
    assert not accepted_by_llguidance(emitted, "choice 2000")


@pytest.mark.slow
def test_what_has_no_equivalent_is_refused() -> None:
    with pytest.raises(InvalidConstraint, match="look-around"):
        pattern_of(Concat((Look(Literal("a"), negative=True), Literal("b"))))
    deep: Regex = Literal("a")
    for _ in range(100_000):
        deep = Repeat(Concat((deep, Literal("b"))), 0, 1)
    with pytest.raises(TooLarge, match="deeply"):
        pattern_of(deep)
    with pytest.raises(TooLarge, match="too long"):
        pattern_of(parse(r"\w" * 1000))
    shared: Regex = Literal("a")
    for _ in range(200):
        shared = Concat((shared, shared))
    with pytest.raises(TooLarge, match="too long"):
        pattern_of(shared, max_length=1 << 16)
