"""Slots of a tier: which are in use, and which one is next."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Slots(Generic[T]):
    """At most `most`, from 0 on. Those that were given back are used first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_use: dict[int, T] = {}
        self._given_back: list[int] = []
        """They are below `_unused`; those from there on were never in use."""
        self._unused = 0

    @property
    def free(self) -> bool:
        """Whether there is one."""
        return bool(self._given_back) or self._unused < self._most

    def take(self) -> int:
        """A free one, which the caller puts into `in_use`."""
        if self._given_back:
            return self._given_back.pop()
        self._unused += 1
        return self._unused - 1

    def give_back(self, slot: int) -> None:
        del self.in_use[slot]
        self._given_back.append(slot)

    def restore(self, found: dict[int, T]) -> None:
        """What is in use at first."""
        self.in_use = found
        self._unused = max(found, default=-1) + 1
        self._given_back = [slot for slot in range(self._unused) if slot not in found]

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        free = set(self._given_back)
        assert len(self._given_back) == len(free), "a slot is free twice"
        assert not self.in_use.keys() & free, "a slot in use is free"
        assert len(free) + len(self.in_use) == self._unused, "a slot is lost"
        assert self._unused <= self._most, "there are not so many slots"
