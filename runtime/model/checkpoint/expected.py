"""What a checkpoint's tensors must be."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]

FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
"""The types of weights that are stored as they are, by the names that safetensors has for them."""


@dataclass(frozen=True)
class Expected:
    """A tensor of one of these shapes and types."""

    shapes: tuple[Shape, ...]
    types: frozenset[str] = FLOATS
