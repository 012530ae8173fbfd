"""How many threads are worth computing with."""

from __future__ import annotations

import math
import os
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Physical cores that this process may use, at least one: the second hardware thread of a core
    has no arithmetic units of its own. A container has no more cores than its share of processor
    time comes to (rounded down)."""
    if not hasattr(os, "sched_getaffinity"):
        return max(os.cpu_count() or 1, 1)
    allowed = os.sched_getaffinity(0)
    cores = {_read(Path(_SIBLINGS.format(cpu))) or str(cpu) for cpu in allowed}
    return max(min(len(cores), _quota()), 1)


def _quota() -> int:
    """Whole cores that the control group (version 2) grants."""
    words = _read(_QUOTA).split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return max(math.floor(int(words[0]) / int(words[1])), 1)
    return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
