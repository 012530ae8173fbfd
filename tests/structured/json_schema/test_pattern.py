"""Patterns and formats as trees, against `re` and the standard library."""

from __future__ import annotations

import datetime
import gc
import ipaddress
import json
import random
import re
import tracemalloc
import uuid

import idna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rootlace.runtime.structured.json_schema import json_text, pattern
from rootlace.runtime.structured.json_schema import pattern as formats
from rootlace.runtime.structured.json_schema.pattern import NotTranslated, regex_of_pattern
from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.syntax import ALL
from tests.structured.json_schema.regex_texts import draw

ASCII = [
    "^[a-z]+$", "[0-9]", "^a|b$", "^(ab|c)*$", r"^\d{3}-\d{4}$", r"^[^\W_]+$", "^$", "", "^(^x|y$)",
    r"^.{2,5}$", r"(a|^b)(c$|d)", r"^(?:a{2,}|b+?)$", "^((^a)b|c)", "x*", "(a$|b)",
    r"^\w+@\w+\.com$", r"\.", r"^[\w.-]+$", r"[^a-c]", "^^a$$", "(((^a)))", r"^a\$b$", r"[\]\-x]",
    r"\u0041\x42",
]  # fmt: skip


def _run(dfa: LazyDfa, text: str) -> bool:
    state = dfa.run(dfa.start, text.encode())
    return state >= 0 and dfa.accepting(state)


@pytest.mark.parametrize("source", ASCII)
def test_found_as_re_finds_it(source: str) -> None:
    """All short strings over an alphabet that touches every pattern, and random longer ones."""
    regex = regex_of_pattern(source)
    dfa = LazyDfa(regex, 1 << 16)
    letters = random.Random(source)
    alphabet = "abcxyz019-_.@$AB]^"
    texts = ["", *alphabet, *(a + b for a in alphabet for b in alphabet)]
    texts += ["".join(letters.choices(alphabet, k=letters.randrange(3, 9))) for _ in range(300)]
    texts += [draw(regex, letters) for _ in range(30)] + ["ab@cd.com", "xxab@cd.com", "123-4567"]
    for text in texts:
        if text.isascii() and not set(text) & set("\n\r\x1c\x1d\x1e\x1f\x85"):
            assert _run(dfa, text) == bool(re.search(source, text)), text


def test_nothing_of_a_pattern_is_kept() -> None:
    """A class without `\\w` has hundreds of ranges, and a server sees patterns without end."""

    def kept(first: int) -> int:
        for code in range(first, first + 10):
            regex_of_pattern(f"^[^\\w{chr(code)}]+$")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        assert kept(0x2600) + 10_000 > kept(0x2700)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", r"[^\d]", r"[^\s\w]", r"[^\D]", "[^a]"],
)
def test_classes_are_what_both_dialects_agree_on(source: str) -> None:
    """Python's meaning and its ASCII meaning, which is ECMA-262's but for `\\s` and `.`."""
    dfa = LazyDfa(regex_of_pattern(f"^{source}$"), 1 << 16)
    for code in [*range(0x250), *range(0x660, 0x66A), *range(0x2000, 0x2030), 0x3000, 0xFEFF]:
        character = chr(code)
        agreed = bool(re.fullmatch(source, character)) and bool(
            re.fullmatch(source, character, re.ASCII)
        )
        odd = character in "\n\r\u2028\u2029\ufeff\x1c\x1d\x1e\x1f\x85\xa0" or code >= 0x2000
        if not odd:
            assert _run(dfa, character) == agreed, hex(code)
        elif _run(dfa, character):
            assert re.fullmatch(source, character)


@pytest.mark.parametrize(
    "source",
    [r"(a)\1", "(?i)a", "(?<!ab)c", r"\Aa", r"a\Z", "a{,2}", "[]a]", "[^]a]", "a++",
     "(?>a)", r"\07", r"\p{L}", "(", "[[a]", "(?P<n>a)", r"\cA"],
)  # fmt: skip
def test_what_the_dialects_write_differently_is_refused(source: str) -> None:
    with pytest.raises(NotTranslated):
        regex_of_pattern(source)


@given(st.text(max_size=8))
@settings(max_examples=200, deadline=None)
def test_strings_are_written_as_json_writes_them(value: str) -> None:
    written = json.dumps(value, ensure_ascii=False)
    everything = syntax.repeat(syntax.chars(ALL), 0, None)
    for regex in (json_text.any_string(), json_text.string_of(everything)):
        assert _run(LazyDfa(regex, 1 << 12), written)
    assert _run(LazyDfa(json_text.any_string(), 1 << 12), json.dumps(value))


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_lengths_are_counted_in_code_points(least: int, more: int, seed: int) -> None:
    counted = syntax.repeat(json_text.free_character(), least, least + more)
    for content in (counted, syntax.repeat(syntax.chars(ALL), least, least + more)):
        regex = (
            syntax.concat(json_text.string_of(content))
            if content is not counted
            else syntax.concat(syntax.one_of('"'), content, syntax.one_of('"'))
        )
        value = json.loads(draw(regex, random.Random(seed)))
        assert least <= len(value) <= least + more


@pytest.mark.parametrize("source", ASCII)
@pytest.mark.parametrize("least, most", [(0, 3), (2, None), (3, 3), (1, 4)])
def test_pattern_and_length_together(source: str, least: int, most: int | None) -> None:
    fitted = syntax.with_length(regex_of_pattern(source), least, most)
    if fitted is None:
        return
    dfa = LazyDfa(fitted, 1 << 16)
    alphabet = "abcx1.$"
    texts = [""] + [a + b + c for a in ["", *alphabet] for b in ["", *alphabet] for c in alphabet]
    texts += [text + "abab" for text in texts] + ["123-4567"]
    for text in texts:
        fits = least <= len(text) and (most is None or len(text) <= most)
        assert _run(dfa, text) == (fits and bool(re.search(source, text))), text


# --- formats --------------------------------------------------------------------------------------


def _format(name: str) -> LazyDfa:
    return LazyDfa(formats.regex_of_format(name), 1 << 16)


def test_dates_are_the_calendar() -> None:
    dfa = _format("date")
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                    real = True
                except ValueError:
                    real = False
                assert _run(dfa, text) == real, text
    assert not _run(dfa, "0000-01-01")


@pytest.mark.parametrize(
    "name, inside, outside",
    [
        ("time", ["00:00:00Z", "23:59:59.1+05:30"], ["24:00:00Z", "12:00:00", "12:00Z", "1:0:0Z"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-01-01 00:00:00Z"]),
        ("duration", ["P1D", "P1Y2M3D", "PT1H3M", "P2W", "P1DT1S"], ["P", "PT", "P1", "P1W1D"]),
        ("uuid", ["123e4567-E89B-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("ipv4", ["0.0.0.0", "255.255.255.255", "10.0.0.1"], ["256.1.1.1", "01.1.1.1", "1.1.1"]),
        ("ipv6", ["::", "::1", "fe80::1", "1:2:3:4:5:6:7:8", "1::8"], ["1:2:3", ":::", "1::2::3"]),
        ("email", ["a@b.co", "first.last+tag@mail.org"], ["a@b", "@b.co", "a b@c.d", "a..b@c.d"]),
        (
            "uri",
            ["https://example.com/a?b=c#d", "mailto:a@b.co", "urn:isbn:123", "http://u@h:80", "a:"],
            ["example.com", "//x", "http://a b", "http://x/%zz", "http://x#a#b"],
        ),
    ],
)  # fmt: skip
def test_formats(name: str, inside: list[str], outside: list[str]) -> None:
    dfa = _format(name)
    assert [text for text in inside if not _run(dfa, text)] == []
    assert [text for text in outside if _run(dfa, text)] == []


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_what_is_written_is_of_the_format(name: str) -> None:
    regex = formats.regex_of_format(name)
    source = random.Random(name)
    others = Draft202012Validator.FORMAT_CHECKER
    readers = {
        "date": datetime.date.fromisoformat,
        "time": lambda text: datetime.time.fromisoformat(text),
        "uuid": uuid.UUID,
        "ipv4": ipaddress.IPv4Address,
        "ipv6": ipaddress.IPv6Address,
        "idn-hostname": idna.encode,
        "idn-email": lambda text: idna.encode(text.rsplit("@", 1)[1]),
    }
    for _ in range(300):
        text = draw(regex, source)
        if name == "hostname":
            assert len(text) <= 253 and all(0 < len(one) <= 63 for one in text.split("."))
        assert others.conforms(text, name)
        assert re.fullmatch(formats.pattern_of_format(name), text)
        readers.get(name, str)(text)  # type: ignore[operator]


def test_the_checker_of_values_knows_the_same_formats() -> None:
    assert set(formats.checker().checkers) == set(formats.FORMATS)
    assert not formats.checker().conforms("2023-02-29", "date")
    assert formats.checker().conforms(7, "date")


def test_a_tree_is_cached() -> None:
    assert formats.regex_of_format("date") is formats.regex_of_format("date")
    assert pattern.regex_of_pattern("a") == pattern.regex_of_pattern("a")
