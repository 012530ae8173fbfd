"""A gateway process and its engine, which report the memory of Python objects.

Both are the real ones. A thread in each writes every few seconds to a file how much memory
`tracemalloc` counts (in an engine: since its first request) and how much the C library's malloc has
handed out, and on request which lines of code hold the memory. The engine checks every invariant of
its tree and pool now and then, and writes the result. Engines that start after `no_more_tracing`
are not traced, because tracemalloc's tables grow, and leave holes in the memory when they move.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import msgspec
import psutil

from rootlace.runtime import processes
from rootlace.runtime.scheduler.scheduler import Scheduler

FOLDER_VARIABLE = "SOAK_FOLDER"
"""The environment's variable that says where files go."""
CHECK_SECONDS = 20.0
TELL_SECONDS = 2.0
ENGINE_MODULE = "rootlace.runtime.engine"
LINES = 400
"""So many lines of code are told that hold the most memory."""


def memory_file(folder: Path, pid: int) -> Path:
    """Return the path of `memory_of_this_process` as JSON."""
    return folder / f"{pid}.memory"


def checks_file(folder: Path) -> Path:
    """Return the path with a character per check of all engines: "." success, "!" failure."""
    return folder / "checks"


def lines_file(folder: Path, pid: int, number: int) -> Path:
    return folder / f"{pid}.lines-{number}"


def untraced_file(folder: Path) -> Path:
    """Return the path of a file that exists once new engines are not traced."""
    return folder / "untraced"


def no_more_tracing(folder: Path) -> None:
    untraced_file(folder).touch()


class Lines(msgspec.Struct, frozen=True):
    """Bytes by the lines of code that hold them, if traced; how much malloc then had unused, and
    gave back."""

    sizes: dict[str, int]
    trimmed: int


def read_lines(file: Path) -> Lines:
    return msgspec.json.decode(file.read_bytes(), type=Lines)


def ask_for_lines(folder: Path, number: int) -> None:
    """Ask all processes to write which lines hold memory, for the `number`th time."""
    (folder / f"lines-{number}").touch()


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL(None)


def memory_of_this_process() -> dict[str, int]:
    """Return bytes: `traced` in Python's objects, `tracing` in tracemalloc's tables; of glibc's
    malloc `held` by the program and `kept` free."""
    found: dict[str, int] = {}
    if tracemalloc.is_tracing():
        found["traced"] = tracemalloc.get_traced_memory()[0]
        found["tracing"] = tracemalloc.get_tracemalloc_memory()
    if hasattr(_libc, "mallinfo2"):
        _libc.mallinfo2.restype = _MallInfo
        info = _libc.mallinfo2()
        found |= {"held": info.uordblks + info.hblkhd, "kept": info.fordblks}
    return found


class MemoryTeller(threading.Thread):
    """Thread that writes the memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="memory", daemon=True)
        self._folder = folder
        self._told = self._asked()

    def run(self) -> None:
        file = memory_file(self._folder, os.getpid())
        while True:
            file.write_bytes(msgspec.json.encode(memory_of_this_process()))
            if self._asked() > self._told:
                self._told += 1
                self._tell_lines(lines_file(self._folder, os.getpid(), self._told))
            time.sleep(TELL_SECONDS)

    def _asked(self) -> int:
        return len(list(self._folder.glob("lines-*")))

    def _tell_lines(self, file: Path) -> None:
        sizes: dict[str, int] = {}
        if tracemalloc.is_tracing():
            for one in tracemalloc.take_snapshot().statistics("lineno")[:LINES]:
                sizes[f"{one.traceback[0].filename}:{one.traceback[0].lineno}"] = one.size
        gc.collect()
        process = psutil.Process()
        before = process.memory_info().rss
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)  # otherwise later growth would use the memory freed here
        trimmed = before - process.memory_info().rss
        file.write_bytes(msgspec.json.encode(Lines(sizes, trimmed)))


class Checker:
    """Called in place of `Scheduler._check_if_asked`, where no operation is half done."""

    def __init__(self, file: Path, traced: bool) -> None:
        self._file = file
        self._traced = traced
        self._next = time.monotonic()

    def __call__(self, scheduler: Scheduler) -> None:
        if self._traced and not tracemalloc.is_tracing():
            tracemalloc.start()  # not earlier: importing torch would take several times as long
        if time.monotonic() < self._next:
            return
        try:
            scheduler.check()
        except BaseException:
            self._write("!")
            raise
        self._write(".")
        self._next = time.monotonic() + CHECK_SECONDS

    def _write(self, found: str) -> None:
        with self._file.open("a") as file:
            file.write(found)


def main(part: str) -> int:
    folder = Path(os.environ[FOLDER_VARIABLE])
    MemoryTeller(folder).start()
    if part == "engine":
        from rootlace.runtime.engine.__main__ import main as engine_main

        checker = Checker(checks_file(folder), traced=not untraced_file(folder).exists())
        with patch.object(Scheduler, "_check_if_asked", lambda scheduler: checker(scheduler)):
            return engine_main()
    tracemalloc.start()
    from rootlace.runtime.server.__main__ import main as gateway_main

    real = processes.child_command

    def command(module: str) -> list[str]:
        return [*real(__spec__.name), "engine"] if module == ENGINE_MODULE else real(module)

    with patch.object(processes, "child_command", command):
        return gateway_main()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["gateway"]))
