"""What a request with a pooling asks for, gathered chunk by chunk."""

from __future__ import annotations

import numpy as np

from rootlace.runtime.contracts.request import Pooling


class Pool:
    """Hidden states of one request on their way to a vector.

    `next` is the first token whose state is still to be computed; a cached prefix may not reach
    beyond it. Of the mean that is every token, of the other poolings the last one.
    """

    __slots__ = ("_sum", "count", "labels", "length", "next")

    def __init__(self, pooling: Pooling, length: int) -> None:
        self.length = length
        self.labels = pooling == "labels"
        self.next = 0 if pooling == "mean" else length - 1
        self.count = 0
        self._sum: np.ndarray | None = None

    def plan(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the tokens `start : stop`, computed now, are wanted: first and end."""
        first = max(self.next, start)
        self.next = max(self.next, stop)
        return first, stop

    def take(self, states: np.ndarray) -> None:
        """float32 [tokens, size]: those that follow the ones before.

        They are added one by one, so that the sum does not depend on where chunks were cut.
        """
        if self._sum is None:
            self._sum = np.zeros(states.shape[1])
        for state in states:
            self._sum += state
        self.count += len(states)

    def vector(self) -> np.ndarray:
        """float32 [size]."""
        assert self._sum is not None and self.next == self.length
        return (self._sum / self.count).astype(np.float32)
