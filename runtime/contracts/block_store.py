"""Protocols of stores below the pool, and of block transfer between engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

# Transfer -----------------------------------------------------------------------------------------


TransferKind = Literal["memory", "tcp", "nixl"]


class TransferConfig(msgspec.Struct, frozen=True):
    """Settings of block transfers between engines. At most `bytes` of blocks wait for takers, in
    one `memory` (a file descriptor) of all engines or of each engine. `host`: the interface of this
    machine that the other engines reach."""

    by: TransferKind
    bytes: int
    memory: int = -1
    host: str = "127.0.0.1"


class BlockLost(Exception):
    """Raised when a block does not come: the giver is gone, silent, or has dropped the block."""


class Transfer(Protocol):
    """An engine's end of the transfer.

    The gateway assigns slots. A giver puts a block into a slot of its own and reports the slot's
    `address` and the checksum of key and content. The gateway tells the taker. The taker takes the
    blocks that its tree lacks one after the other and compares checksums. A giver waits for no
    taker, and a block that does not come is computed.

    One thread calls `put`, another one `expect` and `take`. Both may wait, `take` for seconds.
    """

    address: bytes
    """Secret that takers need; empty where all engines share the slots."""

    def put(self, slot: int, block: np.ndarray) -> None:
        """Make a block (uint8) available in `slot`, replacing its content. Raises OSError."""

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """Announce the slots of a giver to take next, in this order; blocks may be sent ahead."""

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        """Copy the content of a giver's slot into `into` (uint8).

        Raises `BlockLost`, or OSError if no further take from any giver can succeed.
        """

    def close(self) -> None:
        """Close the end; no other method is called afterwards."""


# Block store --------------------------------------------------------------------------------------


SAVE, LOAD, PASS = 0, 1, 2
"""Kinds of a move, which is a row [kind, store, slot, other] of int32.

SAVE: block `other` of the pool into the slot. LOAD: the fetched slot into block `other`. PASS: the
slot into slot `other` of the next store.
"""

NO_MOVES = np.empty((0, 4), np.int32)


class Done(NamedTuple):
    """A finished write, or fetch (`read`), of a slot; `ok` on success."""

    slot: int
    read: bool
    ok: bool


class StoreState(Protocol):
    """The scheduler's view of a store; no method waits. By default a store never fails, has room
    for all slots at once, and is gone with the process."""

    num_slots: int

    @property
    def working(self) -> bool:
        """False once the store was switched off and neither reads nor writes."""
        return True

    @property
    def writable_slots(self) -> int:
        """Count of slots that SAVE or PASS moves may fill now."""
        return self.num_slots

    def reserve(self, slot: int, key: bytes) -> None:
        """Reserve space for a planned move of the block of `key` into `slot`."""
        return

    def cancel(self, slot: int) -> None:
        """Cancel a planned move."""
        return

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        """Let the next start find a written slot."""
        return

    def erase(self, slots: list[int]) -> None:
        """Hide the slots from the next start."""
        return

    def fetch(self, slot: int, key: bytes) -> None:
        """Prepare a slot for a LOAD, behind earlier fetches."""

    def release(self, slot: int) -> None:
        """Free a fetched slot that is not, or no longer, loaded."""
        return

    def poll(self) -> list[Done]:
        """Reads and writes finished since the last call."""

    def seconds(self, blocks: int) -> float:
        """Estimated seconds to fetch `blocks` blocks."""

    def refused(self) -> None:
        """Note that blocks in the store were computed, as fetching seemed slower."""
        return

    def stats(self) -> dict[str, int | float]:
        return {}


class HandedState(StoreState, Protocol):
    """A store shared with other engines (see `Transfer`).

    A SAVE goes to a slot that other engines know. A fetch reads a local slot that stands for a slot
    of a giver.
    """

    def checksum(self, slot: int) -> int:
        """Checksum of a written slot; readable once."""

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        """Let the local `slot` stand for slot `place` of the giver `source`, with the checksum
        `crc`."""


class StoreMemory(Protocol):
    """The block copier's view of a store; bytes of a slot are uint8 [block bytes]."""

    def buffer(self, slot: int) -> np.ndarray:
        """Memory for the content of a reserved slot."""

    def filled(self, slot: int) -> None:
        """Note that the buffer of `slot` is filled."""

    def fetched(self, slot: int) -> np.ndarray:
        """Return the content of a fetched slot."""

    def loaded(self, slot: int) -> None:
        """Note that a fetched slot was copied: `release`."""
