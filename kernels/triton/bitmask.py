"""Token masks of constrained decoding, in place: `reference/bitmask.py`.

A bit and a store per forbidden token; what is allowed is not touched, so that bf16 logits of which
half are allowed cost half their bytes and a sixteenth for the mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture
from rootlace.kernels.triton.tuning import settings
from rootlace.kernels.triton.variants import Variant


@triton.jit
def apply_mask_kernel(
    logits_ptr,
    table_ptr,
    rows_ptr,
    vocab,
    stride,
    words,
    table_stride,
    BY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    mask = row
    if BY_ROWS:
        mask = tl.load(rows_ptr + row).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = ids // 32
    bits = tl.load(table_ptr + mask * table_stride + word, mask=word < words, other=0)
    forbidden = ((bits >> (ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * stride + ids, float("-inf"), mask=forbidden & (ids < vocab))


def apply_bitmask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Mask logits [R, V] in place by mask int32 [R, W]; ids beyond 32 * W are not allowed."""
    _apply(logits, mask, None)


def apply_mask_rows(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask logits [R, V] in place by table int32 [N, W], rows int [R]; else as `apply_bitmask`."""
    _apply(logits, table, rows)


def _apply(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor | None) -> None:
    count, vocab = logits.shape
    if not count or not vocab:
        return
    if logits.stride(1) != 1 or table.stride(1) != 1:
        raise ValueError("rows of logits and of masks must be contiguous")
    launch = settings("apply_mask", architecture(logits.device))
    block = launch.blocks["BLOCK"]
    apply_mask_kernel[(triton.cdiv(vocab, block), count)](
        logits,
        table,
        table if rows is None else rows,
        vocab,
        logits.stride(0),
        table.shape[1],
        table.stride(0),
        BY_ROWS=rows is not None,
        BLOCK=block,
        num_warps=launch.num_warps,
    )


def variants(arch: int) -> list[Variant]:
    launch = settings("apply_mask", arch)
    return [
        Variant(
            f"{TYPE_NAMES[dtype]}, {TYPE_NAMES[index] if index else 'no'} rows",
            apply_mask_kernel,
            {
                "logits_ptr": f"*{TYPE_NAMES[dtype]}",
                "table_ptr": "*i32",
                "rows_ptr": f"*{TYPE_NAMES[index or torch.int32]}",
                **dict.fromkeys(("vocab", "stride", "words", "table_stride"), "i32"),
                "BY_ROWS": "constexpr",
                "BLOCK": "constexpr",
            },
            {"BY_ROWS": index is not None, "BLOCK": launch.blocks["BLOCK"]},
            ("logits_ptr", "table_ptr", "rows_ptr"),
            num_warps=launch.num_warps,
        )
        for dtype in (torch.bfloat16, torch.float32)
        for index in (None, torch.int32, torch.int64)
    ]
