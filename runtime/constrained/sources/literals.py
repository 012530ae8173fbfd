"""Literals in which some text stands for special tokens, which are tokens and never text.

They are strings in which a pair of surrogates, which no text has, stands for a special token: so
they are compared, searched and cut as strings are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from rootlace.runtime.constrained.automaton import syntax
from rootlace.runtime.constrained.automaton.emit import pattern_of

Run = str | int
_MAX_ID = 1 << 20
_PAIR = re.compile("([\ud800-\udbff][\udc00-\udfff])")


class SpecialTokens:
    """Those of a vocabulary: `ids` by content. `ends` are those that end the sequence."""

    def __init__(self, ids: Mapping[str, int], ends: Collection[int]) -> None:
        self._ids = {content: id_ for content, id_ in ids.items() if id_ < _MAX_ID}
        self._ends = {_pair(id_) for id_ in ends if id_ < _MAX_ID}
        self.free = frozenset(self._ids.values()) - frozenset(ends)
        """Those that more may follow."""
        longest = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest))) if longest else None

    def literal(self, text: str) -> str:
        """The first special token in the text counts, of several the longest, as in tokenizers."""
        if self._any is None:
            return text
        return self._any.sub(lambda found: _pair(self._ids[found.group()]), text)

    def within(self, text: str) -> set[int]:
        return {self._ids[content] for content in self._any.findall(text)} if self._any else set()

    def beginning(self, text: str, length: int) -> str:
        """That of the first `length` characters, with the whole of a special token cut there."""
        for found in self._any.finditer(text) if self._any is not None else ():
            if found.start() < length < found.end():
                length = found.end()
        return self.literal(text[:length])

    def ends(self, literal: str) -> bool:
        """Whether its last special token, behind everything else, ends the sequence."""
        return literal[-2:] in self._ends

    def ends_within(self, literal: str) -> bool:
        """Whether a token in it ends the sequence."""
        return not self._ends.isdisjoint(_PAIR.findall(literal))


def _pair(id_: int) -> str:
    return chr(0xD800 + (id_ >> 10)) + chr(0xDC00 + (id_ & 0x3FF))


def runs(literal: str) -> list[Run]:
    """Texts and ids in turns, beginning and ending with a text, which may be empty."""
    found: list[Run] = list(_PAIR.split(literal))
    for at, pair in enumerate(found):
        if at % 2:
            high, low = map(ord, str(pair))
            found[at] = (high - 0xD800) << 10 | low - 0xDC00
    return found


def lexeme(text: str) -> str:
    return f"/{pattern_of(syntax.Literal(text))}/" if text else ""
