"""Continuations behind texts of another language, compared with all short texts, by `re`."""

import itertools
import re

import pytest

from rootlace.runtime.structured import grammars
from rootlace.runtime.structured.grammars import Language
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import TooLarge

PATTERNS = (
    *("", "a", "(ab)*", "(ba)*", "a*b*", "a+b", "[ab]{2}", "[^a]", "é?", "(?!a)[ab]+", "b(ab)*a"),
    *("(?:a|é)+", "[à-ü]b?", "(aa)*", "a(aa)*", "é{2,3}", "[^ab]{2}", "中|a", "(?:[ab]é)+"),
)
TEXTS = [
    "".join(letters) for length in range(5) for letters in itertools.product("abé中", repeat=length)
]


@pytest.mark.parametrize("left", PATTERNS)
def test_what_goes_on_behind_a_text_is_that_of_all_short_texts(left: str) -> None:
    """A pattern that continues behind another one does so within four characters here."""
    begun = {text for text in TEXTS[:-4] if re.fullmatch(left, text)}
    text = Language(parse(left))
    for right in PATTERNS:
        longer = [text.encode() for text in TEXTS if re.fullmatch(right, text)]
        behind = {
            data[len(first)]
            for data in longer
            for first in map(str.encode, begun)
            if data.startswith(first) and len(data) > len(first)
        }
        for byte in {text.encode()[0] for text in TEXTS if text} - behind:
            assert not Language(parse(right)).goes_on_behind(text, 1 << byte), (right, byte)
        for byte in behind:
            assert Language(parse(right)).goes_on_behind(text, 1 << byte | 1 << 1), (right, byte)


def test_where_nothing_matches_nothing_goes_on() -> None:
    nothing, everything = Language(parse("(?!)")), Language(parse("(?s:.*)"))
    every_byte = (1 << 256) - 1
    assert nothing.empty and not nothing.goes_on_behind(everything, every_byte)
    assert not everything.goes_on_behind(nothing, every_byte)
    assert everything.goes_on_behind(everything, 1 << 0x61)
    assert not everything.goes_on_behind(everything, 1 << 0xFF)
    assert nothing.first_bytes() == 0
    assert everything.first_bytes().bit_count() == 128 + 30 + 16 + 5


def test_a_question_beyond_the_budget_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = "(a{7})*b", "(a{11})*cd"
    assert Language(parse(left)).goes_on_behind(Language(parse(right)), 1 << ord("d")) is False
    monkeypatch.setattr(grammars, "MAX_STEPS", 70)
    assert Language(parse(right)).goes_on_behind(Language(parse(left)), 1 << ord("d")) is None
    large = Language(parse("(a|b)*a(a|b){20}"))
    assert large.goes_on_behind(Language(parse("a")), 1 << ord("a")) is None
    with pytest.raises(TooLarge):
        Language(parse("(abc){1000}|[^a]{900}"))
