"""A store on a disk: a thread that writes slots, and one that reads them, beside the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from rootlace.runtime.contracts.block_store import Done
from rootlace.runtime.tiers.slot_file import DamagedBlock, Kept, SlotFile, checksum

BUFFER_BYTES = 256 << 20
"""Memory for blocks on their way to the disk, and as much for those on their way back."""
LEAST_BUFFERS = 2
STALL_SECONDS = 10.0
"""A disk that takes longer to read a block hangs."""
READ_LATENCY = 0.002
"""Seconds until what was read is seen by the loop, beside those of reading."""
_KEPT = 0.95

log = logging.getLogger(__name__)


class DiskStore:
    """See `StoreState` and `StoreMemory`. What goes wrong with a write switches it off, with a
    warning: nothing is written or read after that. So does a read that hangs."""

    def __init__(
        self,
        file: SlotFile,
        block_seconds: float,
        new_buffer: Callable[[int], np.ndarray] = lambda size: np.empty(size, np.uint8),
        buffer_bytes: int = BUFFER_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`block_seconds`: what reading a block takes. `new_buffer` makes uint8 arrays."""
        self._clock = clock
        self._file = file
        self._block_seconds = block_seconds
        self._new_buffer = new_buffer
        self._change = threading.Condition()
        count = max(buffer_bytes // file.block_bytes, LEAST_BUFFERS)
        self._spare: dict[bool, list[np.ndarray]] = {False: [], True: []}
        """Buffers in no use, those for reading under True."""
        self._unmade = {False: count, True: count}
        self._room = count
        self._filling: dict[int, tuple[bytes, np.ndarray | None]] = {}
        """Slots that moves are planned into: key and buffer, once there is one."""
        self._checksums: dict[int, int] = {}
        """Of blocks that were written and are not in the index yet."""
        self._writes: deque[Callable[[], None]] = deque()
        self._reads: deque[tuple[int, bytes]] = deque()
        self._reading: tuple[int, float] | None = None
        """The slot that is read now, and since when."""
        self._fetched: dict[int, np.ndarray] = {}
        self._done: list[Done] = []
        self._busy = 0
        """Tasks that were begun."""
        self._working = True
        self._closed = False
        self._count = {"written_bytes": 0, "read_bytes": 0, "damaged_blocks": 0}
        for name, run in (("tier-write", self._write_all), ("tier-read", self._read_all)):
            threading.Thread(target=run, name=name, daemon=True).start()

    # ------------------------------------------------------------ state

    @property
    def num_slots(self) -> int:
        return self._file.num_slots

    @property
    def block_bytes(self) -> int:
        return self._file.block_bytes

    @property
    def working(self) -> bool:
        return self._working

    @property
    def room(self) -> int:
        return self._room if self._working else 0

    def kept(self) -> list[Kept]:
        """What earlier processes left, that which was used longest ago first."""
        return self._file.kept()

    def reserve(self, slot: int, key: bytes) -> None:
        with self._change:
            self._room -= 1
            self._filling[slot] = key, None

    def cancel(self, slot: int) -> None:
        with self._change:
            self._give_back(False, self._filling.pop(slot)[1])
            self._room += 1

    def publish(self, slot: int, key: bytes, owner: bytes, digest: int) -> None:
        self._ask(lambda: self._publish(slot, key, owner, digest))

    def erase(self, slots: list[int]) -> None:
        if slots:
            self._ask(lambda: self._file.erase(slots))

    def fetch(self, slot: int, key: bytes) -> None:
        with self._change:
            self._reads.append((slot, key))
            self._change.notify_all()

    def release(self, slot: int) -> None:
        with self._change:
            self._give_back(True, self._fetched.pop(slot, None))
            self._change.notify_all()

    def poll(self) -> list[Done]:
        reading = self._reading
        if reading is not None and self._clock() > reading[1] + STALL_SECONDS:
            self._give_up_reading()
        if not self._done:
            return []
        with self._change:
            done, self._done = self._done, []
            return done

    def seconds(self, blocks: int) -> float:
        return READ_LATENCY + blocks * self._block_seconds

    def refused(self) -> None:
        """The estimate falls a little, so that what was once slow is tried again."""
        self._block_seconds *= _KEPT

    def stats(self) -> dict[str, int | float]:
        return {**self._count, "working": int(self._working)}

    # ------------------------------------------------------------ memory

    def buffer(self, slot: int) -> np.ndarray:
        with self._change:
            key, buffer = self._filling[slot]
            if buffer is None:
                buffer = self._take(False)
                self._filling[slot] = key, buffer
            return buffer

    def filled(self, slot: int) -> None:
        key, buffer = self._filling.pop(slot)
        assert buffer is not None
        block = buffer
        self._ask(lambda: self._write(slot, key, block))

    def fetched(self, slot: int) -> np.ndarray:
        return self._fetched[slot]

    def loaded(self, slot: int) -> None:
        self.release(slot)

    # ------------------------------------------------------------ ending

    def wait(self, seconds: float) -> bool:
        """Wait until all that was asked to be written is; False if that takes longer."""
        end = time.monotonic() + seconds
        with self._change:
            while self._writes or self._busy:
                left = end - time.monotonic()
                if left <= 0 or not self._change.wait(left):
                    return not (self._writes or self._busy)
        return True

    def close(self, wanted: dict[int, bool] | None = None, seconds: float = 1.0) -> bool:
        """Write what was asked for, in so much time, and close the files; False if that took
        longer, then something may still be written. `wanted`: see `SlotFile.close`."""
        finished = self.wait(seconds)
        with self._change:
            self._closed = True
            self._change.notify_all()
        if finished:
            self._file.close(wanted if self._working else None)
        return finished

    # ------------------------------------------------------------ threads

    def _ask(self, task: Callable[[], None]) -> None:
        with self._change:
            self._writes.append(task)
            self._change.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._change:
                while not self._writes:
                    if self._closed:
                        return
                    self._change.wait()
                task = self._writes.popleft()
                self._busy += 1
            try:
                task()
            except OSError as error:
                self._switch_off(error)
            with self._change:
                self._busy -= 1
                self._change.notify_all()

    def _write(self, slot: int, key: bytes, block: np.ndarray) -> None:
        ok = False
        try:
            if self._working:
                self._file.write(slot, block)
                self._checksums[slot] = checksum(key, block)
                ok = True
        finally:
            with self._change:
                if ok:
                    self._count["written_bytes"] += len(block)
                self._give_back(False, block)
                self._room += 1
                self._done.append(Done(slot, read=False, ok=ok))

    def _publish(self, slot: int, key: bytes, owner: bytes, digest: int) -> None:
        self._file.publish(slot, self._checksums[slot], key, owner, digest)
        del self._checksums[slot]

    def _read_all(self) -> None:
        while True:
            with self._change:
                while not self._reads or not (self._spare[True] or self._unmade[True]):
                    if self._closed:
                        return
                    self._change.wait()
                slot, key = self._reads.popleft()
                buffer = self._take(True)
                self._reading = slot, self._clock()
            ok = self._working and self._read(slot, key, buffer)
            self._end_reading(slot, buffer, ok)

    def _end_reading(self, slot: int, buffer: np.ndarray, ok: bool) -> None:
        with self._change:
            if self._reading is None:  # nobody waits for it any more
                self._give_back(True, buffer)
                return
            self._reading = None
            if ok:
                self._fetched[slot] = buffer
                self._count["read_bytes"] += len(buffer)
            else:
                self._give_back(True, buffer)
            self._done.append(Done(slot, read=True, ok=ok))
            self._change.notify_all()

    def _read(self, slot: int, key: bytes, buffer: np.ndarray) -> bool:
        before = self._clock()
        try:
            self._file.read(slot, key, buffer, self._checksums.get(slot))
        except DamagedBlock as error:
            if not self._file.holds(slot):
                return False  # it was forgotten meanwhile
            self._count["damaged_blocks"] += 1
            log.warning("a damaged block is ignored: %s", error)
            return False
        except OSError as error:
            self._switch_off(error)
            return False
        took = self._clock() - before
        self._block_seconds = _KEPT * self._block_seconds + (1 - _KEPT) * took
        return True

    def _give_up_reading(self) -> None:
        with self._change:
            if self._reading is None:
                return
            slots = [self._reading[0], *(slot for slot, _ in self._reads)]
            self._reading = None
            self._reads.clear()
            self._done += [Done(slot, read=True, ok=False) for slot in slots]
        self._switch_off(OSError(f"a block was not read within {STALL_SECONDS:g} s"))

    def _switch_off(self, error: OSError) -> None:
        if self._working and not self._closed:
            self._working = False
            log.warning("%s: blocks are kept on disk no longer: %s", self._file.path.parent, error)

    # ------------------------------------------------------------ buffers, with the lock held

    def _take(self, for_reading: bool) -> np.ndarray:
        spare = self._spare[for_reading]
        if spare:
            return spare.pop()
        assert self._unmade[for_reading] > 0, "more blocks are on their way than were reserved"
        self._unmade[for_reading] -= 1
        return self._new_buffer(self._file.block_bytes)

    def _give_back(self, for_reading: bool, buffer: np.ndarray | None) -> None:
        if buffer is not None:
            self._spare[for_reading].append(buffer)
