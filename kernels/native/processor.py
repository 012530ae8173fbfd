"""The instruction sets that kernels are written for, and which of them this processor has."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(os.sep)


@dataclass(frozen=True)
class InstructionSet:
    """`name` is what `rl_instructions` says, `flags` are those of /proc/cpuinfo that a processor
    with it has, `target` those that tell a compiler to use it and no more."""

    name: str
    flags: frozenset[str]
    target: tuple[str, ...]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BFLOAT16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_TILES = _BFLOAT16 | {"amx_tile", "amx_bf16", "amx_int8"}
_VECTORS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_X86 = (
    InstructionSet("amx", _TILES, (*_VECTORS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    InstructionSet("avx512-bf16", _BFLOAT16, _VECTORS),
    InstructionSet("avx512", _V4, ("-march=x86-64-v4",)),
    InstructionSet("avx2", _V3, ("-march=x86-64-v3",)),
    InstructionSet("generic", frozenset(), ("-march=x86-64",)),
)
_NEON = frozenset({"asimd"})
_ARM = (
    InstructionSet("neon-bf16", _NEON | {"bf16", "asimddp"}, ("-march=armv8.2-a+bf16+dotprod",)),
    InstructionSet("neon", _NEON, ("-march=armv8-a",)),
)
INSTRUCTION_SETS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""By architecture, as `platform.machine()` calls it; the best first."""


@dataclass(frozen=True)
class Processor:
    """`has`: the instruction sets of its architecture that it says it has, `lacks` the others; the
    best first. `told`: whether the system says what it has; else `lacks` are those that it may
    lack."""

    name: str
    architecture: str
    has: tuple[InstructionSet, ...]
    lacks: tuple[InstructionSet, ...]
    told: bool = True


def read_processor(root: Path = ROOT, architecture: str = "") -> Processor:
    """What /proc/cpuinfo below `root` says. `architecture`: "" is this machine's."""
    told = first_processor(root)
    # ARM calls them features.
    flags = set((told.get("flags") or told.get("Features") or "").split())
    architecture = architecture or platform.machine()
    known = INSTRUCTION_SETS.get(architecture, ())
    return Processor(
        told.get("model name") or platform.processor() or architecture,
        architecture,
        tuple(one for one in known if one.flags <= flags),
        tuple(one for one in known if not one.flags <= flags),
        bool(flags),
    )


def kind_of_processor() -> str:
    """What this machine's processor is, and what it can do."""
    told = first_processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(told[name] for name in wanted if name in told) or platform.processor()


def first_processor(root: Path = ROOT) -> dict[str, str]:
    """What /proc/cpuinfo below `root` says of the first processor; {} where there is none."""
    try:
        text = (root / "proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
