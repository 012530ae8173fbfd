"""Which kernels run, and why no better ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rootlace.kernels import kernels_for
from rootlace.kernels.dispatch import why_not_triton
from rootlace.kernels.native.build import NativeUnavailable
from rootlace.kernels.native.library import load_best
from rootlace.runtime.doctor.machine import UNITS, Machine


@dataclass(frozen=True)
class KernelChoice:
    """`name` of the kernel set. `instructions`: what native kernels compute with. `why_not_better`:
    for each better choice why it is not taken, in a line."""

    name: str
    instructions: str = ""
    why_not_better: tuple[str, ...] = ()
    library: ctypes.CDLL | None = field(default=None, repr=False)


def choose_on_cpu(machine: Machine, asked: str, report: Callable[[str], None]) -> KernelChoice:
    """What `ExecutorConfig.kernels` leads to on this CPU. `report` is told that a compilation
    begins."""
    if asked == "reference":
        return KernelChoice("reference", why_not_better=("native: the reference is asked for",))
    try:
        library, refused = load_best(report)
    except NativeUnavailable as error:
        return KernelChoice("reference", why_not_better=(f"native: {error}",))
    instructions = library.rl_instructions().decode()
    return KernelChoice(
        "native", instructions, better_units(machine, instructions, refused), library
    )


def better_units(machine: Machine, used: str, refused: str) -> tuple[str, ...]:
    """Why no instruction set is used that is better than `used`, where the system `refused` the
    tile unit ("": it did not)."""
    reasons = []
    for name in UNITS.get(machine.architecture, {}):
        if name == used:
            break
        if name in machine.lacks:
            reasons.append(f"{name}: the processor does not have it")
        elif name == "amx" and refused:
            reasons.append(f"{name}: {refused}")
        else:
            reasons.append(f"{name}: the compiler that is installed does not know it")
    return tuple(reasons)


def choose_on_gpu(device: torch.device, asked: str) -> KernelChoice:
    """What `ExecutorConfig.kernels` leads to on this GPU."""
    if asked == "reference":
        return KernelChoice("reference", why_not_better=("triton: the reference is asked for",))
    name = kernels_for(device).name
    reason = why_not_triton(device)
    if name == "reference" and reason is None:
        reason = "it cannot be imported"
    return KernelChoice(name, why_not_better=() if reason is None else (f"triton: {reason}",))
