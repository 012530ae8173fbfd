"""A store of slots that are written and read beside the loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from rootlace.runtime.contracts.block_store import Done
from rootlace.runtime.tiers.block_file import BlockFile
from rootlace.runtime.tiers.buffers import Buffers
from rootlace.runtime.tiers.reader import Reader
from rootlace.runtime.tiers.switch import Switch
from rootlace.runtime.tiers.writer import Writer

LEAST_BUFFERS = 2

log = logging.getLogger(__name__)


class SlotStore:
    """See `StoreState` and `StoreMemory`: a `writer` and a `reader` of one file, or of what stands
    for one. What goes wrong with a write switches it off, with a warning: nothing is written or
    read after that. So does a read that hangs."""

    def __init__(
        self,
        file: BlockFile,
        block_seconds: float,
        buffer_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`block_seconds`: what reading a block takes. `buffer_bytes`: memory for blocks on their
        way there, and as much for those on their way back."""
        self._file = file
        self._switch = Switch(file.path.parent)
        self.num_slots = file.num_slots
        count = max(buffer_bytes // file.block_bytes, LEAST_BUFFERS)
        there, back = (
            Buffers(count, lambda: np.empty(file.block_bytes, np.uint8)) for _ in range(2)
        )
        self.writer = Writer(file, there, self._switch)
        checksums = self.writer.checksums
        self.reader = Reader(file, back, self._switch, block_seconds, checksums, clock)

    @property
    def working(self) -> bool:
        return self._switch.on

    @property
    def room(self) -> int:
        return self.writer.room if self._switch.on else 0

    def reserve(self, slot: int, key: bytes) -> None:
        self.writer.reserve(slot, key)

    def cancel(self, slot: int) -> None:
        self.writer.cancel(slot)

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        self.writer.publish(slot, key, owner)

    def erase(self, slots: list[int]) -> None:
        self.writer.erase(slots)

    def fetch(self, slot: int, key: bytes) -> None:
        self.reader.fetch(slot, key)

    def release(self, slot: int) -> None:
        self.reader.release(slot)

    def poll(self) -> list[Done]:
        return self.writer.take_done() + self.reader.take_done()

    def seconds(self, blocks: int) -> float:
        return self.reader.seconds(blocks)

    def refused(self) -> None:
        self.reader.refused()

    def stats(self) -> dict[str, int | float]:
        return {
            "written_bytes": self.writer.written_bytes,
            "read_bytes": self.reader.read_bytes,
            "damaged_blocks": self.reader.damaged_blocks,
            "working": int(self.working),
        }

    # ------------------------------------------------------------ memory

    def buffer(self, slot: int) -> np.ndarray:
        return self.writer.buffer(slot)

    def filled(self, slot: int) -> None:
        self.writer.filled(slot)

    def fetched(self, slot: int) -> np.ndarray:
        return self.reader.fetched(slot)

    def loaded(self, slot: int) -> None:
        self.reader.release(slot)

    def close(self, wanted: dict[int, bool] | None = None, seconds: float = 1.0) -> bool:
        """Write what was asked for, in so much time, and close the files; False if that took
        longer, then something may still be written. `wanted`: see `SlotFile.close`."""
        finished = self.writer.wait(seconds)
        self._switch.closed = True
        self.writer.wake()
        self.reader.wake()
        if finished:
            try:
                self._file.close(wanted if self.working else None)
            except OSError as error:  # the records that are there go on as they are
                log.warning("%s: the order of the blocks is not kept: %s", self._file.path, error)
        return finished
