"""Codes of quantised weights, and the values of four-bit codes."""

from __future__ import annotations

from typing import Literal

Codes = Literal["int8", "int4", "uint4", "fp8_e4m3", "e2m1", "nl4"]
"""Types of codes. int4 is signed, uint4 unsigned; e2m1: MXFP4's four-bit floats; nl4: the levels of
GGUF's IQ4_NL."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

TABLES: dict[Codes, tuple[float, ...]] = {
    "int4": tuple(float(i - 16 if i > 7 else i) for i in range(16)),
    "uint4": tuple(float(i) for i in range(16)),
    "e2m1": (*_E2M1, *(-value for value in _E2M1)),
    "nl4": tuple(float(value) for value in _NL4),
}
"""Values of four-bit codes. Two codes share a byte: input 2i has the lower half of byte i."""
