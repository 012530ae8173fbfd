"""What may be written to a disk: so many bytes an hour, and nothing twice that nobody wanted."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

HOUR = 3600.0
_SPAN = 60.0
"""Bytes are counted together for so many seconds."""


class HourlyBytes:
    """At most `most` bytes in any hour; None: as many as one likes."""

    def __init__(self, most: int | None, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._spans: deque[tuple[float, int]] = deque()
        """When each span ends, and its bytes."""
        self._bytes = 0

    def take(self, count: int) -> bool:
        """Count `count` bytes that are to be written now; False if they may not be."""
        if self._most is None:
            return True
        now = self._clock()
        while self._spans and self._spans[0][0] + HOUR <= now:
            self._bytes -= self._spans.popleft()[1]
        if self._bytes + count > self._most:
            return False
        self._bytes += count
        if self._spans and now < self._spans[-1][0]:
            end, before = self._spans.pop()
            self._spans.append((end, before + count))
        else:
            self._spans.append((now + _SPAN, count))
        return True


class Unwanted:
    """Keys of what was dropped before anybody wanted it back, the last `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def wanted(self, keys: Iterable[bytes]) -> None:
        """A prompt begins like these."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
