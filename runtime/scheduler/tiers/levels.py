"""What is below the pool, and the moves of blocks between the two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.cache.tier import Entry, Tier
from rootlace.runtime.cache.wear import HourlyBytes
from rootlace.runtime.contracts.block_store import NO_MOVES, HandedState, StoreState
from rootlace.runtime.contracts.request import adapter_and_namespace, kv_space


@dataclass(frozen=True)
class Level:
    """A tier and where its blocks are. `wear` bounds what is written to it."""

    name: str
    tier: Tier
    store: StoreState
    wear: HourlyBytes
    block_bytes: int

    @property
    def block_seconds(self) -> float:
        """What a block more takes, of some that are read."""
        return self.store.seconds(1) - self.store.seconds(0)

    def publish(self, entry: Entry) -> None:
        """The entry can be read from now on."""
        self.store.publish(entry.slot, entry.label.key, entry.label.owner)

    def release(self, slot: int) -> None:
        """A slot that was fetched is not loaded."""
        self.store.release(slot)
        self.tier.end_read(slot, True)

    def discard(self, entries: list[Entry]) -> None:
        """Forget entries, for the next start as well."""
        for entry in entries:
            self.tier.discard(entry)
        self.store.erase([entry.slot for entry in entries if entry.whole])


@dataclass(frozen=True)
class HandedLevel(Level):
    """What engines hand each other. Nothing that the pool gives up goes there."""

    store: HandedState


def as_measured(tokens: int) -> float:
    """Stands for what the scheduler finds its own steps to take."""
    raise NotImplementedError


@dataclass(frozen=True)
class Tiers:
    """What is below the pool, the fastest first. `space_of`: at most 64 bytes that are others for
    every namespace of the tree and every content of an adapter (the model is the store's).
    `prefill_seconds`: how long so many tokens take to be computed. `handed`: what other engines
    hand over."""

    levels: tuple[Level, ...] = ()
    space_of: Callable[[Hashable], bytes] = kv_space
    prefill_seconds: Callable[[int], float] = as_measured
    handed: HandedLevel | None = None

    @property
    def readable(self) -> tuple[Level, ...]:
        """All that blocks are read from."""
        return self.levels if self.handed is None else (*self.levels, self.handed)

    @property
    def working(self) -> bool:
        return any(level.store.working for level in self.levels)

    def pays(self, level: Level, block_size: int) -> bool:
        """Whether a block more, of some that are read, is read faster than computed."""
        return level.block_seconds < self.prefill_seconds(block_size)

    def find(self, key: bytes) -> tuple[int, Entry] | None:
        """The first level that has a block, and its entry there."""
        for at, level in enumerate(self.readable):
            entry = level.tier.find(key)
            if entry is not None and level.store.working:
                return at, entry
        return None


def owner_of(kv: Hashable) -> bytes:
    """What stands for a namespace, with any adapter, in labels."""
    return _digest(adapter_and_namespace(kv)[1])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Moves:
    """Moves that were planned and not made, in the order in which blocks changed hands."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Level and slot of those that load."""
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Those of loads that were handed out."""

    def take(self) -> np.ndarray:
        """int32 [M, 4]: what is to be moved before the next step; see `contracts.block_store`."""
        if not self.rows:
            return NO_MOVES
        rows, self.rows = self.rows, []
        self.taken += self.loads
        self.loads = []
        return np.array(rows, np.int32)
