"""Do languages overlap? Compared with all short texts, by `re`."""

from __future__ import annotations

import itertools
import re

import pytest

from rootlace.runtime.constrained.automaton import languages
from rootlace.runtime.constrained.automaton.languages import Language
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.parse import parse

PATTERNS = (
    *("", "a", "(ab)*", "(ba)*", "a*b*", "a+b", "[ab]{2}", "[^a]", "é?", "(?!a)[ab]+", "b(ab)*a"),
    *("(?:a|é)+", "[à-ü]b?", "(aa)*", "a(aa)*", "é{2,3}", "[^ab]{2}", "中|a", "(?:[ab]é)+", "[]^]"),
)
TEXTS = [
    "".join(letters) for length in range(5) for letters in itertools.product("abé中", repeat=length)
]


@pytest.mark.parametrize("left", PATTERNS)
def test_overlaps_are_those_of_all_short_texts(left: str) -> None:
    """Of these patterns two that overlap do so in a text of four characters at most."""
    texts = {text for text in TEXTS if re.fullmatch(left, text)}
    for right in PATTERNS:
        expected = any(re.fullmatch(right, text) for text in texts)
        expected |= {left, right} <= {"[^a]", "[]^]"}
        assert Language(parse(left)).overlaps(Language(parse(right))) == expected, right


def test_what_matches_nothing_overlaps_nothing() -> None:
    nothing, everything = Language(parse("(?!)")), Language(parse("(?s:.*)"))
    assert nothing.empty and not nothing.overlaps(everything) and not everything.overlaps(nothing)
    assert nothing.first_bytes() == [] and len(everything.first_bytes()) == 128 + 30 + 16 + 5


def test_a_question_beyond_the_budget_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = Language(parse("(a{7})*b")), Language(parse("(a{11})*c"))
    assert left.overlaps(right) is False
    monkeypatch.setattr(languages, "MAX_STEPS", 70)
    assert left.overlaps(right) is None
    large = Language(parse("(a|b)*a(a|b){20}"))
    assert large.overlaps(left) is None
    with pytest.raises(TooLarge):
        Language(parse("(abc){1000}|[^a]{900}"))
