"""Sets of code points as sorted ranges, and the sets that Python's `re` means by its escapes.

`re` is asked what it matches instead of restating its rules: a class is searched for in the text of
all code points, once; piece by piece, because a search does not let go of the interpreter.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from rootlace.runtime.constrained.automaton.syntax import LAST
from rootlace.runtime.constrained.automaton.utf8 import Ranges

ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
"""Every Unicode scalar value."""
_PIECE = 4096


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The set of all code points in `ranges` (any order, overlapping or not), no surrogates."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    if not any(last >= 0xD800 and first <= 0xDFFF for first, last in merged):
        return tuple(merged)
    return intersection(tuple(merged), ALL)


def complement(ranges: Ranges) -> Ranges:
    """All scalar values that are not in `ranges`."""
    gaps = []
    begin = 0
    for first, last in (*ranges, (LAST + 1, LAST + 1)):
        if first > begin:
            gaps.append((begin, first - 1))
        begin = last + 1
    return intersection(tuple(gaps), ALL)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    both = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            both.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)


def contains(ranges: Ranges, code: int) -> bool:
    index = bisect_right(ranges, (code, LAST + 1)) - 1
    return index >= 0 and code <= ranges[index][1]


@lru_cache(maxsize=16)
def category(escape: str, ascii_only: bool) -> Ranges:
    """What the class escape `escape` (`\\d`, `\\W`, …) matches."""
    if escape[1].isupper():
        return complement(category(escape.lower(), ascii_only))
    pattern = re.compile(f"{escape}+", re.ASCII if ascii_only else re.UNICODE)
    return union(
        (begin + match.start(), begin + match.end() - 1)
        for begin in range(0, 128 if ascii_only else LAST + 1, _PIECE)
        for match in pattern.finditer(_characters(begin, _PIECE))
    )


def prepare() -> None:
    """Find the sets that patterns ask for most, some 15 to 30 ms each, before anybody does."""
    for escape in (r"\d", r"\w", r"\s"):
        category(escape, False)
    _cased()


@lru_cache(maxsize=1024)
def ignoring_case(one: str, plain: Ranges, ascii_only: bool) -> Ranges:
    """What `one`, a pattern of one character that matches `plain`, matches where case is ignored.

    Only characters that take part in case mappings can differ from `plain`.
    """
    cased, text = _cased()
    flags = re.IGNORECASE | (re.ASCII if ascii_only else re.UNICODE)
    matched = re.findall(one, text, flags | re.DOTALL)
    return union((*intersection(plain, complement(cased)), *((ord(c), ord(c)) for c in matched)))


@lru_cache(maxsize=1)
def _cased() -> tuple[Ranges, str]:
    """The characters with a case or that are the case of another, as ranges and as a text."""
    cased: set[str] = set()
    for begin in range(0, LAST + 1, 256):
        block = _characters(begin, 256)
        if block.lower() != block or block.upper() != block:
            for char in block:
                others = {*char.lower(), *char.upper(), *char.lower().upper(), *char.title()}
                if others != {char}:
                    cased |= others | {char}
    ranges = union((ord(char), ord(char)) for char in cased)
    return ranges, "".join(sorted(cased))


def _characters(begin: int, count: int) -> str:
    """So many code points from `begin` on, in order, surrogates included."""
    return (
        np.arange(begin, begin + count, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    )
