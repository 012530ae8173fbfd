"""What the system tells of this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rootlace.kernels.native.cores import ROOT, Cores, read_cores

Flags = dict[str, tuple[str, ...]]
X86: Flags = {
    "amx": ("amx_tile", "amx_bf16"),
    "avx512-bf16": ("avx512_bf16",),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx2": ("avx2", "fma"),
}
ARM: Flags = {"neon": ("asimd",)}
UNITS: dict[str, Flags] = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
"""By architecture and name of an instruction set (`rl_instructions`), best first: the flags of
/proc/cpuinfo that a processor with it has."""


@dataclass(frozen=True)
class Machine:
    """`units`: the instruction sets of `UNITS` that the processor says it has, `lacks` the others
    of its architecture, best first. Memory in bytes."""

    processor: str
    architecture: str
    system: str
    units: tuple[str, ...]
    lacks: tuple[str, ...]
    cores: Cores
    memory_total: int
    memory_available: int


def read_machine(
    root: Path = ROOT,
    allowed: Iterable[int] | None = None,
    architecture: str = platform.machine(),
) -> Machine:
    """Read /proc and /sys below `root`, and ask the system for the memory. `allowed`: see
    `read_cores`."""
    told = _processor_fields(root)
    # ARM calls them features.
    flags = set((told.get("flags") or told.get("Features") or "").split())
    known = UNITS.get(architecture, {})
    has = {name: flags.issuperset(wanted) for name, wanted in known.items()}
    memory = psutil.virtual_memory()
    return Machine(
        processor=told.get("model name") or platform.processor() or platform.machine(),
        architecture=architecture,
        system=f"{platform.system()} {platform.release()}",
        units=tuple(name for name in known if has[name]),
        lacks=tuple(name for name in known if not has[name]),
        cores=read_cores(root, allowed),
        memory_total=memory.total,
        memory_available=memory.available,
    )


def _processor_fields(root: Path) -> dict[str, str]:
    """What /proc/cpuinfo says of the first processor."""
    try:
        text = (root / "proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
