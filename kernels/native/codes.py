"""Weights that are kept as codes, as the kernels in C++ take them (`src/codes.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch

from rootlace.kernels.native import library as native
from rootlace.kernels.reference.layers import flat_scales
from rootlace.kernels.weights import CODES, Dense, Quantised, Weight, parts_of, rows_of, same

CHUNK = 16
"""Groups are whole ones of so many inputs."""
CODE_KINDS = {"int8": 0, "fp8_e4m3": 1}
FOUR_BITS = 2
NUMBERS = {
    None: -1,
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.uint8: 4,
}
TABLE = ctypes.c_float * 16


def parts_packed(weight: Weight, gated: bool) -> tuple[Dense | Quantised, ...]:
    """What is packed side by side: gate and values, or all."""
    parts = parts_of(weight)
    if not gated or len(parts) > 1:
        return parts
    gate, values = torch.arange(weight.shape[0]).chunk(2)
    return rows_of(parts[0], gate), rows_of(parts[0], values)


def why_not(parts: Sequence[Dense | Quantised], gated: bool) -> str | None:
    """Why the kernels cannot multiply by the codes of a weight's parts (gate and values, if gated);
    None if they can."""
    found = [part for part in parts if isinstance(part, Quantised)]
    if len(found) != len(parts):
        return "some of what is packed together is dense"
    if len(parts) > (2 if gated else 1) or len({part.shape[0] for part in parts}) > 1:
        return "parts of unlike schemes are packed together"
    first = found[0].order
    if any(not same(part.order, first) for part in found):
        return "what is packed together has unlike orders of columns"
    for part in found:
        if part.group % CHUNK and part.group != part.shape[1]:
            return f"groups are not of whole {CHUNK} inputs, but of {part.group}"
        if not _finite(part):
            return "some scales or codes are not finite"
    return None


def _finite(weight: Quantised) -> bool:
    for tensor in (weight.scales, weight.offsets, weight.units, weight.offset_units):
        if tensor is not None and not bool(tensor.isfinite().all()):
            return False
    if weight.kind != "fp8_e4m3":
        return True
    return not bool((weight.values.view(torch.uint8) & 127).eq(127).any())


def prepared(weight: Quantised) -> Quantised:
    """The same weight in the form that the kernels take."""
    if _alike(weight) and _whole(weight):
        return weight
    scales, offsets = flat_scales(weight)
    return replace(weight, scales=scales, offsets=offsets, units=None, offset_units=None)


def _alike(weight: Quantised) -> bool:
    """Whether scales and offsets have units of one form, or none."""
    units, others = weight.units, weight.offset_units
    if weight.offsets is None or (units is None and others is None):
        return True
    if units is None or others is None:
        return False
    return units.dtype == others.dtype and units.shape == others.shape


def _whole(weight: Quantised) -> bool:
    """Whether units are of whole pairs of chunks, which codes of four bits are packed in."""
    if weight.units is None or weight.kind in CODE_KINDS:
        return True
    return weight.shape[1] // weight.units.shape[1] % (2 * CHUNK) == 0


def scheme_of(weight: Quantised) -> native.Scheme:
    """Of a weight that is `prepared`."""
    code = CODES[weight.scheme.codes]
    units = weight.units
    return native.Scheme(
        codes=CODE_KINDS.get(weight.kind, FOUR_BITS),
        group=0 if weight.group == weight.shape[1] else weight.group,
        scales=NUMBERS[weight.scales.dtype],
        offsets=NUMBERS[None if weight.offsets is None else weight.offsets.dtype],
        units=NUMBERS[None if units is None else units.dtype],
        unit_groups=1 if units is None else weight.scales.shape[1] // units.shape[1],
        table=TABLE(*(code.table or ())),
    )


class Source:
    """What is packed, for C; valid as long as this object is."""

    def __init__(self, weight: Quantised) -> None:
        parts = (weight.values, weight.scales, weight.offsets, weight.units, weight.offset_units)
        self._held = [None if part is None else part.contiguous() for part in parts]
        addresses = [None if part is None else part.data_ptr() for part in self._held]
        self.structure = native.Source(*addresses)
