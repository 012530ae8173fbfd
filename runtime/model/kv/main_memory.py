"""How much main memory this process may take: what the machine has, or its control groups grant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rootlace.kernels.native.control_groups import control_groups, read_text

ROOT = Path(os.sep)


@dataclass(frozen=True)
class MainMemory:
    """Bytes."""

    total: int
    available: int


def main_memory(root: Path = ROOT) -> MainMemory:
    """The machine's memory or, where less is granted, that of the tightest control group around
    this process (read below `root`): whoever takes more is killed."""
    machine = psutil.virtual_memory()
    found = [MainMemory(machine.total, machine.available), *_granted(root)]
    return MainMemory(min(one.total for one in found), min(one.available for one in found))


def _granted(root: Path) -> Iterator[MainMemory]:
    for version, group in control_groups(root, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (read_text(group / name) for name in names[:2])
        if limit.isdigit() and used.isdigit():  # a group without a limit says "max"
            # Files that were read and are not in use count as used, but make room when needed.
            reclaimable = _statistic(group, names[2])
            free = int(limit) - max(int(used) - reclaimable, 0)
            yield MainMemory(int(limit), max(free, 0))


def _statistic(group: Path, name: str) -> int:
    for line in read_text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
