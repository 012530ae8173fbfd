"""What the system tells of this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import psutil

from rootlace.kernels.native.cores import Cores, read_cores
from rootlace.kernels.native.processor import Processor, read_processor


@dataclass(frozen=True)
class Machine:
    """Memory in bytes."""

    processor: Processor
    system: str
    cores: Cores
    memory_total: int
    memory_available: int


def read_machine() -> Machine:
    """Ask the system."""
    memory = psutil.virtual_memory()
    return Machine(
        read_processor(),
        f"{platform.system()} {platform.release()}",
        read_cores(),
        memory.total,
        memory.available,
    )
