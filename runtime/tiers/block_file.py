"""What a `SlotStore` asks of that which holds its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class BlockFile(Protocol):
    """Slots of `block_bytes` each; see `SlotFile`."""

    path: Path
    block_bytes: int
    num_slots: int

    def write(self, slot: int, block: np.ndarray) -> None: ...

    def publish(self, slot: int, crc: int, key: bytes, owner: bytes) -> None: ...

    def erase(self, slots: Iterable[int]) -> None: ...

    def expect(self, slots: Sequence[int]) -> None:
        """These are read next, in this order."""

    def read(self, slot: int, key: bytes, into: np.ndarray, crc: int | None = None) -> None: ...

    def holds(self, slot: int) -> bool: ...

    def close(self, wanted: dict[int, bool] | None = None) -> None: ...
