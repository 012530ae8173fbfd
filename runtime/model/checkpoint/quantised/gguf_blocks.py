"""Weights in the blocks of a GGUF file, as the kernels multiply by them.

Codes, scales and offsets are the file's; they are put where a `Quantised` has them. What such a
weight stands for is what the `gguf` package's `dequantize` gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rootlace.kernels.weights import Quantised, Scheme

Blocks = torch.Tensor
"""uint8 [rows, blocks of a row, bytes of a block]."""


def _floats(part: Blocks) -> torch.Tensor:
    """float16 [rows, blocks * n], of parts of 2n bytes."""
    return part.contiguous().view(torch.float16).flatten(1)


def _halves(part: Blocks) -> torch.Tensor:
    """The codes of half bytes in files' order: all lower halves of a run of bytes, then all upper
    ones. uint8 [..., 2, bytes]."""
    return torch.stack((part & 15, part >> 4), dim=-2)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 0 to 15, uint8 [rows, ...], with input 2i in the lower half of byte i."""
    codes = codes.flatten(1)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _q8_0(blocks: Blocks) -> Quantised:
    values = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return Quantised(Scheme("int8", 32), values, _floats(blocks[..., :2]))


def _q4_0(blocks: Blocks) -> Quantised:
    codes = _halves(blocks[..., 2:]) ^ 8  # codes of 0 to 15 less 8, as int4 has them
    return Quantised(Scheme("int4", 32), _packed(codes), _floats(blocks[..., :2]))


def _q4_1(blocks: Blocks) -> Quantised:
    values = _packed(_halves(blocks[..., 4:]))
    scales, offsets = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    return Quantised(Scheme("uint4", 32, offsets=True), values, scales, offsets)


def _q5_0(blocks: Blocks) -> Quantised:
    values = _fives(blocks[..., 2:6], blocks[..., 6:]) - 16
    return Quantised(Scheme("int8", 32), values, _floats(blocks[..., :2]))


def _q5_1(blocks: Blocks) -> Quantised:
    values = _fives(blocks[..., 4:8], blocks[..., 8:])
    scales, offsets = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    return Quantised(Scheme("int8", 32, offsets=True), values, scales, offsets)


def _fives(high: Blocks, low: Blocks) -> torch.Tensor:
    """Codes of five bits, int8: the fifth one of 32 codes is in four bytes."""
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (high.unsqueeze(-1) >> shifts) & 1  # [rows, blocks, 4, 8]
    return (_halves(low).flatten(1) | (fifth.flatten(1) << 4)).to(torch.int8)


def _q4_k(blocks: Blocks) -> Quantised:
    scales, minima, unit, minimum_unit = _k_scales(blocks)
    values = _packed(_halves(blocks[..., 16:].unflatten(-1, (4, 32))))
    scheme = Scheme("uint4", 32, offsets=True)
    return Quantised(scheme, values, scales, minima, units=unit, offset_units=-minimum_unit)


def _q5_k(blocks: Blocks) -> Quantised:
    scales, minima, unit, minimum_unit = _k_scales(blocks)
    # Bit i of byte j is the fifth one of input 32 i + j.
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32)))
    values = (low.flatten(1) | (fifth.flatten(1) << 4)).to(torch.int8)
    scheme = Scheme("int8", 32, offsets=True)
    return Quantised(scheme, values, scales, minima, units=unit, offset_units=-minimum_unit)


def _q6_k(blocks: Blocks) -> Quantised:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64))).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    values = (low | (high.flatten(1) << 4)).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Quantised(Scheme("int8", 16), values, scales, units=_floats(blocks[..., 208:]))


def _k_scales(blocks: Blocks) -> tuple[torch.Tensor, ...]:
    """Of Q4_K and Q5_K: scales and minima of eight groups (six bits each, in twelve bytes), and
    what a block's are multiplied by."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=-1)
    unit, minimum_unit = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    return scales.flatten(1), minima.flatten(1), unit, minimum_unit


def _iq4_nl(blocks: Blocks) -> Quantised:
    values = _packed(_halves(blocks[..., 2:]))
    return Quantised(Scheme("nl4", 32), values, _floats(blocks[..., :2]))


def _iq4_xs(blocks: Blocks) -> Quantised:
    # Of each group's six bits four are in half a byte, two in a quarter of one.
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    scales = (low | (high << 4)).to(torch.int8) - 32
    values = _packed(_halves(blocks[..., 8:].unflatten(-1, (8, 16))))
    return Quantised(Scheme("nl4", 32), values, scales, units=_floats(blocks[..., :2]))


def _mxfp4(blocks: Blocks) -> Quantised:
    # 2 to the power of the byte less 127; the lowest one is below what exponents reach.
    exponents = blocks[..., 0].to(torch.int16)
    scales = torch.where(exponents == 0, 1 << 6, exponents << 7).view(torch.bfloat16)
    values = _packed(_halves(blocks[..., 1:]))
    return Quantised(Scheme("e2m1", 32), values, scales)


QUANTISED: dict[str, Callable[[Blocks], Quantised]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""How each type of blocks is taken apart."""
