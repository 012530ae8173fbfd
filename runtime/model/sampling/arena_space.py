"""Room in arrays of fixed length: single places, and runs of neighbours."""

from __future__ import annotations


class Places:
    """Single places, 0..size-1, in no order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._unused = 0  # from here on none was ever given out
        self._returned: list[int] = []

    def take(self, count: int) -> list[int] | None:
        """None: there are not so many left."""
        fresh = count - len(self._returned)
        if fresh > self.size - self._unused:
            return None
        split = max(-fresh, 0)
        found = self._returned[split:]
        del self._returned[split:]
        if fresh > 0:
            found += range(self._unused, self._unused + fresh)
            self._unused += fresh
        return found

    def give(self, places: list[int]) -> None:
        self._returned += places

    def grow(self, size: int) -> None:
        self.size = size


class Runs:
    """Runs of neighbouring places, each from the lowest place where it fits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []  # ascending, no two touch

    def take(self, count: int) -> int | None:
        """The first of `count` places; None: there is no gap so long."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                if stop - start == count:
                    del self._free[index]
                else:
                    self._free[index] = (start + count, stop)
                return start
        return None

    def give(self, start: int, count: int) -> None:
        self._insert(start, start + count)

    def grow(self, size: int) -> None:
        self._insert(self.size, size)
        self.size = size

    def _insert(self, start: int, stop: int) -> None:
        if start == stop:
            return
        index = sum(gap[0] < start for gap in self._free)
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
