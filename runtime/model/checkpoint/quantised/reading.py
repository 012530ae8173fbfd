"""Build quantised weights from the tensors of a file. No weight is made dense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.arrays import as_array, as_tensor
from rootlace.kernels.codes import Codes
from rootlace.kernels.weights import CODES, SCALES, Dense, Quantised, Scheme
from rootlace.runtime.model.checkpoint.quantised.blocks import READERS
from rootlace.runtime.model.checkpoint.quantised.layouts import (
    Awq,
    Block,
    Blocks,
    Floats4,
    Gptq,
    Layout,
    Numbers,
    PackedInts,
)
from rootlace.runtime.model.gguf.file import Ggml

# Gguf blocks --------------------------------------------------------------------------------------


def of_blocks(kind: str, data: torch.Tensor) -> Quantised:
    """Build a weight from a GGUF file's blocks of this type, uint8 [rows, blocks of a row, bytes of
    a block]."""
    found = READERS[kind](as_array(data))
    parts = {
        name: as_tensor(np.ascontiguousarray(part))
        for name in ("values", "scales", "offsets", "units", "offset_units")
        if (part := getattr(found, name)) is not None
    }
    return Quantised(Scheme(found.codes, found.group, found.offsets is not None), **parts)


# Reading ------------------------------------------------------------------------------------------


StoredTensors = Mapping[str, torch.Tensor]
"""Tensors of a module, by the endings in `Layout.needed`."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight neighbours in AWQ's numbers of 32 bits."""
MIDDLE = {4: 8, 8: 128}
"""Offsets that make stored integers unsigned, by their bits."""


def read_weight(layout: Layout, stored: StoredTensors, rows: int, columns: int) -> Quantised:
    """Build W [rows, columns] without bias, in memory of its own. Raises ValueError if the tensors
    are inconsistent; the message continues the module's name."""
    match layout:
        case Numbers():
            return _numbers(layout, stored, rows, columns)
        case PackedInts():
            return _packed_ints(layout, stored, rows, columns)
        case Gptq():
            return _gptq(layout, stored, rows, columns)
        case Awq():
            return _awq(layout, stored, columns)
        case Floats4() | Blocks():
            return _floats4(layout, stored, rows, columns)
        case Ggml():
            return of_blocks(layout.type, stored[".weight"])
    raise TypeError(f"{layout} has no reader")


def _numbers(layout: Numbers, stored: StoredTensors, rows: int, columns: int) -> Quantised:
    block = layout.block or Block(rows=1)
    scales = _spread(_floats(stored[layout.scale]), block, rows, columns)
    shift = _shift(stored.get(".weight_zero_point"), layout.symmetric, block, rows, columns)
    return _weight(layout, stored[".weight"].clone(), scales, shift, columns)


def _packed_ints(layout: PackedInts, stored: StoredTensors, rows: int, columns: int) -> Quantised:
    shape = stored.get(".weight_shape")
    if shape is not None and shape.tolist() != [rows, columns]:
        raise ValueError(f".weight_shape is {shape.tolist()}, expected [{rows}, {columns}]")
    values = _bytes(stored[".weight_packed"])[:, : columns * layout.bits // 8]
    groups = stored.get(".weight_g_idx")
    if groups is not None and bool((groups == -1).all()):
        groups = None
    # Stated column groups may have any sizes: each group then keeps its one scale.
    width = columns if groups is None else None
    scales = _spread(_floats(stored[".weight_scale"]), layout.block, rows, width)
    zeros = _zero_points(layout, stored, rows, columns)
    shift = _shift(zeros, layout.symmetric, layout.block, rows, width)
    values = _signed(values, layout.bits)
    if groups is None:
        return _weight(layout, values, scales, shift, columns)
    return _sorted(layout, values, scales, shift, groups)


def _zero_points(
    layout: PackedInts, stored: StoredTensors, rows: int, columns: int
) -> torch.Tensor | None:
    """Read zero points of packed integers: packed too or, in old files, bytes."""
    zeros = stored.get(".weight_zero_point")
    if zeros is None:
        return None
    shape = tuple(zeros.shape)
    if zeros.dtype == torch.int32 and shape == layout.packed_zeros(rows, columns):
        unpacked = _unpacked(zeros.t(), layout.bits)[:, :rows].t()
        return unpacked.to(torch.int16) - MIDDLE[layout.bits]
    if zeros.dtype == torch.int8 and shape in layout.block.shapes(rows, columns):
        return zeros
    kind = str(zeros.dtype).removeprefix("torch.")
    raise ValueError(
        f".weight_zero_point is {kind} {list(shape)}, expected "
        f"int32 {list(layout.packed_zeros(rows, columns))} or "
        f"int8 {' or '.join(str(list(one)) for one in layout.block.shapes(rows, columns))}"
    )


def _gptq(layout: Gptq, stored: StoredTensors, rows: int, columns: int) -> Quantised:
    # A number's bytes are 32 / bits neighbours of a column: move the bytes behind their row.
    words = _bytes(stored[".qweight"].unsqueeze(2)).permute(1, 0, 2)
    values = _signed(words.reshape(rows, columns * layout.bits // 8), layout.bits)
    zeros = _unpacked(stored[".qzeros"], layout.bits).t().to(torch.int16)
    if layout.minus_one:
        zeros = (zeros + 1) & ((1 << layout.bits) - 1)
    scales = _floats(stored[".scales"]).t().contiguous()
    groups = stored.get(".g_idx")
    if groups is None:
        groups = torch.arange(columns) // (layout.group or columns)
    return _sorted(layout, values, scales, MIDDLE[layout.bits] - zeros, groups)


def _awq(layout: Awq, stored: StoredTensors, columns: int) -> Quantised:
    def in_order(packed: torch.Tensor) -> torch.Tensor:
        found = _unpacked(packed, 4).t().contiguous()
        return found.view(-1, 8, len(packed))[:, AWQ_ORDER].flatten(0, 1)

    values = _in_bytes(in_order(stored[".qweight"]))
    scales = _floats(stored[".scales"]).t().contiguous()
    shift = MIDDLE[4] - in_order(stored[".qzeros"]).to(torch.int16)
    if layout.symmetric and bool(shift.any()):
        raise ValueError(".qzeros has others than 8, though the weights are symmetric")
    groups = torch.arange(columns) // (layout.group or columns)
    return _sorted(layout, _signed(values, 4), scales, shift, groups)


def _floats4(layout: Floats4 | Blocks, stored: StoredTensors, rows: int, columns: int) -> Quantised:
    if isinstance(layout, Blocks):
        values, scales = stored["_blocks"].reshape(rows, -1), stored["_scales"]
    else:
        values, scales = stored[".weight_packed"], stored[".weight_scale"]
    scales = _floats(scales)
    if ".weight_global_scale" in stored:
        scales = scales.float() / stored[".weight_global_scale"].float()
    return _weight(layout, values.clone(), scales, None, columns)


def alike(weights: Sequence[Dense | Quantised]) -> list[Dense | Quantised]:
    """Give the weights of one product the same scheme, so that they can be joined: offsets of zero
    where only some weights have offsets."""
    shifted = {
        weight.scheme
        for weight in weights
        if isinstance(weight, Quantised) and weight.offsets is not None and weight.units is None
    }
    found: list[Dense | Quantised] = []
    for weight in weights:
        if isinstance(weight, Quantised) and weight.units is None:
            scheme = replace(weight.scheme, offsets=True)
            if weight.offsets is None and scheme in shifted:
                zeros = torch.zeros(weight.scales.shape, device=weight.scales.device)
                weight = replace(weight, scheme=scheme, offsets=zeros)
        found.append(weight)
    return found


# ------------------------------------------------------------ parts


def _weight(
    layout: Layout,
    values: torch.Tensor,
    scales: torch.Tensor,
    shift: torch.Tensor | None,
    columns: int,
    order: torch.Tensor | None = None,
) -> Quantised:
    """Build a weight of codes and scales [rows, groups]; `shift` is added to each code."""
    offsets = None
    if shift is not None and bool(shift.any()):
        offsets = scales.float() * shift
    group = None if scales.shape[1] == 1 else columns // scales.shape[1]
    scheme = Scheme(_codes(layout), group, offsets is not None)
    order = None if order is None else order.to(torch.int32)
    return Quantised(scheme, values, scales, offsets, order=order)


def _sorted(
    layout: Layout,
    values: torch.Tensor,
    scales: torch.Tensor,
    shift: torch.Tensor | None,
    groups: torch.Tensor,
) -> Quantised:
    """Build a weight as `_weight` does, with column i of group groups[i]: columns are sorted by
    group. Groups of unequal sizes are cut into smaller ones of equal size."""
    columns = len(groups)
    if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
        raise ValueError(f": a group of columns is not among {scales.shape[1]}")
    order = None
    if bool((groups[1:] < groups[:-1]).any()):
        order = torch.argsort(groups, stable=True)
        values = _reordered(layout, values, order)
    sizes = torch.bincount(groups, minlength=scales.shape[1])
    repeats = sizes // math.gcd(*sizes.tolist())
    scales = scales.repeat_interleave(repeats, dim=1)
    if shift is not None:
        shift = shift.repeat_interleave(repeats, dim=1)
    return _weight(layout, values, scales, shift, columns, order)


def _reordered(layout: Layout, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the codes with their columns in this order."""
    if CODES[_codes(layout)].in_byte == 1:
        return values.index_select(1, order)
    return _in_bytes(_halves(values).index_select(1, order))


def _codes(layout: Layout) -> Codes:
    return cast(Codes, layout.codes)


def _spread(found: torch.Tensor, block: Block, rows: int, columns: int | None) -> torch.Tensor:
    """Spread blocks' scales or zero points to rows and groups. `columns` None: a block is a group,
    whatever its size."""
    if found.dim() < 2:
        found = found.reshape(-1, 1)
    if len(found) == 1:
        found = found.expand(rows, -1)
    elif len(found) != rows:
        found = found.repeat_interleave(block.rows or 1, dim=0)[:rows]
    if columns is None or block.columns is None or found.shape[1] == 1:
        return found.contiguous()
    if columns % block.columns:
        # The last block is smaller than the others: all are cut into groups of one size.
        size = math.gcd(block.columns, columns)
        found = found.repeat_interleave(block.columns // size, dim=1)[:, : columns // size]
    return found.contiguous()


def _shift(
    zeros: torch.Tensor | None, symmetric: bool, block: Block, rows: int, columns: int | None
) -> torch.Tensor | None:
    """Return the negated zero points, to add to codes. Raises ValueError if inconsistent."""
    if zeros is None:
        return None
    if symmetric and bool(zeros.float().any()):
        raise ValueError(".weight_zero_point is not zero, though the weights are symmetric")
    if zeros.is_floating_point():
        zeros = zeros.float()
        if not bool(((zeros == zeros.round()) & (zeros.abs() <= 128)).all()):
            raise ValueError(".weight_zero_point has numbers that are not integers of eight bits")
    return -_spread(zeros.to(torch.int16), block, rows, columns)


def _floats(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in a dtype that `Quantised` allows. Exponents become bfloat16 powers of two."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = scales.view(torch.uint8).to(torch.int16)
        # bfloat16's exponent has the same excess; its 2^-127 is not normal.
        return torch.where(exponents > 0, exponents << 7, 64).to(torch.int16).view(torch.bfloat16)
    return scales if scales.dtype in SCALES else scales.float()


# ------------------------------------------------------------ integers in bits


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """View int32 numbers as bytes, the lowest bits first."""
    return words.contiguous().view(torch.uint8)


def _halves(values: torch.Tensor) -> torch.Tensor:
    """Split bytes into halves, the lower one first."""
    pairs = values.to(torch.int16)
    return ((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)


def _in_bytes(halves: torch.Tensor) -> torch.Tensor:
    """Join halves into bytes: the reverse of `_halves`."""
    pairs = halves.contiguous().view(torch.int16)
    return ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the integers of `bits` bits from int32 numbers, uint8."""
    values = _bytes(words)
    return values if bits == 8 else _halves(values)


def _signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Subtract `MIDDLE` from unsigned integers, as two's complement, packed as given."""
    if bits == 8:
        return (values ^ 128).view(torch.int8)
    return values ^ 0x88
