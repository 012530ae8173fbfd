"""Engines of one machine: slots of a memory that all of them have."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np


class SharedMemory:
    """See `Transfer`: one block lies behind the other."""

    address = b""

    def __init__(self, memory: int, block_bytes: int) -> None:
        """`memory`: a file descriptor, which stays the caller's."""
        self._memory = memory
        self._block_bytes = block_bytes

    def put(self, slot: int, block: np.ndarray) -> None:
        if os.pwrite(self._memory, block.data, slot * self._block_bytes) < self._block_bytes:
            raise OSError("there is no room for a block")

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """All of it is here."""

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        count = os.preadv(self._memory, [into.data], slot * self._block_bytes)
        into[count:] = 0  # the memory grows as it is written

    def close(self) -> None:
        """It is gone with the last process that has it."""
