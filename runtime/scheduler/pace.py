"""How fast prompts are computed, and when a tick of the tree was."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

_LARGE_STEP = 64
"""Steps with fewer tokens of prompts say little of how long a prompt takes."""
_KEPT = 0.9
"""What an older step counts beside the next one."""
_SAMPLES = 3600


class PromptPace:
    """About how many seconds a token of a prompt takes, by the last large steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, tokens: int, rows: int, seconds: float) -> None:
        """A step computed so many tokens for so many rows."""
        if tokens - rows >= _LARGE_STEP:
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """How long so many tokens would take; 0 while nothing is known."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class TickTimes:
    """The time of each tick, to a second, for the last hour of use."""

    def __init__(self) -> None:
        self._ticks: deque[int] = deque(maxlen=_SAMPLES)
        self._times: deque[float] = deque(maxlen=_SAMPLES)

    def note(self, tick: int, now: float) -> None:
        if not self._times or now - self._times[-1] >= 1.0:
            self._ticks.append(tick)
            self._times.append(now)

    def seconds_since(self, tick: int, now: float) -> float:
        """At most so long ago: ticks before the first that is known count as that one."""
        if not self._times:
            return 0.0
        at = bisect_right(self._ticks, tick) - 1
        return max(now - self._times[max(at, 0)], 0.0)
