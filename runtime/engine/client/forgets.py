"""What engines were told to forget, for those that may not have heard of it, or not done it yet."""

from __future__ import annotations

import time
from collections.abc import Callable

from rootlace.runtime.contracts.messages import Flush, ForgetNamespace

SECONDS = 60.0
"""So long after it was told, what is to be forgotten may still be on an engine's disk: it may be in
a step, or hang, and erases behind what it writes."""
MOST = 65536
"""Of more than that, all is forgotten."""


class Forgets:
    """An engine that dies leaves its blocks on a disk, where it, or whichever of its siblings is
    started again first, finds them. So each is told again as it starts what was to be forgotten
    since an engine went down, and shortly before that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[Flush | ForgetNamespace, float] = {}
        """When it was told, the oldest first."""
        self._down = 0

    def note(self, message: Flush | ForgetNamespace) -> None:
        """All engines are told it now, those that are down in vain."""
        if isinstance(message, Flush) or len(self._told) >= MOST:
            self._told.clear()
            message = Flush(0)  # nobody waits for the answer
        self._told.pop(message, None)
        self._told[message] = self._clock()
        self._drop_old()

    def died(self) -> None:
        """An engine is down."""
        self._drop_old()
        self._down += 1

    def to_returned(self) -> list[Flush | ForgetNamespace]:
        """One of those is back: what it is to be told before anything else."""
        self._down -= 1
        self._told = dict.fromkeys(self._told, self._clock())
        return list(self._told)

    def _drop_old(self) -> None:
        oldest = self._clock() - SECONDS
        while not self._down and self._told and self._told[next(iter(self._told))] < oldest:
            del self._told[next(iter(self._told))]
