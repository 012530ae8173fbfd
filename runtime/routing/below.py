"""What lies below the pools of all replicas: on disks, or in main memory beside a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.messages import Below
from rootlace.runtime.routing.index import PrefixIndex


@dataclass(frozen=True)
class Read:
    """These `replicas` (bits) have a prompt's blocks before number `end`, of which they would read
    so many at each level: pairs of a level and a count."""

    end: int
    replicas: int
    blocks: tuple[tuple[int, int], ...] = ()


class BelowPools:
    """A table for each level, of as many blocks as `replicas` have there and at most `most`, by the
    keys that engines tell (`Below`), and what reading takes."""

    def __init__(self, replicas: int, most: int) -> None:
        self._replicas = replicas
        self._most = most
        self._levels: dict[int, PrefixIndex] = {}
        self._seconds: dict[int, np.ndarray] = {}
        """Of a block, by replica."""

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def apply(self, replica: int, told: Sequence[Below], fresh: bool) -> None:
        """Take in what a replica says. `fresh`: nothing that it said before counts."""
        if fresh:
            self.drop(replica)
        for one in told:
            if one.level not in self._levels:
                most = min(self._replicas * one.slots, self._most)
                self._levels[one.level] = PrefixIndex(most)
                self._seconds[one.level] = np.full(self._replicas, math.inf)
            self._seconds[one.level][replica] = one.seconds
            self._levels[one.level].apply(replica, Change(one.added, one.removed))

    def drop(self, replica: int) -> None:
        """As `PrefixIndex.drop`."""
        for index in self._levels.values():
            index.drop(replica)

    def sweep(self) -> bool:
        """As `PrefixIndex.sweep`."""
        return sum(index.sweep() for index in self._levels.values()) > 0

    def match(
        self, key: Callable[[int], int], blocks: int, held: Sequence[tuple[int, int]]
    ) -> list[Read]:
        """Who would read what of a prompt of so many `blocks`, whose prefix with block number `at`
        has this `key(at)`. `held`: what pools hold of it (`PrefixIndex.match`), behind which is
        read, at each level what those above it lack."""
        here = 0
        for _, replicas in held:
            here |= replicas
        ways = [Read(0, ~here), *(Read(count, replicas) for count, replicas in held)]
        for level, index in sorted(self._levels.items()):
            found = []
            for way in ways:
                rest = way.replicas
                for end, replicas in index.longest(key, blocks, way.end, rest):
                    read = (level, end - way.end)
                    found.append(Read(end, replicas, (*way.blocks, read)))
                    rest &= ~replicas
                if rest:
                    found.append(Read(way.end, rest, way.blocks))
            ways = found
        return [way for way in ways if way.blocks]

    def seconds(self, read: Read, which: int | np.ndarray) -> float | np.ndarray:
        """What reading takes, at one replica or at several."""
        times = [count * self._seconds[level][which] for level, count in read.blocks]
        found: float | np.ndarray = sum(times)
        return found
