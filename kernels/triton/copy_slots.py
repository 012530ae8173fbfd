"""Copying rows of the KV cache, all layers in one launch: `reference/kv_cache.py`, `copy_slots`.

For copy-on-write of partial blocks. Copies are exact to the bit; fp8 caches are copied as bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture, as_bits
from rootlace.kernels.triton.tuning import settings
from rootlace.kernels.triton.variants import Variant


@triton.jit(do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def copy_slots_kernel(cache_ptr, source_ptr, target_ptr, width, layer_stride, BLOCK: tl.constexpr):
    """Program (i, l, c) copies part c of slot `source[i]`'s `width` elements in layer l."""
    index = tl.program_id(0)
    layer = cache_ptr + tl.program_id(1).to(tl.int64) * layer_stride
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = layer + tl.load(source_ptr + index).to(tl.int64) * width
    target = layer + tl.load(target_ptr + index).to(tl.int64) * width
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


def copy_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """cache[target[i]] = cache[source[i]] in every layer at once, in place.

    cache [L, B, S, N, D] (layers, keys and values, are one axis L), each layer contiguous; source,
    target int64 [M] slots. No target may also be a source, or appear twice.
    """
    if not cache[0].is_contiguous():
        raise ValueError("the layers of the KV cache must be contiguous")
    if not len(source):
        return
    bits = as_bits(cache)
    width = bits.shape[3] * bits.shape[4]
    launch = settings("copy_slots", architecture(cache.device))
    block = launch.blocks["BYTES"] // bits.itemsize
    copy_slots_kernel[(len(source), len(bits), triton.cdiv(width, block))](
        bits,
        source.contiguous(),
        target.contiguous(),
        width,
        bits.stride(0),
        BLOCK=block,
        num_warps=launch.num_warps,
    )


def variants(arch: int) -> list[Variant]:
    launch = settings("copy_slots", arch)
    return [
        Variant(
            "fp8" if dtype == torch.uint8 else TYPE_NAMES[dtype],
            copy_slots_kernel,
            {
                "cache_ptr": f"*{TYPE_NAMES[dtype]}",
                "source_ptr": "*i64",
                "target_ptr": "*i64",
                "width": "i32",
                "layer_stride": "i64",
                "BLOCK": "constexpr",
            },
            {"BLOCK": launch.blocks["BYTES"] // dtype.itemsize},
            ("cache_ptr", "width", "layer_stride"),
            num_warps=launch.num_warps,
        )
        for dtype in (torch.bfloat16, torch.uint8)
    ]
