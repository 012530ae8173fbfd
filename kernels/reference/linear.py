"""Products with weights.

dense:     y = x W^T + bias
quantised: W[o, i] = code * scale + offset of its group, then as above in x's type
"""

from __future__ import annotations

import functools

import torch

from rootlace.kernels.weights import (
    CODES,
    Codes,
    Dense,
    Quantised,
    Scheme,
    Stacked,
    Weight,
    parts_of,
)

WEIGHTS = frozenset({"dense", *CODES})
"""The kinds of weights that `linear` multiplies by."""

LARGEST = {"int8": 127, "int4": 7}
"""The integers that `quantise` makes are -largest ... largest."""
AT_ONCE = 1 << 20
"""So many weights are rounded at a time, which bounds the memory that this takes beside them."""


def linear(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `interface.Linear`. x [T, inputs] -> [T, outputs] in x's dtype."""
    if isinstance(weight, Stacked):
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1, out=out)
    matrix = weight.matrix if isinstance(weight, Dense) else dequantise(weight).to(x.dtype)
    if out is None:
        return torch.nn.functional.linear(x, matrix, weight.bias)
    if weight.bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(weight.bias, x, matrix.t(), out=out)


def quantise(
    matrix: torch.Tensor,
    scheme: Scheme,
    bias: torch.Tensor | None = None,
    scales: torch.dtype = torch.float32,
) -> Quantised:
    """Round W [outputs, inputs] to the nearest int8 or int4 without offsets; a group's largest
    magnitude becomes the largest integer, as far as a scale of that type allows. Raises ValueError
    where groups do not fit the inputs, or for another scheme."""
    if scheme.codes not in LARGEST or scheme.offsets:
        raise ValueError(f"weights are not rounded to {scheme}")
    outputs, inputs = matrix.shape
    group = scheme.group or inputs
    code = CODES[scheme.codes]
    if inputs % group or inputs % code.in_byte:
        raise ValueError(f"{inputs} inputs are not whole groups of {group} in {scheme.codes}")
    values = matrix.new_empty((outputs, inputs // code.in_byte), dtype=code.dtype)
    found = matrix.new_empty((outputs, inputs // group), dtype=scales)
    rows = max(1, AT_ONCE // inputs)
    for begin in range(0, outputs, rows):
        some = slice(begin, begin + rows)
        _round(matrix[some], LARGEST[scheme.codes], values[some], found[some])
    return Quantised(scheme, values, found, bias=bias)


def _round(rows: torch.Tensor, largest: int, values: torch.Tensor, scales: torch.Tensor) -> None:
    groups = rows.float().view(*scales.shape, -1)
    scales.copy_(groups.abs().amax(dim=2) / largest)
    steps = torch.where(scales > 0, scales.float(), 1.0).unsqueeze(2)
    rounded = (groups / steps).round_().clamp_(-largest, largest).to(torch.int8).flatten(1)
    if values.dtype == torch.int8:
        values.copy_(rounded)
        return
    halves = rounded.view(torch.uint8) & 15
    torch.bitwise_or(halves[:, ::2], halves[:, 1::2] << 4, out=values)


def dequantise(weight: Quantised) -> torch.Tensor:
    """W, float32 [outputs, inputs], its columns in the order of the inputs."""
    outputs, inputs = weight.shape
    scales, offsets = flat_scales(weight)
    found = numbers(weight).view(outputs, -1, weight.group) * scales.unsqueeze(2)
    if offsets is not None:
        found += offsets.unsqueeze(2)
    found = found.view(outputs, inputs)
    if weight.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, weight.order.long(), found)


def dense(weight: Weight, dtype: torch.dtype) -> Dense:
    """The numbers that a weight stands for."""
    parts = parts_of(weight)
    matrices = [part.matrix if isinstance(part, Dense) else dequantise(part) for part in parts]
    matrix = torch.cat([matrix.to(dtype) for matrix in matrices])
    if all(part.bias is None for part in parts):
        return Dense(matrix)
    biases = [
        torch.zeros(len(matrix)) if part.bias is None else part.bias.float()
        for part, matrix in zip(parts, matrices, strict=True)
    ]
    return Dense(matrix, torch.cat(biases))


def numbers(weight: Quantised) -> torch.Tensor:
    """What the codes stand for, float32 [outputs, inputs]."""
    if CODES[weight.scheme.codes].table is None:
        return weight.values.float()
    halves = torch.stack((weight.values & 15, weight.values >> 4), dim=2).flatten(1)
    return table_of(weight.scheme.codes, halves.device)[halves.int()]


@functools.cache
def table_of(codes: Codes, device: torch.device) -> torch.Tensor:
    """Made once for each device: CUDA graphs cannot capture that it is copied from the host."""
    with torch.inference_mode(False):  # so that it can be used in any mode
        return torch.tensor(CODES[codes].table, device=device)


def flat_scales(weight: Quantised) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets as float32, times their units."""
    scales = _times(weight.scales, weight.units)
    offsets = None if weight.offsets is None else _times(weight.offsets, weight.offset_units)
    return scales, offsets


def _times(scales: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
    if units is None:
        return scales.float()
    repeated = units.float().repeat_interleave(scales.shape[1] // units.shape[1], dim=1)
    return scales.float() * repeated
