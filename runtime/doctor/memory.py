"""An account of a process's memory: what holds how much of what is resident.

    /proc/PID/smaps: mappings --> named by file or size --> Part("engine", "library: torch", ...)

Mapped files are named by what they are. Anonymous memory has no names in Linux: what is large, or
was advised to have huge or small pages, is the engine's own. Of the rest it is measured, in a
process of its own, what importing the engine's modules takes, and torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LARGE = 80 << 20
"""Bytes of address space from which on an anonymous mapping is no heap: malloc's have 64 MiB."""
POOL = "KV pool, large buffers, weights that were packed by this start"
HEAP = "heap: objects of Python, torch and other libraries"
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)")
_PACKAGE = re.compile(r"site-packages/(\w+?)(?:\.libs)?/")
_IMPORTED = """
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
import rootlace.runtime.engine.__main__
modules = anonymous()
import torch
print(modules, anonymous() - modules)
"""


@dataclass(frozen=True)
class Part:
    """Resident bytes of a process; `shared`: of these, those of files, which other processes may
    have mapped, and which the system takes back where memory is short. `reserved`: address space.
    """

    process: str
    what: str
    resident: int
    shared: int
    reserved: int


def account(pid: int, process: str, model: str) -> list[Part]:
    """All resident memory of process `pid`, the largest part first; `model`: path of its weights.

    Raises OSError where the process, or /proc, is not there.
    """
    resident, shared, reserved = Counter[str](), Counter[str](), Counter[str]()
    for name, size, held, anonymous, flags in _mappings(pid):
        advised = not name and not flags.isdisjoint(("hg", "nh"))
        what = POOL if advised else _what(name, size, model)
        resident[what] += held
        shared[what] += held - anonymous
        reserved[what] += size
    parts = [Part(process, what, resident[what], shared[what], reserved[what]) for what in resident]
    return sorted(parts, key=lambda part: -part.resident)


def imported() -> tuple[int, int]:
    """Bytes of anonymous memory that Python takes with the modules of an engine, and torch more."""
    command = [sys.executable, "-c", _IMPORTED]
    modules, torch = subprocess.run(command, capture_output=True, check=True).stdout.split()
    return int(modules), int(torch)


def _mappings(pid: int) -> Iterator[tuple[str, int, int, int, frozenset[str]]]:
    """Name, bytes of address space, resident bytes, anonymous ones of these, and the kernel's
    flags, by mapping."""
    name, size, held, anonymous = "", 0, 0, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            name, size = found[3], int(found[2], 16) - int(found[1], 16)
        elif line.startswith("Rss:"):
            held = 1024 * int(line.split()[1])
        elif line.startswith("Anonymous:"):
            anonymous = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:"):
            yield name, size, held, anonymous, frozenset(line.split()[1:])


def _what(name: str, size: int, model: str) -> str:
    if name.endswith(".packed") or (model and Path(name).is_relative_to(model)):
        return f"weights, mapped: {Path(name).name}"
    if package := _PACKAGE.search(name):
        return f"library: {package[1]}"
    if name.startswith("/"):
        return "libraries of the system and Python, other files"
    if name.startswith("[") and name != "[heap]":
        return "stack, pages of the kernel"
    if not name and size >= LARGE:
        return POOL
    return HEAP
