"""JSON texts as regex trees: white space, strings, numbers, whole values.

Sources: RFC 8259 (JSON). Strings are written as `json.dumps(..., ensure_ascii=False)` writes them,
except that a free string may also use `\\/` and `\\uXXXX`, because models do.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rootlace.runtime.constrained.automaton.char_sets import ALL, intersection
from rootlace.runtime.constrained.automaton.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Regex,
    Repeat,
)
from rootlace.runtime.constrained.automaton.utf8 import Ranges
from rootlace.runtime.constrained.schema.trees import (
    BLANK,
    chars,
    concat,
    either,
    one_of,
    optional,
    repeat,
)

MAX_DIGITS = 20
"""The digits we write at most before or after the decimal point. Python's own `json` refuses
integers of more than 4,300 digits, and a model that has begun a number should end it."""

_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_PLAIN: Ranges = intersection(ALL, ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)))
_HEX = "0123456789abcdef"


@dataclass(frozen=True)
class Layout:
    """Where white space may stand.

    Compact: nowhere. Flexible: one blank, or a line break with the indentation that the depth
    warrants (up to four blanks or one tab a level), after `{`, `[` and `,` and before `}` and `]`;
    one blank on either side of `:`. The runs are bounded so that a text cannot be blanks for ever.
    """

    flexible: bool

    def gap(self, depth: int) -> Regex:
        """Between the elements of a value that is nested `depth` deep (0: the whole text)."""
        if not self.flexible:
            return BLANK
        indent = either(repeat(Literal(" "), 0, 4 * depth), repeat(Literal("\t"), 0, depth))
        return optional(
            either(Literal(" "), concat(optional(Literal("\r")), Literal("\n"), indent))
        )

    def comma(self, depth: int) -> Regex:
        return concat(Literal(","), self.gap(depth))

    def colon(self) -> Regex:
        blank = optional(Literal(" ")) if self.flexible else BLANK
        return concat(blank, Literal(":"), blank)

    def enclosed(self, opening: str, body: Regex, closing: str, depth: int) -> Regex:
        """`body` in brackets, the elements inside being `depth` deep."""
        return concat(
            Literal(opening), self.gap(depth), body, self.gap(depth - 1), Literal(closing)
        )

    def empty(self, opening: str, closing: str) -> Regex:
        blank = optional(Literal(" ")) if self.flexible else BLANK
        return concat(Literal(opening), blank, Literal(closing))


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
    return either(Chars(_PLAIN), concat(Literal("\\"), escaped))


def any_string() -> Regex:
    return concat(Literal('"'), repeat(free_character(), 0, None), Literal('"'))


def string_of(content: Regex) -> Regex:
    """The JSON strings whose value is a text of `content`, each in its canonical spelling."""
    return concat(Literal('"'), escaped(content), Literal('"'))


def escaped(content: Regex) -> Regex:
    """The texts of `content` as they stand between the quotes. No look-around is allowed in it."""
    match content:
        case Literal(text):
            return Literal(json.dumps(text, ensure_ascii=False)[1:-1])
        case Chars(ranges):
            return _escaped_character(ranges)
        case Concat(parts):
            return concat(*(escaped(part) for part in parts))
        case Either(options):
            return either(*(escaped(option) for option in options))
        case Repeat(item, least, most):
            return repeat(escaped(item), least, most)
        case _:
            raise ValueError("a look at the text around cannot be spelled in a JSON string")


@lru_cache(maxsize=256)  # the same few classes come again and again
def _escaped_character(ranges: Ranges) -> Regex:
    def holds(character: str) -> bool:
        return any(low <= ord(character) <= high for low, high in ranges)

    options = [one_of("".join(short for c, short in _SHORT.items() if holds(c)))]
    for high in (0, 1):
        codes = [chr(16 * high + low) for low in range(16)]
        digits = "".join(_HEX[i] for i, c in enumerate(codes) if holds(c) and c not in _SHORT)
        options.append(concat(Literal(f"u00{high}"), one_of(digits)))
    escape = concat(Literal("\\"), either(*options))
    return either(chars(intersection(ranges, _PLAIN)), escape)


def literal(value: Any, layout: Layout, depth: int = 0) -> Regex:
    """This value, its parts in the order it has. Raises ValueError where JSON cannot write it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if isinstance(value, list):
        items = [literal(item, layout, depth + 1) for item in value]
        return bracketed("[", items, "]", layout, depth + 1)
    if isinstance(value, dict):
        pairs = [
            concat(key(name), layout.colon(), literal(item, layout, depth + 1))
            for name, item in value.items()
        ]
        return bracketed("{", pairs, "}", layout, depth + 1)
    return Literal(_text(value))


def bracketed(opening: str, items: list[Regex], closing: str, layout: Layout, depth: int) -> Regex:
    """All of `items`, separated by commas, in brackets."""
    if not items:
        return layout.empty(opening, closing)
    rest = (concat(layout.comma(depth), item) for item in items[1:])
    return layout.enclosed(opening, concat(items[0], *rest), closing, depth)


def key(name: str) -> Regex:
    return Literal(_text(name))


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate is no text: UnicodeEncodeError is a ValueError
    return text


def digits(least: int, most: int) -> Regex:
    return repeat(Chars(((0x30, 0x39),)), least, most)


def natural() -> Regex:
    """A non-negative integer without leading zeros."""
    return either(Literal("0"), concat(one_of("123456789"), digits(0, MAX_DIGITS - 1)))


def any_integer() -> Regex:
    """An integer; zero without a sign, no fraction, no exponent."""
    positive = concat(one_of("123456789"), digits(0, MAX_DIGITS - 1))
    return either(Literal("0"), concat(optional(Literal("-")), positive))


def any_number() -> Regex:
    """A number. The exponent has at most two digits, so that no double overflows."""
    exponent = concat(one_of("eE"), optional(one_of("+-")), digits(1, 2))
    return concat(optional(Literal("-")), natural(), optional(fraction()), optional(exponent))


def fraction() -> Regex:
    return concat(Literal("."), digits(1, MAX_DIGITS))
