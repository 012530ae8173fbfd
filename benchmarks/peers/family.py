"""A process and all its descendants, which can be suspended together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


class Family:
    """The process `pid` and its descendants. An engine that spins while it waits would take cores
    from the measured one, unless it is stopped (SIGSTOP)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._paused: list[psutil.Process] = []

    def __iter__(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            head = psutil.Process(self._pid)
            yield head
            yield from head.children(recursive=True)

    def pause(self) -> None:
        for process in self:
            with contextlib.suppress(psutil.Error):
                process.suspend()
                self._paused.append(process)

    def resume(self) -> None:
        for process in self._paused:
            with contextlib.suppress(psutil.Error):
                process.resume()
        self._paused = []


def end(processes: list[psutil.Process], grace: float) -> None:
    """Wait until all have ended; kill the rest after `grace` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
