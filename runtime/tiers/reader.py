"""A thread that reads slots of a file, beside the loop."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np

from rootlace.runtime.contracts.block_store import Done
from rootlace.runtime.contracts.transfer import BlockLost
from rootlace.runtime.tiers.block_file import BlockFile
from rootlace.runtime.tiers.buffers import Buffers
from rootlace.runtime.tiers.slot_file import DamagedBlock
from rootlace.runtime.tiers.switch import Switch

STALL_SECONDS = 10.0
"""A disk that takes longer to read a block hangs."""
READ_LATENCY = 0.002
"""Seconds until what was read is seen by the loop, beside those of reading."""
AHEAD = 4
"""So many blocks are on their way at a time, where something may be on its way."""
_KEPT = 0.95

log = logging.getLogger(__name__)


class Reader:
    """Reads in the order in which it is asked to. See `StoreState` and `StoreMemory`."""

    def __init__(
        self,
        file: BlockFile,
        buffers: Buffers,
        switch: Switch,
        block_seconds: float,
        checksums: Mapping[int, int],
        clock: Callable[[], float],
    ) -> None:
        """`checksums`: of blocks that are not in the index yet. `block_seconds`: what reading a
        block takes, which is learnt."""
        self._file = file
        self._buffers = buffers
        self._switch = switch
        self.block_seconds = block_seconds
        self._checksums = checksums
        self._clock = clock
        self.read_bytes = self.damaged_blocks = 0
        self._change = threading.Condition()
        self._asked: deque[tuple[int, bytes]] = deque()
        self._reading: tuple[int, float] | None = None
        """The slot that is read now, and since when."""
        self._fetched: dict[int, np.ndarray] = {}
        self._done: list[Done] = []
        threading.Thread(target=self._run, name="tier-read", daemon=True).start()

    def fetch(self, slot: int, key: bytes) -> None:
        with self._change:
            self._asked.append((slot, key))
            self._change.notify_all()

    def fetched(self, slot: int) -> np.ndarray:
        return self._fetched[slot]

    def release(self, slot: int) -> None:
        with self._change:
            self._buffers.give_back(self._fetched.pop(slot, None))
            self._change.notify_all()

    def take_done(self) -> list[Done]:
        """What was done since the last call; all that waits has failed where the disk hangs."""
        reading = self._reading
        if reading is not None and self._clock() > reading[1] + STALL_SECONDS:
            self._give_up()
        if not self._done:
            return []
        with self._change:
            done, self._done = self._done, []
            return done

    def seconds(self, blocks: int) -> float:
        return READ_LATENCY + blocks * self.block_seconds

    def refused(self) -> None:
        """The estimate falls a little, so that what was once slow is tried again."""
        self.block_seconds *= _KEPT

    def wake(self) -> None:
        """The store was closed: the thread ends when everything is done."""
        with self._change:
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._asked or not len(self._buffers):
                    if self._switch.closed:
                        return
                    self._change.wait()
                near = [slot for slot, _ in islice(self._asked, AHEAD)]
                slot, key = self._asked.popleft()
                buffer = self._buffers.take()
                self._reading = slot, self._clock()
            ok = self._switch.on and self._read(slot, key, buffer, near)
            self._end(slot, buffer, ok)

    def _end(self, slot: int, buffer: np.ndarray, ok: bool) -> None:
        with self._change:
            if self._reading is None:  # nobody waits for it any more
                self._buffers.give_back(buffer)
                return
            self._reading = None
            if ok:
                self._fetched[slot] = buffer
                self.read_bytes += len(buffer)
            else:
                self._buffers.give_back(buffer)
            self._done.append(Done(slot, read=True, ok=ok))
            self._change.notify_all()

    def _read(self, slot: int, key: bytes, buffer: np.ndarray, near: Sequence[int]) -> bool:
        """`near`: this one and those behind it."""
        before = self._clock()
        try:
            self._file.expect(near)
            self._file.read(slot, key, buffer, self._checksums.get(slot))
        except DamagedBlock as error:
            if not self._file.holds(slot):
                return False  # it was forgotten meanwhile
            self.damaged_blocks += 1
            log.warning("a damaged block is ignored: %s", error)
            return False
        except BlockLost as error:
            log.debug("a block did not come: %s", error)
            return False
        except OSError as error:
            self._switch.off(error)
            return False
        took = self._clock() - before
        self.block_seconds = _KEPT * self.block_seconds + (1 - _KEPT) * took
        return True

    def _give_up(self) -> None:
        with self._change:
            if self._reading is None:
                return
            slots = [self._reading[0], *(slot for slot, _ in self._asked)]
            self._reading = None
            self._asked.clear()
            self._done += [Done(slot, read=True, ok=False) for slot in slots]
        self._switch.off(OSError(f"a block was not read within {STALL_SECONDS:g} s"))
