"""A store of slots that threads write and read beside the loop.

 loop: reserve, buffer, filled --> thread --> file --> thread --> fetched, loaded

Sections: buffers, switch, slot store, transferred blocks, host memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from pathlib import Path

import msgspec
import numpy as np

from rootlace.runtime.contracts.block_store import BlockLost, Done, StoreState, Transfer
from rootlace.runtime.offload.disk_store import (
    FULL,
    HEADER_BYTES,
    RECORD,
    DamagedBlock,
    SlotFile,
    StoredBlock,
    blocks_of,
    checksum,
    new_record,
    record_check,
)

# Buffers ------------------------------------------------------------------------------------------


class Buffers:
    """A bounded pool of arrays, made by `new` on demand; the caller holds the queue's lock."""

    def __init__(self, count: int, new: Callable[[], np.ndarray]) -> None:
        self._unmade = count
        self._new = new
        self._spare: list[np.ndarray] = []

    def __len__(self) -> int:
        """Count of arrays that can be taken now."""
        return len(self._spare) + self._unmade

    def take(self) -> np.ndarray:
        if self._spare:
            return self._spare.pop()
        assert self._unmade > 0, "more blocks are on their way than were reserved"
        self._unmade -= 1
        return self._new()

    def give_back(self, buffer: np.ndarray | None) -> None:
        if buffer is not None:
            self._spare.append(buffer)


# Switch -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 64.0
"""Seconds until a full disk is written to again; each pause is twice the one before."""


class Switch:
    """On until the store fails; no failure counts after `closed`.

    A full disk is still read, and written to again after a pause.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self.on = True
        self.closed = False
        self._pause = self._until = 0.0

    @property
    def full(self) -> bool:
        """Whether the last write found no room."""
        return self._pause > 0

    @property
    def writes(self) -> bool:
        return self.on and (not self._pause or self._clock() >= self._until)

    def wrote(self) -> None:
        if self._pause:
            self._pause = 0.0
            log.warning("%s: there is room again; blocks are kept there", self._path)

    def failed(self, error: OSError) -> None:
        """Note that a write failed."""
        if error.errno not in FULL:
            self.off(error)
            return
        if not self._pause:
            log.warning("%s: no more blocks are kept there for now: %s", self._path, error)
        self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        self._until = self._clock() + self._pause

    def hurry(self) -> None:
        """Let a full disk be written to now."""
        self._until = self._clock()

    def off(self, error: OSError) -> None:
        """Switch the store off: no more reads or writes."""
        if self.on and not self.closed:
            self.on = False
            log.warning("%s: no blocks are kept there any more: %s", self._path, error)


# Slot store ---------------------------------------------------------------------------------------


STALL_SECONDS = 10.0
"""Seconds after which a read counts as hanging."""
GAP_SECONDS = 1.0
"""Bound of the time that one turn of `poll` adds to a read's seconds: a pause of this process is
not a pause of the disk."""
READ_LATENCY = 0.002
"""Seconds from the end of a read until the loop sees the block."""
AHEAD = 4
"""Blocks announced ahead, where blocks can be sent ahead."""
_KEPT = 0.95
FARTHEST = 8.0
"""Largest factor of a read's time over the expected time: a read during a pause of the machine
predicts nothing."""
LEAST_BUFFERS = 2


class _Read(msgspec.Struct):
    """A slot being read: when `poll` last saw it, or its start, and its seconds until then."""

    slot: int
    polled: float
    seconds: float = 0.0


class SlotStore:
    """The slots of a file, in order of requests: see `StoreState` and `StoreMemory`.

    One thread writes, publishes and erases, another one reads. A failed write switches the store
    off, with a warning; so does a read that hangs. No read or write follows. On a full disk writing
    and erasing alone pause: what is there is read.
    """

    def __init__(
        self,
        file: SlotFile | HandedBlocks,
        block_seconds: float,
        buffer_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`block_seconds`: initial estimate of the time to read a block.

        `buffer_bytes`: memory for blocks being written, and as much for blocks being read.
        """
        self._file = file
        self._clock = clock
        self._switch = Switch(file.path.parent, clock)
        self.num_slots = file.num_slots
        self.block_seconds = block_seconds
        self._change = threading.Condition()
        self._done: list[Done] = []
        self._written_bytes = self._read_bytes = self._damaged_blocks = 0
        count = max(buffer_bytes // file.block_bytes, LEAST_BUFFERS)
        self._there, self._back = (
            Buffers(count, lambda: np.empty(file.block_bytes, np.uint8)) for _ in range(2)
        )
        self.unreserved = count
        """Buffers that planned moves may fill."""
        self._filling: dict[int, tuple[bytes, np.ndarray | None]] = {}
        """Slots of planned moves -> key, and buffer once there is one."""
        self._tasks: deque[Callable[[], None]] = deque()
        """Tasks of the writing thread."""
        self._unerased: set[int] = set()
        """Slots to be erased when the disk has room for that; for the thread that writes."""
        self._busy = False
        self._checksums: dict[int, int] = {}
        """Checksums of written blocks that are not indexed yet."""
        self._reads: deque[tuple[int, bytes]] = deque()
        """Slots and keys for the reading thread."""
        self._reading: _Read | None = None
        self._fetched: dict[int, np.ndarray] = {}
        for name, run in (("tier-write", self._run_tasks), ("tier-read", self._run_reads)):
            threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def working(self) -> bool:
        return self._switch.on

    @property
    def writable_slots(self) -> int:
        return self.unreserved if self._switch.writes else 0

    def poll(self) -> list[Done]:
        """Also fails all waiting reads if the disk hangs."""
        if (reading := self._reading) is not None:
            now = self._clock()
            reading.seconds += min(now - reading.polled, GAP_SECONDS)
            reading.polled = now
            if reading.seconds > STALL_SECONDS:
                self._give_up()
        if not self._done:
            return []
        with self._change:
            done, self._done = self._done, []
            return done

    def stats(self) -> dict[str, int | float]:
        return {
            "written_bytes": self._written_bytes,
            "read_bytes": self._read_bytes,
            "damaged_blocks": self._damaged_blocks,
            "working": int(self.working),
            "failed": int(not self.working),
            "full": int(self._switch.full),
        }

    def close(self, wanted: dict[int, bool] | None = None, seconds: float = 1.0) -> bool:
        """Finish queued writes within `seconds` and close the files.

        Returns False if that took longer; then a write may still be running. `wanted`: see
        `SlotFile.close`.
        """
        self.ask(self._switch.hurry)
        self.ask(lambda: self._erase([]))
        finished = self.wait(seconds)
        if finished and self._unerased:
            count = len(self._unerased)
            log.warning("%s: %d blocks could not be erased", self._file.path, count)
        with self._change:
            self._switch.closed = True
            self._change.notify_all()
        if finished:
            try:
                self._file.close(wanted if self.working else None)
            except OSError as error:  # existing records keep their old order
                log.warning("%s: the order of the blocks is not kept: %s", self._file.path, error)
        return finished

    # ------------------------------------------------------------ writing

    def reserve(self, slot: int, key: bytes) -> None:
        with self._change:
            self.unreserved -= 1
            self._filling[slot] = key, None

    def cancel(self, slot: int) -> None:
        with self._change:
            self._there.give_back(self._filling.pop(slot)[1])
            self.unreserved += 1

    def buffer(self, slot: int) -> np.ndarray:
        with self._change:
            key, buffer = self._filling[slot]
            if buffer is None:
                buffer = self._there.take()
                self._filling[slot] = key, buffer
            return buffer

    def filled(self, slot: int) -> None:
        key, buffer = self._filling.pop(slot)
        assert buffer is not None
        block = buffer
        self.ask(lambda: self._write(slot, key, block))

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        self.ask(lambda: self._publish(slot, key, owner))

    def erase(self, slots: list[int]) -> None:
        if slots:
            self.ask(lambda: self._erase(slots))

    def ask(self, task: Callable[[], None]) -> None:
        """Queue a task of the thread that writes behind all earlier ones."""
        with self._change:
            self._tasks.append(task)
            self._change.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until all queued tasks are done; False after `seconds`."""
        with self._change:
            return self._change.wait_for(lambda: not (self._tasks or self._busy), max(seconds, 0.0))

    def _run_tasks(self) -> None:
        while True:
            with self._change:
                while not self._tasks:
                    if self._switch.closed:
                        return
                    if self._unerased and self._switch.writes:
                        self._tasks.append(lambda: self._erase([]))
                    else:
                        again = self._unerased and self._switch.on
                        self._change.wait(FIRST_PAUSE if again else None)
                task = self._tasks.popleft()
                self._busy = True
            try:
                task()
            except OSError as error:
                self._switch.failed(error)
            with self._change:
                self._busy = False
                self._change.notify_all()

    def _publish(self, slot: int, key: bytes, owner: bytes) -> None:
        self._file.publish(slot, self._checksums[slot], key, owner)
        del self._checksums[slot]

    def _erase(self, slots: list[int]) -> None:
        """Raises OSError; then the slots wait, as the next start would find what is forgotten."""
        waited = bool(self._unerased)
        self._unerased.update(slots)
        if waited and not self._switch.writes:
            return
        self._file.erase(self._unerased)
        self._unerased.clear()
        if waited:
            self._switch.wrote()

    def _write(self, slot: int, key: bytes, block: np.ndarray) -> None:
        ok = False
        try:
            if self._switch.writes:
                self._file.write(slot, block)
                self._unerased.discard(slot)  # the write erased it
                self._checksums[slot] = checksum(key, block)
                self._switch.wrote()
                ok = True
        finally:
            with self._change:
                if ok:
                    self._written_bytes += len(block)
                self._there.give_back(block)
                self.unreserved += 1
                self._done.append(Done(slot, read=False, ok=ok))

    # ------------------------------------------------------------ reading

    def fetch(self, slot: int, key: bytes) -> None:
        with self._change:
            self._reads.append((slot, key))
            self._change.notify_all()

    def fetched(self, slot: int) -> np.ndarray:
        return self._fetched[slot]

    def release(self, slot: int) -> None:
        with self._change:
            self._back.give_back(self._fetched.pop(slot, None))
            self._change.notify_all()

    loaded = release

    def seconds(self, blocks: int) -> float:
        return READ_LATENCY + blocks * self.block_seconds

    def refused(self) -> None:
        """Lower the estimate a little, so that a store that was slow is tried again."""
        self.block_seconds *= _KEPT

    def _run_reads(self) -> None:
        while True:
            with self._change:
                while not self._reads or not len(self._back):
                    if self._switch.closed:
                        return
                    self._change.wait()
                near = [slot for slot, _ in islice(self._reads, AHEAD)]
                slot, key = self._reads.popleft()
                buffer = self._back.take()
                self._reading = _Read(slot, self._clock())
            ok = self._switch.on and self._read(slot, key, buffer, near)
            with self._change:
                given_up, self._reading = self._reading is None, None
                if ok and not given_up:
                    self._fetched[slot] = buffer
                    self._read_bytes += len(buffer)
                else:
                    self._back.give_back(buffer)
                if not given_up:
                    self._done.append(Done(slot, read=True, ok=ok))

    def _read(self, slot: int, key: bytes, buffer: np.ndarray, near: Sequence[int]) -> bool:
        """Read a slot; `near`: this slot and the next ones."""
        before = self._clock()
        try:
            self._file.expect(near)
            self._file.read(slot, key, buffer, self._checksums.get(slot))
        except DamagedBlock as error:
            if not self._file.holds(slot):
                return False  # the block was forgotten meanwhile
            self._damaged_blocks += 1
            log.warning("a damaged block is ignored: %s", error)
            return False
        except BlockLost as error:
            log.debug("a block did not come: %s", error)
            return False
        except OSError as error:
            self._switch.off(error)
            return False
        took = self._clock() - before
        took = min(took, FARTHEST * self.block_seconds or took)
        self.block_seconds = _KEPT * self.block_seconds + (1 - _KEPT) * took
        return True

    def _give_up(self) -> None:
        with self._change:
            if self._reading is None:
                return
            slots = [self._reading.slot, *(slot for slot, _ in self._reads)]
            self._reading = None
            self._reads.clear()
            self._done += [Done(slot, read=True, ok=False) for slot in slots]
        self._switch.off(OSError(f"a block was not read within {STALL_SECONDS:g} s"))


# Transferred blocks -------------------------------------------------------------------------------


BUFFER_BYTES = 32 << 20
"""Bytes for blocks to be transferred, and as many for received blocks, between turns of the loop.
"""


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
        offers = [self._offered[slot] for slot in slots]
        source = offers[0][0]
        near = [place for _, place, _ in takewhile(lambda one: one[0] == source, offers)]
        self._transfer.expect(source, near)

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None:
        """Read a block (uint8); its checksum must equal the offered one. Raises `DamagedBlock`,
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
        """Do nothing: only offered blocks are found."""

    def erase(self, slots: Iterable[int]) -> None:
        """Do nothing: only offered blocks are found."""

    def holds(self, slot: int) -> bool:
        """Return whether a block was offered as this slot."""
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


class HandedStore(SlotStore):
    """See `HandedState` and `StoreMemory`."""

    def __init__(self, blocks: HandedBlocks) -> None:
        super().__init__(blocks, blocks.block_seconds(), BUFFER_BYTES)
        self._blocks = blocks

    def checksum(self, slot: int) -> int:
        return self._checksums.pop(slot)

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        self._blocks.offer(slot, source, place, crc)

    def stats(self) -> dict[str, int | float]:
        return {**super().stats(), "lost_blocks": self._blocks.lost}


# Host memory --------------------------------------------------------------------------------------


class HostStore(StoreState):
    """A store in memory that outlives the process where another one holds it, too.

     header | record of slot 0 | record of slot 1 | ... | slot 0 | slot 1 | ...

    A record is written behind its block and erased before the next one, so that a killed process
    leaves no half of a block. See `StoreState` and `StoreMemory`.
    """

    def __init__(self, memory: int, identity: bytes, num_slots: int, block_bytes: int) -> None:
        """`memory`: a file descriptor, closed here, of memory that is empty or an earlier store's.

        Blocks of another identity (32 bytes) or layout are dropped. Raises OSError.
        """
        sizes = (num_slots.to_bytes(8, "little"), block_bytes.to_bytes(8, "little"))
        header = b"".join((identity, *sizes)).ljust(HEADER_BYTES, b"\0")
        begin = HEADER_BYTES + num_slots * RECORD.itemsize
        begin += -begin % mmap.PAGESIZE
        try:
            os.ftruncate(memory, begin + num_slots * block_bytes)
            self.bytes = np.frombuffer(mmap.mmap(memory, 0), np.uint8)
            """All of the memory, uint8."""
        finally:
            os.close(memory)
        self.num_slots = num_slots
        self._records = self.bytes[HEADER_BYTES:begin][: num_slots * RECORD.itemsize].view(RECORD)
        self._slots = self.bytes[begin:].reshape(num_slots, block_bytes)
        if self.bytes[:HEADER_BYTES].tobytes() != header:
            self._records["filled"] = 0
            self.bytes[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        self.block_seconds = 0.0
        """Time to copy a block."""
        self._done: list[Done] = []
        self._read_bytes = self._written_bytes = 0

    def stored_blocks(self) -> list[StoredBlock]:
        """Blocks that an earlier process left, the least recently written first."""
        for slot in np.flatnonzero(self._records["filled"]).tolist():
            record = self._records[slot : slot + 1]
            if record["check"][0] != record_check(record):  # killed in the middle of it
                record["filled"] = 0
        return blocks_of(self._records)

    def publish(self, slot: int, key: bytes, owner: bytes) -> None:
        self._records[slot] = new_record(key, owner)[0]

    def erase(self, slots: list[int]) -> None:
        self._records["filled"][slots] = 0

    def fetch(self, slot: int, key: bytes) -> None:
        self._done.append(Done(slot, read=True, ok=True))

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def seconds(self, blocks: int) -> float:
        return blocks * self.block_seconds

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
