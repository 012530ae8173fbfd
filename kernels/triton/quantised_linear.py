"""Products with weights of small codes: `reference/layers.py`, without a dense matrix in memory.

A program computes BLOCK_M rows of BLOCK_N outputs. Codes are unpacked in registers, BLOCK_K inputs
at a time, multiplied by their groups' scales as `weights.Quantised` says, rounded to the type of
activations, and multiplied with these by the matrix units. So the weights are read once, in their
codes, for every BLOCK_M rows: a kernel for steps of few rows, which are bound by reading. Steps of
more rows make each matrix dense once, as the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.reference.layers import linear as dense_products
from rootlace.kernels.reference.layers import table_of
from rootlace.kernels.triton.launching import (
    TYPE_NAMES,
    architecture,
    dot,
    from_e4m3,
    native_e4m3,
    padded,
    round_to,
    settings,
)
from rootlace.kernels.weights import CODES, Quantised, Weight, parts_of

MOST_ROWS = 64
"""Rows of a step beyond which matrices are made dense. What would be best has not been measured."""


@triton.jit
def _numbers(pointer, units, output, group, inside, GROUPS: tl.constexpr, UNITS: tl.constexpr):
    """Scales or offsets of outputs [N, 1] and groups [1, K], float32; 0 where not `inside`."""
    found = tl.load(pointer + output * GROUPS + group, mask=inside, other=0).to(tl.float32)
    if units is not None:
        unit = tl.load(units + output * UNITS + group // (GROUPS // UNITS), mask=inside, other=0)
        found *= unit.to(tl.float32)
    return found


@triton.jit(do_not_specialize=["rows"])
def quantised_linear_kernel(
    x,  # [T, INPUTS]
    values,  # [OUTPUTS, INPUTS], or [OUTPUTS, INPUTS / 2] where two codes share a byte
    table,  # [16] float32, what codes of four bits stand for, or nothing
    scales,  # [OUTPUTS, GROUPS]
    offsets,  # the same, or nothing
    units,  # [OUTPUTS, UNITS] of scales, or nothing
    offset_units,  # [OUTPUTS, OFFSET_UNITS] of offsets, or nothing
    order,  # [INPUTS] int32, or nothing
    bias,  # [OUTPUTS], or nothing
    out,  # [T, OUTPUTS]
    rows,
    x_stride,
    out_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    OFFSET_UNITS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): outputs from i * BLOCK_N on, of rows from j * BLOCK_M on."""
    output = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column = k
        if order is not None:
            column = tl.load(order + k, mask=k < INPUTS, other=0)
        a = tl.load(
            x + row[:, None] * x_stride + column[None, :],
            mask=(row < rows)[:, None] & (k < INPUTS)[None, :],
            other=0,
        )
        inside = (output < OUTPUTS)[:, None] & (k < INPUTS)[None, :]
        if table is not None:
            place = values + output[:, None] * (INPUTS // 2) + (k // 2)[None, :]
            code = tl.load(place, mask=inside, other=0).to(tl.int32)
            number = tl.load(table + ((code >> (k % 2 * 4)[None, :]) & 15))
        else:
            code = tl.load(values + output[:, None] * INPUTS + k[None, :], mask=inside, other=0)
            number = from_e4m3(code, tl.float32, NATIVE) if FP8 else code.to(tl.float32)
        group = (k // (INPUTS // GROUPS))[None, :]
        weight = number * _numbers(scales, units, output[:, None], group, inside, GROUPS, UNITS)
        if offsets is not None:
            weight += _numbers(
                offsets, offset_units, output[:, None], group, inside, GROUPS, OFFSET_UNITS
            )
        acc = dot(a, tl.trans(round_to(weight, a.dtype)), acc)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_stride + output[None, :],
        round_to(acc, out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )


def linear(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `interface.Linear`. x [T, inputs] -> [T, outputs] in x's dtype."""
    parts = parts_of(weight)
    if len(x) > MOST_ROWS or not any(isinstance(part, Quantised) for part in parts):
        return dense_products(x, weight, out)
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = x.new_empty((len(x), weight.shape[0]))
    begin = 0
    for part in parts:
        columns = out[:, begin : begin + part.shape[0]]
        begin += part.shape[0]
        if isinstance(part, Quantised):
            _multiply(x, part, columns)
        else:
            columns.copy_(dense_products(x, part))
    return out


def _multiply(x: torch.Tensor, weight: Quantised, out: torch.Tensor) -> None:
    """out [T, outputs] = x W^T + bias, rows of either any distance apart."""
    outputs, inputs = weight.shape
    if not len(x):
        return
    arch = architecture(x.device)
    dtype, units = TYPE_NAMES[x.dtype], weight.units is not None
    launch = settings("quantised_linear", arch, dtype=dtype, units=units)
    rows, columns = min(padded(len(x), 16), MOST_ROWS), launch.blocks["BLOCK_N"]
    codes = weight.scheme.codes
    fp8 = weight.kind == "fp8_e4m3"
    quantised_linear_kernel[(triton.cdiv(outputs, columns), triton.cdiv(len(x), rows))](
        x,
        weight.values.view(torch.uint8) if fp8 else weight.values,
        None if CODES[codes].table is None else table_of(codes, x.device),
        weight.scales,
        weight.offsets,
        weight.units,
        weight.offset_units,
        weight.order,
        weight.bias,
        out,
        len(x),
        x.stride(0),
        out.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUPS=weight.scales.shape[1],
        UNITS=_count(weight.units),
        OFFSET_UNITS=_count(weight.offset_units),
        FP8=fp8,
        NATIVE=native_e4m3(arch),
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=launch.blocks["BLOCK_K"],
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        # Product and sum of a weight are rounded each.
        enable_fp_fusion=False,
    )


def _count(units: torch.Tensor | None) -> int:
    return 1 if units is None else units.shape[1]
