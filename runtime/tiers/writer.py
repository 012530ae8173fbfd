"""A thread that writes slots of a file and its index, beside the loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from rootlace.runtime.contracts.block_store import Done
from rootlace.runtime.tiers.block_file import BlockFile
from rootlace.runtime.tiers.buffers import Buffers
from rootlace.runtime.tiers.slot_file import checksum
from rootlace.runtime.tiers.switch import Switch


class Writer:
    """Does what it is asked to in that order. See `StoreState` and `StoreMemory`."""

    def __init__(self, file: BlockFile, buffers: Buffers, switch: Switch) -> None:
        self._file = file
        self._buffers = buffers
        self._switch = switch
        self.room = len(buffers)
        self.checksums: dict[int, int] = {}
        """Of blocks that were written and are not in the index yet."""
        self.written_bytes = 0
        self._filling: dict[int, tuple[bytes, np.ndarray | None]] = {}
        """Slots that moves are planned into: key and buffer, once there is one."""
        self._change = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._busy = False
        self._done: list[Done] = []
        threading.Thread(target=self._run, name="tier-write", daemon=True).start()

    def reserve(self, slot: int, key: bytes) -> None:
        with self._change:
            self.room -= 1
            self._filling[slot] = key, None

    def cancel(self, slot: int) -> None:
        with self._change:
            self._buffers.give_back(self._filling.pop(slot)[1])
            self.room += 1

    def buffer(self, slot: int) -> np.ndarray:
        with self._change:
            key, buffer = self._filling[slot]
            if buffer is None:
                buffer = self._buffers.take()
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
            self.ask(lambda: self._file.erase(slots))

    def ask(self, task: Callable[[], None]) -> None:
        """Do this after all that was asked for before."""
        with self._change:
            self._tasks.append(task)
            self._change.notify_all()

    def take_done(self) -> list[Done]:
        """What was done since the last call."""
        if not self._done:
            return []
        with self._change:
            done, self._done = self._done, []
            return done

    def wait(self, seconds: float) -> bool:
        """Wait until all that was asked for is done; False if that takes longer."""
        end = time.monotonic() + seconds
        with self._change:
            while self._tasks or self._busy:
                left = end - time.monotonic()
                if left <= 0 or not self._change.wait(left):
                    return not (self._tasks or self._busy)
        return True

    def wake(self) -> None:
        """The store was closed: the thread ends when everything is done."""
        with self._change:
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._tasks:
                    if self._switch.closed:
                        return
                    self._change.wait()
                task = self._tasks.popleft()
                self._busy = True
            try:
                task()
            except OSError as error:
                self._switch.off(error)
            with self._change:
                self._busy = False
                self._change.notify_all()

    def _publish(self, slot: int, key: bytes, owner: bytes) -> None:
        self._file.publish(slot, self.checksums[slot], key, owner)
        del self.checksums[slot]

    def _write(self, slot: int, key: bytes, block: np.ndarray) -> None:
        ok = False
        try:
            if self._switch.on:
                self._file.write(slot, block)
                self.checksums[slot] = checksum(key, block)
                ok = True
        finally:
            with self._change:
                if ok:
                    self.written_bytes += len(block)
                self._buffers.give_back(block)
                self.room += 1
                self._done.append(Done(slot, read=False, ok=ok))
