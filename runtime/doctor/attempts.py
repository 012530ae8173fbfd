"""Measurements that may fail for want of memory, and what was wrong with those that did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class Attempts:
    """`faults`: a line for each measurement that failed."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def __call__(self, what: str, measure: Callable[[], Found]) -> Found | None:
        """What `measure` finds; None if it fails, as torch (RuntimeError), the native kernels
        (MemoryError) and the system (OSError) do where memory is short."""
        try:
            return measure()
        except (OSError, MemoryError, RuntimeError) as error:
            said = str(error).strip() or type(error).__name__
            self.faults.append(f"{what}: {said.splitlines()[0]}")
            return None
