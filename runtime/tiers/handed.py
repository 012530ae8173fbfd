"""Blocks that engines hand each other, as a store below the pool."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from rootlace.runtime.contracts.transfer import BlockLost, Transfer
from rootlace.runtime.tiers.slot_file import DamagedBlock, checksum
from rootlace.runtime.tiers.slot_store import SlotStore

BUFFER_BYTES = 32 << 20
"""Memory for blocks on their way to where others find them, and as much for those that came from
others: what moves between two turns of the loop."""
_TIMED = 8


class HandedBlocks:
    """What a `SlotStore` knows of its file, of a `transfer`.

    `write` is given slots that takers know, which the gateway has given this engine, and `read`
    slots of this engine's own, each of which stands for one of a giver (`offer`). What somebody
    else has written there meanwhile has another checksum.
    """

    path = Path("blocks of other engines") / "slots"

    def __init__(self, transfer: Transfer, block_bytes: int, num_slots: int) -> None:
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.lost = 0
        """Blocks that did not come."""
        self._transfer = transfer
        self._offered: dict[int, tuple[bytes, int, int]] = {}

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        """What this engine calls `slot` is the slot `place` of a giver, and has this checksum."""
        self._offered[slot] = source, place, crc

    def write(self, slot: int, block: np.ndarray) -> None:
        """Have a block (uint8) where takers find it. Raises OSError."""
        self._transfer.put(slot, block)

    def expect(self, slots: Sequence[int]) -> None:
        """Have those that are read next, of one giver, come already."""
        found = [self._offered[slot] for slot in slots]
        source = found[0][0]
        near = [place for _, place, _ in takewhile(lambda one: one[0] == source, found)]
        self._transfer.expect(source, near)

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None:
        """Read a block (uint8), whose checksum is the one that was offered. Raises `DamagedBlock`,
        `BlockLost`, or OSError."""
        source, place, offered = self._offered[slot]
        try:
            self._transfer.take(source, place, into)
        except BlockLost:
            self.lost += 1
            raise
        if checksum(key, into) != offered:
            raise DamagedBlock(f"slot {place} of another engine does not hold what was offered")

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
        """About what taking a block takes, with its checksum: measured by what goes from this
        engine to itself. Raises `BlockLost`, or OSError."""
        block, source = np.empty(self.block_bytes, np.uint8), self._transfer.address
        begun = 0.0
        for count in (1, _TIMED):  # the first is a warm-up
            begun = time.perf_counter()
            for _ in range(count):
                self._transfer.expect(source, [0])
                self._transfer.take(source, 0, block)
                checksum(b"", block)
        return (time.perf_counter() - begun) / _TIMED


class HandedStore(SlotStore):
    """See `HandedState` and `StoreMemory`."""

    def __init__(self, blocks: HandedBlocks) -> None:
        super().__init__(blocks, blocks.block_seconds(), BUFFER_BYTES)
        self._blocks = blocks

    def checksum(self, slot: int) -> int:
        return self.writer.checksums.pop(slot)

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        self._blocks.offer(slot, source, place, crc)

    def stats(self) -> dict[str, int | float]:
        return {**super().stats(), "lost_blocks": self._blocks.lost}
