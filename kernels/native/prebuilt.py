"""Libraries that a wheel brings along, one for each instruction set of its architecture.

They are apart, not one library that chooses inside: what the compiler makes of a template of the
standard library, the linker keeps once, and that one might have the best set's instructions. Where
a process loads two, one after the other, they share nothing: all but their interface is hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rootlace.kernels.native.processor import Processor

FOLDER = Path(__file__).parent / "prebuilt"
"""A checkout has none."""


def prebuilt_library(
    processor: Processor, without: Collection[str] = (), folder: Path = FOLDER
) -> Path | None:
    """The best one that runs on `processor`, `without` the instruction sets of these names; None if
    there is none."""
    for instructions in processor.has:
        path = folder / f"{instructions.name}.so"
        if instructions.name not in without and path.is_file():
            return path
    return None
