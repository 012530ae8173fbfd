"""Sets of code points as automata over the bytes of their UTF-8 form.

A range of code points is a short list of sequences of byte ranges (K. Thompson, "Regular Expression
Search Algorithm", 1968; R. Cox, "Regular Expression Matching in the Wild", 2010: the same in RE2).
Sequences are merged at their common beginnings, and equal endings are one state, so that all of
Unicode is 8 states and `\\w` about 200.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]
Edge = tuple[int, int, int]
"""First byte, last byte, state after them."""

DONE = -1
"""The state after a whole character."""

_BORDERS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


class CharAutomaton:
    """The deterministic automaton of one character out of a set.

    `edges[state]`: byte ranges, ascending and disjoint; state 0 is the beginning, `DONE` the end.
    Every state is on the way to `DONE`.
    """

    __slots__ = ("edges",)

    def __init__(self, ranges: Ranges) -> None:
        sequences = [s for first, last in ranges for s in _sequences(first, last)]
        self.edges: list[tuple[Edge, ...]] = [()]
        known: dict[tuple[Edge, ...], int] = {}
        self.edges[0] = self._merge(sequences, 0, known)

    def _merge(
        self,
        sequences: list[tuple[tuple[int, int], ...]],
        depth: int,
        known: dict[tuple[Edge, ...], int],
    ) -> tuple[Edge, ...]:
        """The edges of the state reached by the first `depth` bytes of all `sequences`."""
        merged: list[Edge] = []
        begin, count = 0, len(sequences)
        while begin < count:
            # Two sequences begin with the same byte range or with disjoint ones: a range of several
            # bytes is only ever followed by all continuations.
            head = sequences[begin][depth]
            end = begin + 1
            while end < count and sequences[end][depth] == head:
                end += 1
            if len(sequences[begin]) == depth + 1:
                target = DONE
            else:
                edges = self._merge(sequences[begin:end], depth + 1, known)
                found = known.get(edges)
                if found is None:
                    found = known[edges] = len(self.edges)
                    self.edges.append(edges)
                target = found
            if merged and merged[-1][2] == target and merged[-1][1] + 1 == head[0]:
                merged[-1] = (merged[-1][0], head[1], target)
            else:
                merged.append((head[0], head[1], target))
            begin = end
        return tuple(merged)


@lru_cache(maxsize=512)
def char_automaton(ranges: Ranges) -> CharAutomaton:
    """The automaton of `ranges` (as in `syntax.Chars`); shared, as it never changes."""
    return CharAutomaton(ranges)


def _sequences(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Sequences of byte ranges that are together the UTF-8 forms of `first` to `last`, ascending.

    The range has no surrogates.
    """
    for border in _BORDERS:
        if first <= border < last:
            yield from _sequences(first, border)
            yield from _sequences(border + 1, last)
            return
    # All of one length now. Split where a byte's range would not be followed by all continuations.
    for bits in (6, 12, 18):
        block = (1 << bits) - 1
        if first >> bits != last >> bits:
            if first & block:
                yield from _sequences(first, first | block)
                yield from _sequences((first | block) + 1, last)
                return
            if last & block != block:
                yield from _sequences(first, (last & ~block) - 1)
                yield from _sequences(last & ~block, last)
                return
    low, high = chr(first).encode(), chr(last).encode()
    yield tuple(zip(low, high, strict=True))
