"""What lies below a simulated pool: a disk, or memory beside a GPU. Nothing is in it but time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache.tier import Tier
from rootlace.runtime.cache.wear import HourlyBytes
from rootlace.runtime.contracts.block_store import PASS, SAVE, Done
from rootlace.runtime.scheduler.tiers.levels import Level

_ROOM = 8192
"""Tokens that may wait to be written."""


@dataclass(frozen=True)
class Below:
    """A level of so many `tokens`, of each of which reading or writing takes `token_seconds`."""

    name: str
    tokens: int
    token_seconds: float


class TimedStore:
    """See `StoreState`. Blocks are read and written one after the other, at one speed; the clock
    says what is done."""

    working = True

    def __init__(self, slots: int, room: int, seconds: float, clock: Callable[[], float]) -> None:
        self.num_slots = slots
        self.room = room
        self._seconds = seconds
        self._clock = clock
        self._under_way: deque[tuple[float, Done]] = deque()
        """When each is done."""

    @property
    def next_done(self) -> float:
        """When something is; inf: nothing is under way."""
        return self._under_way[0][0] if self._under_way else math.inf

    def reserve(self, slot: int, key: bytes) -> None:
        self.room -= 1

    def cancel(self, slot: int) -> None:
        self.room += 1

    def write(self, slot: int) -> None:
        """A reserved slot's move is made."""
        self._begin(Done(slot, read=False, ok=True))

    def fetch(self, slot: int, key: bytes) -> None:
        self._begin(Done(slot, read=True, ok=True))

    def poll(self) -> list[Done]:
        now, found = self._clock(), list[Done]()
        while self.next_done <= now:
            found.append(self._under_way.popleft()[1])
            self.room += not found[-1].read
        return found

    def seconds(self, blocks: int) -> float:
        return self._seconds * blocks

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        pass

    def erase(self, slots: list[int]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def refused(self) -> None:
        pass

    def stats(self) -> dict[str, int | float]:
        return {}

    def _begin(self, done: Done) -> None:
        last = self._under_way[-1][0] if self._under_way else 0.0
        self._under_way.append((max(last, self._clock()) + self._seconds, done))


class StoresBelow:
    """The stores of one engine, whose blocks are `block_tokens` long."""

    def __init__(
        self, below: tuple[Below, ...], block_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._stores = [
            TimedStore(
                max(one.tokens // block_tokens, 1),
                max(_ROOM // block_tokens, 1),
                one.token_seconds * block_tokens,
                clock,
            )
            for one in below
        ]
        self.levels = tuple(
            Level(one.name, Tier(store.num_slots), store, HourlyBytes(None, clock), 1)
            for one, store in zip(below, self._stores, strict=True)
        )

    def move(self, moves: np.ndarray) -> None:
        """What is saved is written from now on; what was read is in the pool."""
        for kind, at, slot, other in moves.tolist():
            if kind == SAVE:
                self._stores[at].write(slot)
            elif kind == PASS:
                self._stores[at + 1].write(other)

    @property
    def next_done(self) -> float:
        """When something is read or written; inf: nothing is under way."""
        return min((store.next_done for store in self._stores), default=math.inf)
