"""What a checkpoint's tensors must be."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]

FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
"""The types of weights that are stored as they are, by the names that safetensors has for them."""
SIZES = {"I32": 4, "I64": 8}
"""Bytes of a number of the other types, where it takes more than one."""


@dataclass(frozen=True)
class Expected:
    """A tensor of one of these shapes and types."""

    shapes: tuple[Shape, ...]
    types: frozenset[str] = FLOATS

    def num_bytes(self, itemsize: int) -> int:
        """The memory that it takes at most, `itemsize` bytes for each float."""
        size = itemsize if self.types == FLOATS else max(SIZES.get(one, 1) for one in self.types)
        return max(map(math.prod, self.shapes)) * size
