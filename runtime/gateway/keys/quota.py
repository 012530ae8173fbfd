"""A quota: so much a minute."""

from __future__ import annotations

import time
from collections.abc import Callable


class Quota:
    """Fills evenly up to `per_minute`, and is never refused what it has spent already.

    Tokens are known only once they are computed: what is taken may exceed what is there, and
    nothing more is admitted until the debt is paid.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._then = clock()

    def seconds_to_wait(self) -> float:
        """Until there is at least one; 0 if there is one now."""
        now = self._clock()
        filled = self._level + (now - self._then) * self.per_minute / 60
        self._level, self._then = min(filled, self.per_minute), now
        return max(1 - self._level, 0) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        self._level -= amount
