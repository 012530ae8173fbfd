"""Products with weights.

dense:     y = x W^T + bias
quantised: W[o, i] = integer[o, i] * scale[o, i // group], then as above in x's type
"""

from __future__ import annotations

import torch

from rootlace.kernels.weights import Dense, Quantised, Scheme, Weight

WEIGHTS = frozenset({"dense", "int4", "int8"})
"""The kinds of weights that `linear` multiplies by."""


def linear(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `interface.Linear`. x [T, inputs] -> [T, outputs] in x's dtype."""
    matrix = weight.matrix if isinstance(weight, Dense) else dequantise(weight).to(x.dtype)
    if out is None:
        return torch.nn.functional.linear(x, matrix, weight.bias)
    if weight.bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(weight.bias, x, matrix.t(), out=out)


def quantise(matrix: torch.Tensor, scheme: Scheme, bias: torch.Tensor | None = None) -> Quantised:
    """Round W [outputs, inputs] to the nearest integers; a group's largest magnitude becomes the
    largest integer. Raises ValueError where groups do not fit the inputs."""
    outputs, inputs = matrix.shape
    group = scheme.group or inputs
    if inputs % group or (scheme.bits == 4 and inputs % 2):
        raise ValueError(f"{inputs} inputs are not whole groups of {group} in {scheme.bits} bits")
    groups = matrix.float().view(outputs, inputs // group, group)
    scales = groups.abs().amax(dim=2) / scheme.largest
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(2)
    values = (groups / steps).round().to(torch.int8).view(outputs, inputs)
    if scheme.bits == 4:
        halves = values.view(torch.uint8) & 15
        values = halves[:, ::2] | (halves[:, 1::2] << 4)
    return Quantised(scheme, values, scales, bias)


def dequantise(weight: Quantised) -> torch.Tensor:
    """W, float32 [outputs, inputs]."""
    values = weight.values
    if weight.scheme.bits == 4:
        halves = torch.stack((values & 15, values >> 4), dim=2).flatten(1).to(torch.int8)
        values = torch.where(halves > 7, halves - 16, halves)
    outputs, groups = weight.scales.shape
    return (values.float().view(outputs, groups, -1) * weight.scales.unsqueeze(2)).flatten(1)
