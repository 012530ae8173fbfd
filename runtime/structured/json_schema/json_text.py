"""JSON texts as regex trees: white space, strings, numbers, whole values.

Source: RFC 8259 (JSON).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rootlace.runtime.structured.regex.syntax import (
    BLANK,
    Chars,
    Literal,
    Ranges,
    Regex,
    chars,
    complement,
    concat,
    contains,
    either,
    intersection,
    one_of,
    optional,
    repeat,
    with_leaves,
)

MAX_DIGITS = 20
"""The digits we write at most before or after the decimal point. Python's own `json` refuses
integers of more than 4,300 digits, and a model that has begun a number should end it."""


_SPACES, _TABS = 24, 6
WHITESPACE = either(
    Literal(" "),
    concat(
        Literal("\n"), either(repeat(Literal(" "), 0, _SPACES), repeat(Literal("\t"), 1, _TABS))
    ),
)
"""What may stand, once, between two tokens of flexible JSON, whatever machine holds the text: a
space, or a line break with what indents the next line, six levels of four spaces or of one tab. A
run without a bound is something that a weak model never ends."""
WHITESPACES = (
    *(" ", *("\n" + " " * n for n in range(_SPACES + 1))),
    *("\n" + "\t" * n for n in range(1, _TABS + 1)),
)
"""Its texts."""


def gap_of(flexible: bool) -> Regex:
    """What stands between two tokens of JSON."""
    return optional(WHITESPACE) if flexible else BLANK


def enclosed(opening: str, body: Regex, closing: str, gap: Regex) -> Regex:
    return concat(Literal(opening), gap, body, gap, Literal(closing))


def separated(separator: str, gap: Regex) -> Regex:
    return concat(gap, Literal(separator), gap)


@dataclass(frozen=True, eq=False)
class Escapes:
    """How the characters of a string are spelt: those of `plain` as they are; those of `letters`
    with a backslash and a letter; those of `coded` as `\\u` and four digits (`capitals`: A to F in
    either case)."""

    plain: Ranges
    letters: tuple[tuple[str, str], ...]
    coded: str
    capitals: bool


_LETTERS = (
    ('"', '"'),
    ("\\", "\\"),
    ("\b", "b"),
    ("\f", "f"),
    ("\n", "n"),
    ("\r", "r"),
    ("\t", "t"),
)
_CONTROLS = "".join(map(chr, range(0x20)))
_MUST_BE_ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))

OURS = Escapes(
    complement(_MUST_BE_ESCAPED),
    _LETTERS,
    "".join(c for c in _CONTROLS if c not in dict(_LETTERS)),
    capitals=False,
)
"""One spelling for each character."""


@lru_cache(maxsize=4)
def guidance_escapes(letters: str) -> Escapes:
    """llguidance's, which has `letters` after a backslash, `u` among them or not."""
    return Escapes(
        complement((*_MUST_BE_ESCAPED, (0x7F, 0x7F))),
        tuple(pair for pair in _LETTERS if pair[1] in letters),
        _CONTROLS + "\x7f" if "u" in letters else "",
        capitals=True,
    )


def free_character() -> Regex:
    """One character of a string in any of its spellings; one code point in all of them."""
    digit = one_of("0123456789abcdefABCDEF")
    ordinary = either(
        concat(one_of("0123456789abcefABCEF"), repeat(digit, 3, 3)),
        concat(one_of("dD"), one_of("01234567"), repeat(digit, 2, 2)),
    )
    pair = concat(
        one_of("dD"), one_of("89abAB"), repeat(digit, 2, 2), Literal("\\u"),
        one_of("dD"), one_of("cdefCDEF"), repeat(digit, 2, 2),
    )  # fmt: skip
    escaped = either(one_of('"\\/bfnrt'), concat(Literal("u"), either(ordinary, pair)))
    return either(Chars(OURS.plain), concat(Literal("\\"), escaped))


def any_string() -> Regex:
    return concat(Literal('"'), repeat(free_character(), 0, None), Literal('"'))


def string_of(content: Regex, escapes: Escapes = OURS) -> Regex:
    """The JSON strings whose value is a text of `content`, which has no look-around."""
    return concat(
        Literal('"'), with_leaves(content, lambda leaf: _escaped(leaf, escapes)), Literal('"')
    )


def _escaped(leaf: Literal | Chars, escapes: Escapes) -> Regex:
    if isinstance(leaf, Chars):
        return _character(leaf.ranges, escapes)
    return concat(*(_character(((ord(c), ord(c)),), escapes) for c in leaf.text))


@lru_cache(maxsize=512)  # the same few classes come again and again
def _character(ranges: Ranges, escapes: Escapes) -> Regex:
    """One character of `ranges` in all its spellings."""
    plain = intersection(ranges, escapes.plain)
    if len(plain) == 1 and plain == ranges and plain[0][0] == plain[0][1]:
        return Literal(chr(plain[0][0]))
    options = [one_of("".join(short for c, short in escapes.letters if contains(ranges, ord(c))))]
    codes: dict[str, str] = {}
    for character in escapes.coded:
        if contains(ranges, ord(character)):
            code = f"{ord(character):04x}"
            last = code[3] + code[3].upper() if escapes.capitals else code[3]
            codes[code[:3]] = codes.get(code[:3], "") + last
    options += [concat(Literal(f"u{head}"), one_of(last)) for head, last in codes.items()]
    return either(chars(plain), concat(Literal("\\"), either(*options)))


def literal(value: Any, gap: Regex) -> Regex:
    """This value, its parts in the order it has. Raises ValueError where JSON cannot write it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if isinstance(value, list):
        return _bracketed("[", [literal(item, gap) for item in value], "]", gap)
    if isinstance(value, dict):
        colon = separated(":", gap)
        pairs = [
            concat(Literal(text_of(name)), colon, literal(item, gap))
            for name, item in value.items()
        ]
        return _bracketed("{", pairs, "}", gap)
    return Literal(text_of(value))


def _bracketed(opening: str, items: list[Regex], closing: str, gap: Regex) -> Regex:
    if not items:
        return concat(Literal(opening), gap, Literal(closing))
    comma = separated(",", gap)
    rest = (concat(comma, item) for item in items[1:])
    return enclosed(opening, concat(items[0], *rest), closing, gap)


def text_of(value: Any) -> str:
    """A value that has no parts. Raises ValueError where JSON cannot write it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate is no text: UnicodeEncodeError is a ValueError
    return text


def digits(least: int, most: int | None) -> Regex:
    return repeat(Chars(((0x30, 0x39),)), least, most)


def any_integer() -> Regex:
    """An integer; zero without a sign, no fraction, no exponent."""
    return either(Literal("0"), concat(optional(Literal("-")), _positive()))


def any_number(most: int | None = MAX_DIGITS, exponent: int | None = 2) -> Regex:
    """A number of at most so many digits, before the point as behind it and in the exponent (two
    there, so that no double overflows)."""
    fraction = concat(Literal("."), digits(1, most))
    power = concat(one_of("eE"), optional(one_of("+-")), digits(1, exponent))
    natural = either(Literal("0"), _positive(most))
    return concat(optional(Literal("-")), natural, optional(fraction), optional(power))


def _positive(most: int | None = MAX_DIGITS) -> Regex:
    return concat(one_of("123456789"), digits(0, None if most is None else most - 1))
