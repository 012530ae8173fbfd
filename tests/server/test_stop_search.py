"""First matches in growing texts, against `re.search` on every beginning."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rootlace.runtime.server.stops import Finder, Found, Search
from rootlace.wire.errors import InvalidConstraint

LOOKS = ("^", "$", r"\A", r"\Z", r"\b", r"\B", "(?<=a)", "(?<!a)", "(?=b)", "(?!b)", "(?=[ab])")
UNITS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", " ", r"\n", r"\s", r"\w", "(?s:.)", "é"])


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.builds(
        "(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])
    )
    either = st.builds("(?:{}|{})".format, inner, inner)
    return st.lists(inner | repeated | either, min_size=1, max_size=3).map("".join)


PATTERNS = st.builds(
    "{}{}".format,
    st.sampled_from(["", "(?m)", "(?i)"]),
    st.recursive(UNITS | st.sampled_from(LOOKS), joined, max_leaves=6),
)


def brute(pattern: str, text: str) -> tuple[int, int] | None:
    """Return the end of the shortest beginning that contains a match, and the match's start."""
    for seen in range(len(text) + 1):
        if match := re.search(pattern, text[:seen]):
            return seen, match.start()
    return None


@given(PATTERNS, st.lists(st.text("ab \nAé", max_size=6), max_size=5))
@settings(max_examples=400, deadline=None)
def test_like_re(pattern: str, pieces: list[str]) -> None:
    try:
        search = Search(pattern)
    except InvalidConstraint:
        assume(False)
    assert not re.search(pattern, "")
    text, finder, fed = "".join(pieces), Finder(search), ""
    expected = brute(pattern, text)
    for piece in pieces:
        found = finder.feed(piece)
        fed += piece
        if found is not None:
            assert (found.seen, found.begin) == expected
            assert found.begin <= found.end <= found.seen <= len(fed)
            return
        if expected is not None:  # no text that a match may begin with was released
            assert finder.open <= expected[1]
    assert expected is None


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"and|or", "for and", (3, 1, 3)),
        (r"[.!?]\s*$", "One. Two", (4, 3, 4)),
        (r"\bor\b", "for or ", (6, 4, 6)),  # an open end counts
        (r"or\B", "or orb", (6, 3, 5)),  # found with the next character, not part of it
        (r"(?<=\.)", "End. x", (4, 4, 4)),
        (r"(?s)a.*b|ac", "xaxxc ac", (8, 6, 8)),
        (r"(?m)^#", "a#\n#", (4, 3, 4)),
        ("(a|b)*a(a|b){20}", "b" * 9 + "a" + "b" * 20, (30, 0, 30)),
    ],
)
def test_examples(pattern: str, text: str, expected: tuple[int, int, int]) -> None:
    assert brute(pattern, text) == expected[:2]
    assert Finder(Search(pattern)).feed(text) == Found(*expected)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a*", "matches the empty text"),
        (r"^\s*$", "matches the empty text"),
        ("(", "missing \\)"),
        (r"(a)\1", "not supported"),
        ("(?<=ab)c", "not supported"),
        ("a(?=bc)", "look-ahead is supported over one character only"),
        (r"a$\n", "end only"),
        (r"(?=\s)$|a", "beside"),
        ("(a{100}){100}", "more than 64 positions"),
        ("(?:^){1000}a", "more than 64 positions"),
        ("(" * 2000 + "a" + ")" * 2000, "nested too deeply"),
    ],
)
def test_refusals(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidConstraint, match=reason):
        Search(pattern)


def test_memory_is_bounded() -> None:
    """A pattern with a million states, each of which the text reaches."""
    search = Search("(?:a|b)*a(?:a|b){40}c")
    finder = Finder(search)
    text = "".join("ab"[bin(number).count("1") & 1] for number in range(5000))
    assert finder.feed(text) is None
    positions = sum(len(group) for groups, _ in search._states for group in groups)
    assert 0 < len(search._steps) + positions <= 4200
    assert finder.feed("a" + "b" * 40 + "c") == Found(5042, 0, 5042)
