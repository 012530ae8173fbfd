"""What keeps blocks below the pool, as the scheduler and the copier of blocks know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

# Transfer -----------------------------------------------------------------------------------------
#
# How blocks of KV come from the engine that computed them to the one that goes on from them.


TransferKind = Literal["memory", "tcp", "nixl"]


class TransferConfig(msgspec.Struct, frozen=True):
    """What an engine hands blocks over by. At most so many `bytes` of them wait for others: in one
    `memory` (a file descriptor) of all engines, or of each engine. `host` is the interface of this
    machine that the others reach."""

    by: TransferKind
    bytes: int
    memory: int = -1
    host: str = "127.0.0.1"


class BlockLost(Exception):
    """A block does not come: its giver is gone, says nothing, or has it no more."""


class Transfer(Protocol):
    """An engine's end of what it gives and takes.

    A giver puts a block into a slot of its own, and says where that is (`address`) and what the
    checksum of key and content is; the gateway shares out the slots, and tells the taker. The taker
    asks for the blocks that its tree lacks, one after the other as it can take them in, and
    compares the checksum: a giver waits for nobody, and what does not come is computed.

    One thread calls `put`, another one `expect` and `take`. Both may wait, `take` for seconds.
    """

    address: bytes
    """What takers have to know; nobody else may. Empty where all have the same slots."""

    def put(self, slot: int, block: np.ndarray) -> None:
        """Have a block (uint8) where takers find it. What was there is gone. Raises OSError."""
        ...

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """These slots of a giver are taken next, in this order: they may come already."""
        ...

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        """Copy what is in the slot of a giver (uint8). Raises `BlockLost`, or OSError where nothing
        can be taken from anybody any more."""
        ...

    def close(self) -> None:
        """Nobody calls the other methods any more."""
        ...


# Block store --------------------------------------------------------------------------------------


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
