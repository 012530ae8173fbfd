"""A process and all that it started, which can be held still together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


class Family:
    """The process `pid` and those below it. An engine that spins while it waits would take cores
    from the one that is measured: stopped (SIGSTOP), it does not."""

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
    """Wait until they have ended; whoever has not after `grace` seconds is killed."""
    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
