"""Which kernels run, and why no better ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rootlace.kernels import kernels_for
from rootlace.kernels.dispatch import why_not_triton
from rootlace.kernels.native.build import NativeUnavailable
from rootlace.kernels.native.library import load_best
from rootlace.kernels.native.prebuilt import FOLDER
from rootlace.kernels.native.processor import Processor
from rootlace.runtime.model.executor.refusals import check_gpu_kernels, check_without_native


@dataclass(frozen=True)
class KernelChoice:
    """`name` of the kernel set. `instructions`: what native kernels compute with, `prebuilt`:
    whether they came with the package. `why_not_better`: for each better choice why it is not
    taken, in a line."""

    name: str
    instructions: str = ""
    prebuilt: bool = False
    why_not_better: tuple[str, ...] = ()
    library: ctypes.CDLL | None = field(default=None, repr=False)


def choose_on_cpu(processor: Processor, asked: str, report: Callable[[str], None]) -> KernelChoice:
    """What `ExecutorConfig.kernels` leads to on this CPU. `report` is told that a compilation
    begins. Raises `InvalidRequest` for kernels that are asked for and cannot be had."""
    if asked == "reference":
        return KernelChoice("reference", why_not_better=("native: the reference is asked for",))
    try:
        library, refused = load_best(report)
    except NativeUnavailable as error:
        check_without_native(asked, str(error))
        return KernelChoice("reference", why_not_better=(f"native: {error}",))
    instructions = library.rl_instructions().decode()
    prebuilt = Path(library._name).parent == FOLDER
    why = better_units(processor, instructions, refused, prebuilt)
    return KernelChoice("native", instructions, prebuilt, why, library)


def better_units(processor: Processor, used: str, refused: str, prebuilt: bool) -> tuple[str, ...]:
    """Why no instruction set is used that is better than `used`, where the system `refused` the
    tile unit ("": it did not). `prebuilt`: the library came with the package."""
    lacks = "the processor does not have it"
    if not processor.told:
        lacks = "the system does not say whether the processor has it"
    compiled = "the compiler that made the library does not know it"
    if prebuilt:
        compiled = "the library that came with the package was compiled without it"
    reasons = []
    for one in (*processor.lacks, *processor.has):
        if one.name == used:
            break
        if one in processor.lacks:
            reasons.append(f"{one.name}: {lacks}")
        elif one.name == "amx" and refused:
            reasons.append(f"{one.name}: {refused}")
        else:
            reasons.append(f"{one.name}: {compiled}")
    return tuple(reasons)


def choose_on_gpu(device: torch.device, asked: str) -> KernelChoice:
    """What `ExecutorConfig.kernels` leads to on this GPU. Raises `InvalidRequest` for kernels that
    are not a GPU's."""
    check_gpu_kernels(asked, device)
    if asked == "reference":
        return KernelChoice("reference", why_not_better=("triton: the reference is asked for",))
    name = kernels_for(device).name
    reason = why_not_triton(device)
    if name == "reference" and reason is None:
        reason = "it cannot be imported"
    return KernelChoice(name, why_not_better=() if reason is None else (f"triton: {reason}",))
