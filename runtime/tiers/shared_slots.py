"""Slots in memory that several processes have, through which engines hand each other blocks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rootlace.runtime.tiers.disk import DiskStore
from rootlace.runtime.tiers.slot_file import DamagedBlock, checksum

_TIMED = 8


class SharedSlots:
    """What a `DiskStore` knows of its file, of memory that other processes write and read, too.

    `write` is given slots of the memory, which whoever shares it out has given this process, and
    `read` slots of this process's own, each of which stands for one of the memory (`offer`). What
    somebody else has written there meanwhile has another checksum.
    """

    path = Path("shared memory") / "blocks"

    def __init__(self, memory: int, block_bytes: int, num_slots: int) -> None:
        """`memory`: a file descriptor, which stays the caller's."""
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self._memory = memory
        self._offered: dict[int, tuple[int, int]] = {}

    def offer(self, slot: int, place: int, crc: int) -> None:
        """What this process calls `slot` is the memory's slot `place`, and has this `checksum`."""
        self._offered[slot] = place, crc

    def write(self, slot: int, block: np.ndarray) -> None:
        """Write a block (uint8) to the memory. Raises OSError."""
        if os.pwrite(self._memory, block.data, slot * self.block_bytes) < self.block_bytes:
            raise OSError("there is no room for a block")

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None:
        """Read a block (uint8), whose checksum is the one that was offered. Raises `DamagedBlock`,
        or OSError."""
        place, offered = self._offered[slot]
        count = os.preadv(self._memory, [into.data], place * self.block_bytes)
        if count < self.block_bytes or checksum(key, into) != offered:
            raise DamagedBlock(f"slot {place} of the shared memory does not hold what was offered")

    def publish(self, slot: int, crc: int, key: bytes, owner: bytes) -> None:
        """Nobody looks for what is not offered."""

    def erase(self, slots: Iterable[int]) -> None:
        """The same."""

    def holds(self, slot: int) -> bool:
        """Whether anything was offered as this slot."""
        return slot in self._offered

    def close(self, wanted: dict[int, bool] | None = None) -> None:
        """Nothing of this is kept."""

    def block_seconds(self) -> float:
        """About what reading a block takes, with its checksum."""
        block = np.zeros(self.block_bytes, np.uint8)
        begun = time.perf_counter()
        for _ in range(_TIMED):
            checksum(b"", block.copy())
        return (time.perf_counter() - begun) / _TIMED


class HandedStore(DiskStore):
    """See `HandedState` and `StoreMemory`."""

    def __init__(self, slots: SharedSlots) -> None:
        super().__init__(slots, slots.block_seconds())
        self._slots = slots

    def checksum(self, slot: int) -> int:
        return self.writer.checksums.pop(slot)

    def offer(self, slot: int, place: int, crc: int) -> None:
        self._slots.offer(slot, place, crc)
