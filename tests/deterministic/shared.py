"""Blocks below the pools of a world's engines: on a disk, or transferred, in a dictionary that all
engines share, or one has."""

import random
from typing import Any, cast

import numpy as np

from rootlace.runtime.contracts.block_store import BlockLost, Done
from rootlace.runtime.offload.disk_store import DamagedBlock, checksum
from rootlace.runtime.offload.slot_store import HandedBlocks
from tests.simulated_store import SimulatedStore

Memory = dict[int, list[np.ndarray]]


class SlowStore(SimulatedStore):
    """A store whose writes and reads take time."""

    def __init__(self, num_slots: int, dice: random.Random, name: str = "disk") -> None:
        super().__init__(num_slots, name=name, slow=True)
        self._dice = dice

    def poll(self) -> list[Done]:
        self.go_on(self._dice.randint(0, 3))
        return super().poll()

    def seconds(self, blocks: int) -> float:
        """Return less time than an engine measures for its steps, which take none here."""
        return 1e-9 * blocks


TORN = 0.1
"""Chance that a block arrives changed, as if its giver wrote another block meanwhile."""


class _Memories:
    """A `Transfer` of whole blocks as bytes, some of which arrive torn."""

    def __init__(self, memories: dict[bytes, Memory], dice: random.Random) -> None:
        self._memories = memories
        self._dice = dice

    def find(self, source: bytes, place: int) -> list[np.ndarray]:
        found = self._memories.get(source, {}).get(place)
        if found is None:
            raise BlockLost("the giver is gone")
        return found

    def take(self, source: bytes, place: int, into: np.ndarray) -> None:
        into[:] = _bytes(self.find(source, place))
        if self._dice.random() < TORN:
            into[len(into) // 2 :] ^= 1


class SharedStore(SlowStore):
    """See `HandedState`. Blocks are read by the product's `HandedBlocks`."""

    def __init__(
        self, num_slots: int, memories: dict[bytes, Memory], address: bytes, dice: random.Random
    ) -> None:
        super().__init__(num_slots, dice, "handed")
        self._memories = _Memories(memories, dice)
        self._memory = memories.setdefault(address, {})
        self._checksums: dict[int, int] = {}
        self._offered: dict[int, tuple[bytes, int]] = {}
        self._blocks = HandedBlocks(cast(Any, self._memories), 0, num_slots)

    def checksum(self, slot: int) -> int:
        return self._checksums.pop(slot)

    def offer(self, slot: int, source: bytes, place: int, crc: int) -> None:
        self._offered[slot] = source, place
        self._blocks.offer(slot, source, place, crc)

    def fetch(self, slot: int, key: bytes) -> None:
        try:
            found = self._memories.find(*self._offered[slot])
            block = np.empty(len(_bytes(found)), np.uint8)
            self._blocks.read(slot, key, block)
        except (BlockLost, DamagedBlock):
            self._begin(Done(slot, read=True, ok=False))
            return
        ends = np.cumsum([array.nbytes for array in found])[:-1]
        self._fetched[slot] = [
            part.view(array.dtype).reshape(array.shape)
            for part, array in zip(np.split(block, ends), found, strict=True)
        ]
        self._begin(Done(slot, read=True, ok=True))

    def release(self, slot: int) -> None:
        self._fetched.pop(slot, None)

    def save(self, slot: int, block: list[np.ndarray]) -> None:
        arrays = self._memory[slot] = [array.copy() for array in block]
        self._checksums[slot] = checksum(self._reserved.pop(slot), _bytes(arrays))
        self._begin(Done(slot, read=False, ok=True))


def _bytes(arrays: list[np.ndarray]) -> np.ndarray:
    return np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
