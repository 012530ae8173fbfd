"""Root mean square layer norm, alone and with the residual's addition: `reference/layers.py`.

One program per row, which it holds in registers: x and residual are read once, the sum and the
norm are written once, 4 * H elements for `add_rms_norm`. Rounded where the reference rounds: the
sum, the quotient, the product. The mean is summed in another order, in float32 as there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.launching import Launch, Variant, settings
from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture, padded, round_to

WIDEST = 32768
"""Columns that a program can hold in registers."""


@triton.jit
def norm_row(x, weight, width, eps):
    """weight * (x / sqrt(mean(x^2) + eps)) of a row x, zero from `width` on, in its dtype."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    quotient = round_to(wide * scale, x.dtype).to(tl.float32)
    return round_to(quotient * weight.to(tl.float32), x.dtype)


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = norm_row(x, weight, width, eps)
    tl.store(out_ptr + row * width + column, normed, mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    width,
    x_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    total = round_to(residual.to(tl.float32) + x.to(tl.float32), x.dtype)
    tl.store(total_ptr + row * width + column, total, mask=inside)
    normed = norm_row(total, weight, width, eps)
    tl.store(out_ptr + row * width + column, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis. x [..., H], weight [H], same dtype -> [..., H]."""
    rows = _rows(x)
    width = rows.shape[1]
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if out.numel():
        launch = _launch(width, architecture(x.device))
        rms_norm_kernel[(len(rows),)](
            rows,
            weight.contiguous(),
            out,
            width,
            rows.stride(0),
            eps,
            BLOCK=padded(width),
            num_warps=launch.num_warps,
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`s = residual + x`; returns (rms_norm(s), s). Both inputs [T, H]; neither is changed."""
    x, residual = _rows(x), _rows(residual)
    width = x.shape[1]
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    total = torch.empty_like(out)
    if out.numel():
        launch = _launch(width, architecture(x.device))
        add_rms_norm_kernel[(len(x),)](
            x,
            residual,
            weight.contiguous(),
            out,
            total,
            width,
            x.stride(0),
            residual.stride(0),
            eps,
            BLOCK=padded(width),
            num_warps=launch.num_warps,
        )
    return out, total


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., H] as [rows, H] with adjacent columns; a copy only of what has no such view."""
    if x.shape[-1] > WIDEST:
        raise ValueError(f"rows of {x.shape[-1]} columns; at most {WIDEST} are supported")
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(width: int, arch: int) -> Launch:
    return settings("rms_norm", arch, width=padded(width))


def variants(arch: int) -> list[Variant]:
    """Widths of small and large models, one that is no power of two, and the widest row."""
    cases = (
        (torch.bfloat16, 2048),
        (torch.bfloat16, 4096),
        (torch.bfloat16, 5120),
        (torch.float16, 4096),
        (torch.bfloat16, WIDEST),
        (torch.float32, 16384),
    )
    return [
        _variant(arch, kernel, arrays, strides, dtype, width)
        for dtype, width in cases
        for kernel, arrays, strides in (
            (rms_norm_kernel, ("x_ptr", "weight_ptr", "out_ptr"), ("x_stride",)),
            (
                add_rms_norm_kernel,
                ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"),
                ("x_stride", "residual_stride"),
            ),
        )
    ]


def _variant(
    arch: int,
    kernel: Any,
    arrays: tuple[str, ...],
    strides: tuple[str, ...],
    dtype: torch.dtype,
    width: int,
) -> Variant:
    sizes = ("width", *strides)
    return Variant(
        f"{TYPE_NAMES[dtype]}, {width} columns",
        kernel,
        {**dict.fromkeys(arrays, f"*{TYPE_NAMES[dtype]}"), "eps": "fp32"},
        {"BLOCK": padded(width)},
        (*arrays, *sizes),
        num_warps=_launch(width, arch).num_warps,
    )
