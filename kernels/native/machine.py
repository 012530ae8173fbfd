"""Cores that this process may use, and their time: affinity, topology and quota."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np

# Control groups -----------------------------------------------------------------------------------
#
# Control groups of this process: on Linux these limit its processor time and memory.


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield each control group whose `controller` ("cpu", "memory") counts this process, outer
    groups too: (version of its files, 1 or 2; its folder below `root`)."""
    mounted = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            for group in _groups(mounted, path):
                yield 2, group
        elif controller in controllers.split(","):
            for hierarchy in {controllers, controller}:
                for group in _groups(mounted / hierarchy, path):
                    yield 1, group


def read_text(path: Path) -> str:
    """Return the text of a system file; "" if the file does not exist."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _groups(top: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and the outer ones. In a container `path` may be the host's, and
    `top` already the container's own group."""
    inner = PurePosixPath(path.lstrip("/"))
    if ".." not in inner.parts:
        for part in (inner, *inner.parents):
            if part.parts:
                yield top / part
    yield top


# Memory -------------------------------------------------------------------------------------------
#
# Memory in huge pages, if the system gives them, for large arrays.


HUGE_PAGE = 2 << 20


def mapped(size: int, parts: int = 0) -> np.ndarray:
    """Return `size` zero bytes (uint8), aligned to `HUGE_PAGE`, which live as long as the array.

    Untouched memory costs nothing. `parts`: number of equal parts that fill from their beginnings.
    Each part begins with a huge page's size in small pages, so a little data in a part takes little
    memory. Raises OSError if the system lacks memory.
    """
    # Private and anonymous: shared memory gets huge pages on few systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            for part in range(parts):
                start = begin + part * size // parts
                start -= start % mmap.PAGESIZE
                memory.madvise(mmap.MADV_NOHUGEPAGE, start, min(HUGE_PAGE, len(memory) - start))
    return whole[begin : begin + size]


# Cores --------------------------------------------------------------------------------------------


ROOT = Path(os.sep)


class Core(msgspec.Struct, frozen=True):
    """Core, with its hardware threads that this process may run on."""

    threads: tuple[int, ...]
    node: int = 0
    """Nearest NUMA node."""
    small: bool = False
    """Efficiency core: the processor has faster ones."""


class Cores(msgspec.Struct, frozen=True):
    """Cores of this process. `quota`: processor seconds per second granted by the control groups;
    None: all."""

    all: tuple[Core, ...]
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Return the number of useful computing threads.

        A core's second hardware thread has no arithmetic units of its own. Small cores count, since
        threads take tasks as they finish them. A quota counts as whole cores, rounded down, at
        least one. Two threads on 1.5 cores' time are no faster than one, and stall for a quarter of
        the time, which delays tokens.
        """
        if self.quota is None:
            return max(len(self.all), 1)
        return max(min(len(self.all), int(self.quota)), 1)


def usable_cores() -> int:
    """Return the number of useful computing threads on this machine, see `Cores.usable`."""
    return read_cores().usable


def read_cores(root: Path = ROOT, allowed: Iterable[int] | None = None) -> Cores:
    """Read /sys and /proc below `root`.

    `allowed`: the hardware threads that this process may run on; None: ask the system. Where the
    system reports nothing, every hardware thread is a core, all cores are alike, and their time is
    unlimited.
    """
    threads = sorted(_affinity() if allowed is None else allowed)
    system = root / "sys/devices/system"
    small = _small(root, threads)
    nodes = _nodes(system / "node")
    cores: dict[str, list[int]] = {}
    for thread in threads:
        siblings = read_text(system / f"cpu/cpu{thread}/topology/thread_siblings_list")
        cores.setdefault(siblings or str(thread), []).append(thread)
    found = tuple(Core(tuple(own), nodes.get(own[0], 0), own[0] in small) for own in cores.values())
    return Cores(found, min(_quotas(root), default=None))


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _small(root: Path, threads: list[int]) -> set[int]:
    """Return the hardware threads of efficiency cores: those that Intel's hybrids list, or those of
    less capacity than other threads."""
    listed = set(_numbers(read_text(root / "sys/devices/cpu_atom/cpus")))
    if listed:
        return listed
    cpus = root / "sys/devices/system/cpu"
    capacity = {thread: read_text(cpus / f"cpu{thread}/cpu_capacity") for thread in threads}
    known = {thread: int(text) for thread, text in capacity.items() if text.isdigit()}
    fastest = max(known.values(), default=0)
    return {thread for thread, value in known.items() if value < fastest}


def _nodes(folder: Path) -> dict[int, int]:
    """Return the NUMA node by hardware thread."""
    found = {}
    for node in _numbers(read_text(folder / "online")):
        for thread in _numbers(read_text(folder / f"node{node}/cpulist")):
            found[thread] = node
    return found


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process's control groups, outer groups included."""
    for version, group in control_groups(root, "cpu"):
        if version == 2:
            words = read_text(group / "cpu.max").split()
            yield from _share(*words) if len(words) == 2 else ()
        else:
            quota, period = (f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            yield from _share(read_text(group / quota), read_text(group / period))


def _share(quota: str, period: str) -> Iterator[float]:
    if quota.isdigit() and period.isdigit() and int(period):
        yield int(quota) / int(period)


def _numbers(text: str) -> list[int]:
    """Parse a list of numbers such as 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return []
        found += range(int(first), int(last or first) + 1)
    return found
