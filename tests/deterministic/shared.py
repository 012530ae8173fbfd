"""What engines of a world have below their pools: blocks on a disk, and those that they hand over,
in a dictionary that all of them have, or its own."""

from __future__ import annotations

import random
import zlib

import numpy as np

from rootlace.runtime.contracts.block_store import Done
from tests.simulated_store import SimulatedStore

Memory = dict[int, list[np.ndarray]]


class SlowStore(SimulatedStore):
    """Writes and reads take their time."""

    def __init__(self, num_slots: int, dice: random.Random, name: str = "disk") -> None:
        super().__init__(num_slots, name=name, slow=True)
        self._dice = dice

    def poll(self) -> list[Done]:
        self.go_on(self._dice.randint(0, 3))
        return super().poll()

    def seconds(self, blocks: int) -> float:
        """Less than what an engine measures of its steps, which are over at once here."""
        return 1e-9 * blocks


class SharedStore(SlowStore):
    """See `HandedState`."""

    def __init__(
        self, num_slots: int, memories: dict[bytes, Memory], address: bytes, dice: random.Random
    ) -> None:
        super().__init__(num_slots, dice, "handed")
        self._memories = memories
        self._memory = memories.setdefault(address, {})
        self._checksums: dict[int, int] = {}
        self._offered: dict[int, tuple[bytes, int, int]] = {}

    def checksum(self, slot: int) -> int:
        return self._checksums.pop(slot)

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        self._offered[slot] = source, place, crc

    def fetch(self, slot: int, key: bytes) -> None:
        source, place, crc = self._offered[slot]
        found = self._memories.get(source, {}).get(place)
        ok = found is not None and _checksum(key, found) == crc
        if found is not None and ok:
            self._fetched[slot] = [array.copy() for array in found]
        self._begin(Done(slot, read=True, ok=ok))

    def release(self, slot: int) -> None:
        self._fetched.pop(slot, None)

    def save(self, slot: int, block: list[np.ndarray]) -> None:
        arrays = self._memory[slot] = [array.copy() for array in block]
        self._checksums[slot] = _checksum(self._reserved.pop(slot), arrays)
        self._begin(Done(slot, read=False, ok=True))


def _checksum(key: bytes, arrays: list[np.ndarray]) -> int:
    return zlib.crc32(b"".join(array.tobytes() for array in arrays), zlib.crc32(key))
