"""Token embedding, a gather of rows: `reference/layers.py`. Bit for bit what it copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture
from rootlace.kernels.triton.tuning import settings
from rootlace.kernels.triton.variants import Variant


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(weight_ptr, ids_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(ids_ptr + row).to(tl.int64)
    values = tl.load(weight_ptr + token * stride + column, mask=inside)
    tl.store(out_ptr + row * width + column, values, mask=inside)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `weight` [V, H] named by `ids` [T] (int64 or int32) -> [T, H], the weight's dtype.

    Ids must be in 0..V-1: nothing checks them on the device.
    """
    if weight.stride(1) != 1:
        raise ValueError("the columns of the embedding's weight must be adjacent")
    tokens, width = len(ids), weight.shape[1]
    out = torch.empty((tokens, width), device=weight.device, dtype=weight.dtype)
    if out.numel():
        launch = settings("embedding", architecture(weight.device))
        block = launch.blocks["BLOCK"]
        embedding_kernel[(tokens, triton.cdiv(width, block))](
            weight,
            ids.contiguous(),
            out,
            width,
            weight.stride(0),
            BLOCK=block,
            num_warps=launch.num_warps,
        )
    return out


def variants(arch: int) -> list[Variant]:
    launch = settings("embedding", arch)
    return [
        Variant(
            TYPE_NAMES[dtype],
            embedding_kernel,
            {
                "weight_ptr": f"*{TYPE_NAMES[dtype]}",
                "ids_ptr": "*i64",
                "out_ptr": f"*{TYPE_NAMES[dtype]}",
                "width": "i32",
                "stride": "i32",
                "BLOCK": "constexpr",
            },
            {"BLOCK": launch.blocks["BLOCK"]},
            ("weight_ptr", "out_ptr", "width", "stride"),
            num_warps=launch.num_warps,
        )
        for dtype in (torch.bfloat16, torch.float32)
    ]
