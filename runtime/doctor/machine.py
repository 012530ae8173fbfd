"""What the system tells of this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from rootlace.kernels.native.cores import Cores, read_cores
from rootlace.kernels.native.processor import Processor, read_processor
from rootlace.runtime.model.kv.main_memory import main_memory


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, that of the control groups where they grant less."""

    processor: Processor
    system: str
    cores: Cores
    memory_total: int
    memory_available: int


def read_machine() -> Machine:
    """Ask the system."""
    memory = main_memory()
    return Machine(
        read_processor(),
        f"{platform.system()} {platform.release()}",
        read_cores(),
        memory.total,
        memory.available,
    )
