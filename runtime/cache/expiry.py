"""Prefixes that are to be forgotten when nobody has used them for some time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache.tree import RadixTree

MAX_TOKENS = 1 << 22
"""Tokens that are remembered until their time is over; beyond it the next ones go early."""


LOOKED_AT = 256
"""So much is looked at in one step: what is held comes back each time, however short its time."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """What is to go of `tokens`: those from position `start` on."""

    namespace: Hashable
    tokens: np.ndarray
    start: int
    seconds: float
    tick: int


class Expiry:
    """What requests with a time to live have added to the tree.

    Whether tokens were used is looked at each time their time is over, so they go between once and
    twice that time after their last use.
    """

    def __init__(self, tree: RadixTree, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._heap: list[tuple[float, int, _Kept]] = []
        self._numbers = itertools.count()
        self._tokens = 0

    def keep(self, namespace: Hashable, tokens: np.ndarray, start: int, seconds: float) -> None:
        """`tokens` (int32) from `start` on, which nobody holds any more, live for so long."""
        self._push(_Kept(namespace, tokens.copy(), start, seconds, self._tree.tick))
        if self._tree.expiring is not None:
            self._tree.expiring(namespace, tokens, start)
        while self._tokens > MAX_TOKENS:
            self._end(self._pop())

    def expire(self) -> None:
        """Forget what has had its time, `LOOKED_AT` of it at most. Costs nothing while nothing
        has."""
        if not self._heap:
            return
        now = self._clock()
        for _ in range(LOOKED_AT):
            if not self._heap or self._heap[0][0] > now:
                return
            self._end(self._pop())

    def end(self) -> None:
        """Forget all of it that nobody holds, whoever used it last."""
        for _, _, kept in self._heap:
            self._tree.forget(kept.namespace, kept.tokens, kept.start, self._tree.tick)
        self.reset()

    def reset(self) -> None:
        """The tree is gone."""
        self._heap.clear()
        self._tokens = 0

    def _push(self, kept: _Kept) -> None:
        self._tokens += len(kept.tokens)
        heapq.heappush(self._heap, (self._clock() + kept.seconds, next(self._numbers), kept))

    def _pop(self) -> _Kept:
        kept = heapq.heappop(self._heap)[2]
        self._tokens -= len(kept.tokens)
        return kept

    def _end(self, kept: _Kept) -> None:
        if self._tree.forget(kept.namespace, kept.tokens, kept.start, kept.tick):
            return
        if self._tokens + len(kept.tokens) <= MAX_TOKENS:
            tick = self._tree.tick
            self._push(_Kept(kept.namespace, kept.tokens, kept.start, kept.seconds, tick))
        elif self._tree.forgetting is not None:
            self._tree.forgetting(kept.namespace, kept.tokens, kept.start)
