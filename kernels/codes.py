"""The small codes that weights are stored as, and what codes of four bits stand for."""

from __future__ import annotations

from typing import Literal

Codes = Literal["int8", "int4", "uint4", "fp8_e4m3", "e2m1", "nl4"]
"""int4 has a sign, uint4 has none. e2m1: the four-bit floats of MXFP4. nl4: the levels of GGUF's
IQ4_NL."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

TABLES: dict[Codes, tuple[float, ...]] = {
    "int4": tuple(float(i - 16 if i > 7 else i) for i in range(16)),
    "uint4": tuple(float(i) for i in range(16)),
    "e2m1": (*_E2M1, *(-value for value in _E2M1)),
    "nl4": tuple(float(value) for value in _NL4),
}
"""Two of these share a byte: the code of input 2i is the lower half of byte i."""
