"""Which characters can matter to what stands before them: by class, by first byte, under NFC."""

from __future__ import annotations

import sys
import unicodedata
from functools import cache

# One or more characters of every general category beyond ASCII. Scripts without case are told
# apart because some tokenizers name their blocks.
SAMPLES = (
    "Д", "д", "ſ", "ǅ", "ʰ", "中", "あ", "ア", "한", "ا", "ก", "\u0301", "\u0903", "\u20dd",
    "٣", "Ⅷ", "²", "‿", "—", "（", "）", "«", "»", "’", "。", "…", "±", "€", "´", "☃", "😀",
    "\u00a0", "\u3000", "\u2028", "\u2029", "\u0085", "\u200b", "\ue000", "\u0378",
)  # fmt: skip


@cache
def categories_by_first_byte() -> dict[int, frozenset[str]]:
    """The general categories of the characters whose UTF-8 begins with a byte (0xC2 to 0xF4).

    Characters of four bytes count as being of any category.
    """
    found: dict[int, set[str]] = {}
    for code in range(0x80, 0x10000):
        if not 0xD800 <= code < 0xE000:
            found.setdefault(_first_byte(code), set()).add(unicodedata.category(chr(code)))
    every = set().union(*found.values())
    found.update(dict.fromkeys(range(0xF0, 0xF5), every))
    return {byte: frozenset(categories) for byte, categories in found.items()}


@cache
def first_bytes_of(category: str) -> tuple[int, ...]:
    """The bytes that `categories_by_first_byte` has this general category for, ascending."""
    found = categories_by_first_byte()
    return tuple(sorted(byte for byte, categories in found.items() if category in categories))


def _first_byte(code: int) -> int:
    """The first byte of the UTF-8 of a code point from 0x80 to 0xFFFF."""
    return 0xC0 | code >> 6 if code < 0x800 else 0xE0 | code >> 12


class Composition:
    """What NFC may change where two texts meet (Unicode Standard Annex 15).

    `takes` holds the characters that something behind them may change, `joins` those that may
    change what stands before them; characters of neither set are boundaries of normalization.
    """

    def __init__(self) -> None:
        takes: set[str] = set()
        joins: set[str] = set()
        for code in range(0xC0, sys.maxunicode + 1):
            character = chr(code)
            if unicodedata.combining(character):
                takes.add(character)
                joins.add(character)
            parts = unicodedata.decomposition(character)
            if parts and not parts.startswith("<"):
                points = [chr(int(part, 16)) for part in parts.split()]
                takes.add(character)
                takes.add(points[0])
                joins.update(points[1:])
        for code in range(0x1100, 0x1200):  # Hangul, composed by arithmetic
            (takes if code < 0x1160 else joins).add(chr(code))
        takes.update(map(chr, range(0xAC00, 0xD7A4, 28)))
        self.takes = frozenset(takes)
        self.joins = frozenset(joins)
        self.join_prefixes = sorted({join.encode()[:2] for join in joins})

    def changes(self, text: str) -> int:
        """The length of the longest beginning of `text` that stays as it is whatever NFC does to
        the rest; len(text) where the text is normalized."""
        if unicodedata.is_normalized("NFC", text):
            return len(text)
        end = 0
        start = 0
        for position in range(1, len(text) + 1):
            if position == len(text) or text[position] not in self.joins:
                if not unicodedata.is_normalized("NFC", text[start:position]):
                    return end
                start = end = position
        return end


@cache
def composition() -> Composition:
    return Composition()
