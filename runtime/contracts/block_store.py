"""What keeps blocks below the pool, as the scheduler and the copier of blocks know it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

SAVE, LOAD, PASS = 0, 1, 2
"""Kinds of a move, which is a row [kind, store, slot, other] of int32. SAVE: block `other` of the
pool into the slot. LOAD: the slot, which was fetched, into block `other`. PASS: the slot into slot
`other` of the next store."""

NO_MOVES = np.empty((0, 4), np.int32)


class Done(NamedTuple):
    """A slot was written, or fetched (`read`); `ok` if so."""

    slot: int
    read: bool
    ok: bool


class StoreState(Protocol):
    """What the scheduler asks of a store and tells it. Nothing here waits."""

    @property
    def num_slots(self) -> int: ...

    @property
    def working(self) -> bool:
        """False once it was switched off: nothing is written or read any more."""

    @property
    def room(self) -> int:
        """So many more slots may be saved or passed to now."""

    def reserve(self, slot: int, key: bytes) -> None:
        """A move of the block of this key into the slot is planned, which takes room."""

    def cancel(self, slot: int) -> None:
        """That move is not made."""

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        """The next start may find the slot, which was written."""

    def erase(self, slots: list[int]) -> None:
        """The slots hold nothing that the next start may find."""

    def fetch(self, slot: int, key: bytes) -> None:
        """Get a slot ready for a LOAD, behind those that were asked for before."""

    def release(self, slot: int) -> None:
        """A fetched slot is not loaded, or not any more."""

    def poll(self) -> list[Done]:
        """What was done since the last call."""

    def seconds(self, blocks: int) -> float:
        """About how long it takes to fetch so many."""

    def refused(self) -> None:
        """Blocks that are there were computed, which is thought to be faster than fetching them."""

    def stats(self) -> dict[str, int | float]: ...


class HandedState(StoreState, Protocol):
    """A store that other engines reach, too (`contracts.transfer`). What is saved there is put into
    slots that others know, and fetched from slots of one's own, each of which stands for one of a
    giver."""

    def checksum(self, slot: int) -> int:
        """Of a slot that was written; can be asked once."""

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        """The own `slot` stands for the one that the giver `source` calls `place`, which has this
        checksum."""


class StoreMemory(Protocol):
    """What the copier of blocks asks of a store; bytes of a slot are uint8 [block bytes]."""

    def buffer(self, slot: int) -> np.ndarray:
        """Where the content of a reserved slot is to be put."""

    def filled(self, slot: int) -> None:
        """It is there."""

    def fetched(self, slot: int) -> np.ndarray:
        """The content of a slot that was fetched."""

    def loaded(self, slot: int) -> None:
        """It was copied: `release`."""
