"""Memory for blocks on their way to or from a disk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Buffers:
    """So many arrays, made by `new` when they are first needed. Whoever calls has the lock of the
    queue that they belong to."""

    def __init__(self, count: int, new: Callable[[], np.ndarray]) -> None:
        self._unmade = count
        self._new = new
        self._spare: list[np.ndarray] = []

    def __len__(self) -> int:
        """So many can be taken now."""
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
