"""Patterns with the meaning of `re.fullmatch`, and refusals of constructs by name."""

from __future__ import annotations

import itertools
import math
import random
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Regex,
    Repeat,
    lengths,
)
from rootlace.wire.errors import InvalidConstraint
from tests.structured.regex import patterns

MAX_STATES = 16384
SCALARS = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))


def accepts(dfa: LazyDfa, text: str) -> bool:
    return dfa.accepting(dfa.run(dfa.start, text.encode()))


@settings(max_examples=120, deadline=None)
@given(patterns.regular, st.integers(0, 2**32))
def test_language_of_random_patterns(pattern: str, seed: int) -> None:
    dfa = LazyDfa(parse(pattern), MAX_STATES)
    compiled = re.compile(pattern)
    for text in patterns.texts_near(dfa, random.Random(seed), 30):
        assert accepts(dfa, text) == bool(compiled.fullmatch(text)), text


@settings(max_examples=150, deadline=None)
@given(patterns.asserting, st.integers(0, 2**32))
def test_language_of_random_patterns_with_assertions(pattern: str, seed: int) -> None:
    dfa = LazyDfa(parse(pattern), MAX_STATES)
    compiled = re.compile(pattern)
    for text in patterns.texts_near(dfa, random.Random(seed), 30):
        assert accepts(dfa, text) == bool(compiled.fullmatch(text)), text


@pytest.mark.parametrize(
    ("pattern", "alphabet"),
    [
        (r"(?:(?!--)[a-])*", "a-b"),
        (r"(?=.*\d)[a-z0-9]{2,}", "a1A"),
        (r"a(?:b(?!c)|x)c?", "abcx"),
        (r"a$\n?", "a\n"),
        (r"(?:(?=a)\w|b)*(?!x)c?", "abcx"),
        (r"((?!a))*b", "ab"),
        (r"a*+b?a", "ab"),
        (r"[ab]{1,2}+b", "ab"),
        (r"(?=a(?!b))a.", "abc"),
        ("(?m)a$(?s:.)b", "ab\n"),
        (r"(?!(?!a)).*", "ab"),
        (r"(?=(?:a|b(?=c))*$).*", "abc"),
        (r"a*(?=b)", "ab"),
        (r"(?:a(?=b)|b(?=a|$))*", "ab"),
        (r"a|b^c|^", "abc"),
        (r"(?:^a|b)+", "ab"),
        (r"(?m)^a\n?", "ab\n"),
        (r"(?m)(?:^a|\n)*", "ab\n"),
        (r"(?:a?^b?)*", "ab"),
        (r"\b[a ]+\b", "a "),
        (r"[ab -]*\B", "ab-"),
        (r"\B", "a "),
        (r"(?:\b\w+\b ?)+", "aé "),
        (r"(?a)(?:\b.)*", "aé "),
        (r"(?!-)[a-]{1,5}(?<!-)", "a-"),
        (r"(?:a|(?<=a)b|(?<![ab])c)*", "abc"),
        (r"(?:(?=b(?<=b)a)b|a)*", "ab"),
        (r'(?:"|[^"])*(?<!\\)"', 'a"\\'),
    ],
)
def test_every_short_text(pattern: str, alphabet: str) -> None:
    dfa = LazyDfa(parse(pattern), MAX_STATES)
    for length in range(7 if len(alphabet) < 4 else 6):
        for letters in itertools.product(alphabet, repeat=length):
            text = "".join(letters)
            assert accepts(dfa, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "one",
    [r"\d", r"\w", r"\s", r"\W", ".", r"[^\W\d_]", r"(?a)\w", r"(?a)[^\s]", r"(?i)k", r"(?i)[^s]",
     r"(?i)[à-þ]", r"(?i)[\U00010400-\U00010410]", r"(?ai)[k-s]", r"(?i)[^\W\dß]", r"(?i)[^a-z]"],
)  # fmt: skip
def test_sets_hold_exactly_the_characters_that_re_matches(one: str) -> None:
    regex = parse(one)
    assert isinstance(regex, Chars)
    assert regex.ranges == syntax.union(regex.ranges)
    ours = "".join("".join(map(chr, range(first, last + 1))) for first, last in regex.ranges)
    assert ours == "".join(re.findall(one, SCALARS))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=8),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=8),
)
def test_set_algebra(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    base = 0xD7F0  # so that the sets reach into the surrogates
    ranges = [
        syntax.union((base + begin, base + begin + more) for begin, more in each)
        for each in (left, right)
    ]
    sets = [
        {base + code for begin, more in each for code in range(begin, begin + more + 1)}
        - set(range(0xD800, 0xE000))
        for each in (left, right)
    ]
    both = syntax.intersection(*ranges)
    outside = syntax.complement(ranges[0])
    for code in range(base - 2, base + 50):
        assert syntax.contains(ranges[0], code) == (code in sets[0])
        assert syntax.contains(both, code) == (code in sets[0] & sets[1])
        surrogate = 0xD800 <= code < 0xE000
        assert syntax.contains(outside, code) == (code not in sets[0] and not surrogate)


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(a)[(?<=]\1", r"a back-reference ('\\1' at position 9)"),
        (r"(?P<n>a)(?P=n)", "a back-reference ('(?P=' at position 8)"),
        (r"(a)?(?(1)b|c)", "a conditional on a group ('(?(' at position 4)"),
        (r"a(?<=aa)b", "look-behind of other than one character ('(?<=' at position 1)"),
        (r"a(?<!\(.|b)b", "look-behind of other than one character ('(?<!' at position 1)"),
        (r"(?>a|ab)c", "an atomic group with a choice in it ('(?>' at position 0)"),
        (r"(?:ab)*+c", "a possessive quantifier on more than one character ('*+' at position 6)"),
        (
            "(?x) a # (?<=x)\n (?<=aa)",
            "look-behind of other than one character ('(?<=' at position 17)",
        ),
        (r"\[[[:alpha:]_]+", r"no [:alpha:] ('[[:alpha:]' at position 2); write a-zA-Z"),
        ("(?x)a# [[:digit:]\n[^[:digit:]]", "[:digit:] ('[^[:digit:]' at position 18); write 0-9"),
        ("[_[:alnum:]-]+", "no [:alnum:] ('[_[:alnum:]' at position 0); write a-zA-Z0-9"),
        ("x[^a-z[:blank:][:digit:]]", "no [:blank:] ('[^a-z[:blank:]' at position 1)"),
        ("(", "missing ), unterminated subpattern at position 0"),
        ("a**", "multiple repeat at position 2"),
        ("[z-a]", "bad character range z-a at position 1"),
        ("a{99999999999}", "the repetition number is too large"),
        ("(?L)a", "cannot use 'L' flag"),
        ("(" * 5000 + "a" + ")" * 5000, "nested too deeply"),
    ],
)
def test_refusals_name_the_construct_and_the_place(pattern: str, message: str) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        parse(pattern)
    assert message in str(refused.value)


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", [r"[[:nope:]]", r"\[[:alpha:]", r"[\[:alpha:]]", "[a[:alpha:]"])
def test_sets_that_only_look_like_posix_classes(pattern: str) -> None:
    parse(pattern)


def test_surrogates_match_nothing() -> None:
    assert parse("[\ud800a]") == Literal("a") or parse("[\ud800a]") == Chars(((97, 97),))
    assert LazyDfa(parse("a\ud800"), 10).empty
    assert not accepts(LazyDfa(parse("[^a]"), 10), "a")


@pytest.mark.parametrize(
    "pattern", ["(?:\ud800(?<=ab)|x)", r"(?:[\ud800](a)\1|x)", r"(?:\ud800(?>a|ab)c|x)"]
)
def test_what_follows_a_surrogate_is_not_refused(pattern: str) -> None:
    """No text reaches the part behind the surrogate."""
    dfa = LazyDfa(parse(pattern), 10)
    assert accepts(dfa, "x") and not accepts(dfa, "aa")


def test_lazy_quantifiers_have_the_language_of_greedy_ones() -> None:
    assert parse("a*?") == parse("a*") == Repeat(Literal("a"), 0, None)


def test_moderate_nesting_is_no_matter() -> None:
    depth = min(100, sys.getrecursionlimit() // 10)
    assert accepts(LazyDfa(parse("(" * depth + "a" + ")?" * depth), 100), "a")


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (Concat((Literal("ab"), Chars(()), Literal("c"))), (math.inf, 0)),
        (Repeat(Concat((Literal("a"), Either(()))), 0, 3), (0, 0)),
        (Repeat(Concat((Literal("a"), Either(()))), 1, 3), (math.inf, 0)),
        (Either((Concat((Literal("abc"), Chars(()))), Literal("d"))), (1, 1)),
    ],
)
def test_lengths_where_there_is_no_text(regex: Regex, expected: tuple[float, float]) -> None:
    assert lengths(regex) == expected
