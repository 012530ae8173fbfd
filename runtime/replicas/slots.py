"""Slots for blocks on their way between engines, which the gateway shares out."""

from __future__ import annotations

from dataclasses import dataclass


class Slots:
    """Of one memory, from 0 on."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def __len__(self) -> int:
        """So many are free."""
        return len(self._free)

    def lend(self, most: int) -> Lent:
        """At most so many."""
        count = min(most, len(self._free))
        numbers = tuple(self._free[len(self._free) - count :])
        del self._free[len(self._free) - count :]
        return Lent(self, numbers)

    def back(self, lent: Lent) -> None:
        self._free += lent.numbers


@dataclass(frozen=True)
class Lent:
    """Some of them, which are nobody else's until they are given `back`."""

    slots: Slots
    numbers: tuple[int, ...]

    def back(self) -> None:
        self.slots.back(self)
