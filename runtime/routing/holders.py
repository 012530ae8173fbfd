"""Sets of replicas, each kept once and called by a number."""

from __future__ import annotations

import numpy as np

MOST_SETS = 1 << 18
"""At 1,000 replicas they take 90 MB."""


class HolderSets:
    """Sets of replicas as bits of integers. Each has a number while something counts on it; the
    empty one has 0 for ever. Blocks of one prompt are mostly held by the same replicas, so there
    are far fewer sets than blocks."""

    def __init__(self, most: int = MOST_SETS) -> None:
        self.bits = [0]
        """By number."""
        self._most = most
        self._numbers = {0: 0}
        self._uses = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, bits: int) -> int | None:
        """The number of a set; None where there are too many sets already. A new one is to be
        counted on at once."""
        number = self._numbers.get(bits)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.bits[number] = bits
            elif len(self.bits) < self._most:
                number = len(self.bits)
                self.bits.append(bits)
                self._uses.append(0)
            else:
                return None
            self._numbers[bits] = number
        return number

    def count(self, number: int, uses: int) -> None:
        """So many more count on a set (or fewer, below 0); one that none does is forgotten."""
        if not number:
            return
        self._uses[number] += uses
        if not self._uses[number]:
            del self._numbers[self.bits[number]]
            self.bits[number] = 0
            self._free.append(number)

    def with_any(self, replicas: int) -> np.ndarray:
        """bool by any number that there can be: whether its set has any of these replicas (bits).
        No set that is made later has, unless one of that kind is asked for."""
        found = np.zeros(self._most, bool)
        found[: len(self.bits)] = [bool(bits & replicas) for bits in self.bits]
        return found
