"""Captured graphs: which there are, when they are captured, and their replay.

Launching the few hundred kernels of a decode step one by one takes the host longer than the device
needs to run them; a graph is one launch. Capturing one takes as long as several steps, so a server
does not start with that. Work without a graph is launched kernel by kernel, with the same results;
it is captured after it was needed a few times, or while the server is idle.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from rootlace.runtime.model.executor.device import Device

log = logging.getLogger(__name__)

USES_BEFORE_CAPTURE = 2
"""How often something is launched kernel by kernel first. At least once: what is compiled or set up
at first use cannot be captured."""
CAPTURE_SHARE = 0.2
"""Share of a busy server's time that capturing may take."""
MOST_FAILURES = 3
"""Stop capturing after so many failures: each may leak memory."""
FINE_BUCKETS = 256
"""Up to this size buckets are 8 rows apart, beyond it 32: padding costs little, graphs memory."""


def decode_buckets(max_rows: int) -> list[int]:
    """Numbers of rows that there are graphs for: 1, 2, 4, 8, 16, 24, …, `max_rows`."""
    sizes = {1, 2, 4, *range(8, FINE_BUCKETS + 1, 8), *range(FINE_BUCKETS, max_rows, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def bucket_of(count: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds `count` rows; None: none does."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


@dataclass
class GraphCounters:
    captured: int = 0
    replayed: int = 0
    """Launches of graphs."""
    dropped: int = 0
    failed: int = 0
    """What could not be captured; it is launched kernel by kernel for good."""
    seconds: float = 0.0
    """Spent on capturing."""


class Graphs:
    """Runs pieces of work by their keys: by graph where there is one. Not thread-safe.

    Every graph takes memory, and steps come in more kinds than there can be graphs: at most `most`
    are kept, and a new one replaces the one that was replayed longest ago.
    """

    def __init__(
        self,
        device: Device,
        enabled: bool,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled and most > 0
        self._most = most
        self.count = GraphCounters()
        self._device = device
        self._clock = clock
        # Least recently replayed first.
        self._replays: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._never: set[Hashable] = set()
        self._uses: Counter[Hashable] = Counter()
        self._not_before = 0.0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def missing(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Those that might be captured and are not."""
        if not self.enabled:
            return []
        return [key for key in keys if key not in self._replays and key not in self._never]

    def run(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Do `work`, whose operations depend on `key` alone; returns whether a graph did it.

        Work that was done often enough is captured as well, unless capturing has used up its share
        of the time.
        """
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
            replay()
            self.count.replayed += 1
            return True
        work()
        if self.enabled and key not in self._never:
            self._uses[key] += 1
            if self._uses[key] >= USES_BEFORE_CAPTURE and self._clock() >= self._not_before:
                self.capture(key, work)
        return False

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Capture work that was done before. A failure is logged; it is not tried again."""
        begin = self._clock()
        if len(self._replays) >= self._most:
            self._drop_oldest()
        try:
            self._replays[key] = self._device.capture(work)
        except RuntimeError:
            log.warning("%s cannot be captured and runs without a graph", key, exc_info=True)
            self.give_up(key)
        else:
            self.count.captured += 1
        end = self._clock()
        self.count.seconds += end - begin
        self._not_before = end + (end - begin) * (1 / CAPTURE_SHARE - 1)

    def give_up(self, key: Hashable) -> None:
        """Never capture this work."""
        self._never.add(key)
        self.count.failed += 1
        if self.count.failed >= MOST_FAILURES:
            self.enabled = False

    def _drop_oldest(self) -> None:
        end = self._device.event()
        end.record()
        end.synchronize()  # the graph may be running
        key, _ = self._replays.popitem(last=False)
        del self._uses[key]
        self.count.dropped += 1
