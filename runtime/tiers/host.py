"""A store in main memory, beside a GPU that has the pool in its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rootlace.runtime.contracts.block_store import Done


class HostStore:
    """See `StoreState` and `StoreMemory`. Slots are where the device copies from and to by itself;
    nothing of it outlives the process."""

    working = True

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        block_seconds: float,
        new_memory: Callable[[int], np.ndarray] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        """`block_seconds`: what copying a block takes. `new_memory` makes a uint8 array."""
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
