"""What is compiled ahead of time to see that it compiles: kernels as they are really launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as `triton.compile` wants it.

    `signature` names every parameter of the kernel in order with its type ("*bf16", "i32", "fp32",
    "constexpr"); `constants` gives the compile-time ones; `divisible` names pointers and integers
    that are multiples of 16. `fp_fusion`: products and sums may be one operation, rounded once.
    `matrix_units`: its PTX must use them.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    matrix_units: bool = False
