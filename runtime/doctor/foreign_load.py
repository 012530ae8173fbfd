"""What other programs take of the machine while something is measured."""

from __future__ import annotations

import time

import psutil


class ForeignLoad:
    """How many cores other programs kept busy meanwhile: a measurement is good only near zero.

    "Own" is the process `pid` (None: this one) and those below it.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._start = (time.monotonic(), self._machine(), self._own())

    def cores(self) -> float:
        start, machine, own = self._start
        elapsed = time.monotonic() - start
        return max(0.0, (self._machine() - machine) - (self._own() - own)) / max(elapsed, 1e-9)

    def own_seconds(self) -> float:
        """CPU seconds that the own processes took meanwhile."""
        return self._own() - self._start[2]

    @staticmethod
    def _machine() -> float:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts what guests take as user and nice, too.
        twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return sum(times) - idle - twice

    def _own(self) -> float:
        """CPU seconds of the own processes, with those that have ended (on Linux)."""
        total = 0.0
        try:
            head = psutil.Process(self._pid)
            family = [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return total
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total
