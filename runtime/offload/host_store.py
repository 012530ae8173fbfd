"""Stores without a disk: host memory, and blocks that other engines transfer.

Sections: host memory, read speed of a disk, transferred blocks.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from rootlace.runtime.contracts.block_store import BlockLost, Done, Transfer
from rootlace.runtime.offload.disk_store import FULL, DamagedBlock, Kept, SlotFile, checksum

# Host memory --------------------------------------------------------------------------------------


class HostStore:
    """A store in host memory, which the device copies from and to; gone with the process.

    See `StoreState` and `StoreMemory`.
    """

    working = True

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        block_seconds: float,
        new_memory: Callable[[int], np.ndarray] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        """`block_seconds`: time to copy a block. `new_memory` makes a uint8 array."""
        self.num_slots = num_slots
        self._slots = new_memory(num_slots * block_bytes).reshape(num_slots, block_bytes)
        self._block_seconds = block_seconds
        self._done: list[Done] = []
        self._read_bytes = self._written_bytes = 0

    @property
    def room(self) -> int:
        return self.num_slots

    def reserve(self, slot: int, key: bytes) -> None:
        pass

    def cancel(self, slot: int) -> None:
        pass

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        pass

    def erase(self, slots: list[int]) -> None:
        pass

    def fetch(self, slot: int, key: bytes) -> None:
        self._done.append(Done(slot, read=True, ok=True))

    def release(self, slot: int) -> None:
        pass

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def seconds(self, blocks: int) -> float:
        return blocks * self._block_seconds

    def refused(self) -> None:
        pass

    def stats(self) -> dict[str, int | float]:
        return {"written_bytes": self._written_bytes, "read_bytes": self._read_bytes}

    # ------------------------------------------------------------ memory

    def buffer(self, slot: int) -> np.ndarray:
        return self._slots[slot]

    def filled(self, slot: int) -> None:
        self._written_bytes += self._slots.shape[1]
        self._done.append(Done(slot, read=False, ok=True))

    def fetched(self, slot: int) -> np.ndarray:
        return self._slots[slot]

    def loaded(self, slot: int) -> None:
        self._read_bytes += self._slots.shape[1]


# Read speed ---------------------------------------------------------------------------------------


PROBE_BYTES = 32 << 20
_MOST = 32
ASSUMED_RATE = 500e6
"""Bytes per second that a disk without room for a probe is taken to read."""
PROBE = "probe"


def block_seconds(file: SlotFile, folder: Path, kept: Sequence[Kept]) -> float:
    """Measured seconds to read a block and its checksum in random order.

    Reads existing blocks or, if few, a temporary file: at most 32 blocks and 32 MiB, at least one
    block. A full disk, or a used-up quota, has no room for the file: without blocks its rate is
    assumed. Raises OSError.
    """
    count = min(max(PROBE_BYTES // file.block_bytes, 1), _MOST)
    if len(kept) < count and file.free_bytes() >= count * file.block_bytes:
        try:
            return _probe_seconds(folder / PROBE, file.block_bytes, count)
        except OSError as error:
            if error.errno not in FULL:
                raise
    if not kept:
        return file.block_bytes / ASSUMED_RATE
    return _kept_seconds(file, kept, min(count, len(kept)))


def _kept_seconds(file: SlotFile, kept: Sequence[Kept], count: int) -> float:
    """Seconds to read each of `count` kept blocks."""
    buffer = np.empty(file.block_bytes, np.uint8)
    file.forget_pages()
    order = np.random.default_rng(0).choice(len(kept), count, replace=False)
    chosen = [kept[at] for at in order.tolist()]
    begun = time.perf_counter()
    for one in chosen:
        try:
            file.read(one.slot, one.key, buffer)
        except DamagedBlock:
            continue  # the request that reads the block reports the damage
    return (time.perf_counter() - begun) / count


def _probe_seconds(path: Path, size: int, count: int) -> float:
    """Seconds to read each of `count` blocks of a file that is written for it."""
    order = np.random.default_rng(0)
    probe = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        buffer = np.resize(order.integers(0, 256, 65536, np.uint8), size)
        for _ in range(count):
            os.write(probe, buffer.data)
        os.fdatasync(probe)
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        for at in order.permutation(count).tolist():
            os.preadv(probe, [buffer.data], at * size)
            zlib.crc32(buffer.data)
        return (time.perf_counter() - begun) / count
    finally:
        os.close(probe)
        path.unlink(missing_ok=True)


# Transferred blocks -------------------------------------------------------------------------------


_TIMED = 8


class HandedBlocks:
    """The file of a `SlotStore` of transferred blocks.

    `write` fills slots that the gateway has given this engine and takers know. `read` takes local
    slots, each of which stands for a giver's slot (`offer`). A slot overwritten meanwhile has
    another checksum.
    """

    path = Path("blocks of other engines") / "slots"

    def __init__(self, transfer: Transfer, block_bytes: int, num_slots: int) -> None:
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.lost = 0
        """Count of blocks that did not come."""
        self._transfer = transfer
        self._offered: dict[int, tuple[bytes, int, int]] = {}

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        """Let `slot` stand for slot `place` of the giver `source`, with the checksum `crc`."""
        self._offered[slot] = source, place, crc

    def write(self, slot: int, block: np.ndarray) -> None:
        """Make a block (uint8) available to takers. Raises OSError."""
        self._transfer.put(slot, block)

    def expect(self, slots: Sequence[int]) -> None:
        """Announce the next reads, of one giver, so that blocks may be sent ahead."""
        found = [self._offered[slot] for slot in slots]
        source = found[0][0]
        near = [place for _, place, _ in takewhile(lambda one: one[0] == source, found)]
        self._transfer.expect(source, near)

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None:
        """Read a block (uint8) whose checksum must equal the offered one.

        Raises `DamagedBlock`, `BlockLost`, or OSError.
        """
        source, place, offered = self._offered[slot]
        try:
            self._transfer.take(source, place, into)
        except BlockLost:
            self.lost += 1
            raise
        if checksum(key, into) != offered:
            raise DamagedBlock(f"slot {place} of another engine does not hold what was offered")

    def publish(self, slot: int, crc: int, key: bytes, owner: bytes) -> None:
        """Do nothing: only offered blocks are found."""

    def erase(self, slots: Iterable[int]) -> None:
        """Do nothing: only offered blocks are found."""

    def holds(self, slot: int) -> bool:
        """Whether a block was offered as this slot."""
        return slot in self._offered

    def close(self, wanted: dict[int, bool] | None = None) -> None:
        """Do nothing: no block outlives the process."""

    def block_seconds(self) -> float:
        """Seconds to take a block with its checksum, measured on blocks from this engine to itself.

        Raises `BlockLost`, or OSError.
        """
        block, source = np.empty(self.block_bytes, np.uint8), self._transfer.address
        begun = 0.0
        for count in (1, _TIMED):  # the first is a warm-up
            begun = time.perf_counter()
            for _ in range(count):
                self._transfer.expect(source, [0])
                self._transfer.take(source, 0, block)
                checksum(b"", block)
        return (time.perf_counter() - begun) / _TIMED
