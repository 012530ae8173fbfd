"""Biases, bans, masks and penalties in one pass over the logits: `reference/sampling.py`.

Each program has one tile of one row. It copies the tile, masked, to float32; then it finds, in the
row's two lists, the entries of its tile (they are sorted by token; 128 of them are compared at
once) and changes those tokens in its copy. 2 + 4 bytes per logit (bf16), a bit for the mask, and
the lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import LogitEdits
from rootlace.kernels.triton.launching import Variant, settings
from rootlace.kernels.triton.logit_rows import load_logits
from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
"""What the kernel reads of `LogitEdits.penalties`, in the order of its arguments."""


@triton.jit
def _first_from(token_ptr, low, high, wanted, ENTRIES: tl.constexpr):
    """The first of the places low..high-1 whose token is at least `wanted`; `high` if none is.
    Tokens ascend. Every round narrows the places to one in ENTRIES."""
    while high > low:
        step = (high - low + ENTRIES - 1) // ENTRIES
        places = low + tl.arange(0, ENTRIES) * step
        tokens = tl.load(token_ptr + places, mask=places < high, other=0x7FFFFFFF)
        below = tl.sum((tokens < wanted).to(tl.int32), 0)
        # The last sample below `wanted` is number below - 1: the place is behind it.
        high = tl.minimum(low + below * step, high)
        low = tl.where(below > 0, low + (below - 1) * step + 1, high)
    return low


@triton.jit
def edit_logits_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    bias_start_ptr,
    bias_token_ptr,
    bias_ptr,
    seen_start_ptr,
    seen_token_ptr,
    seen_count_ptr,
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    out_ptr,
    vocab,
    stride,
    words,
    MASKED: tl.constexpr,
    BIASED: tl.constexpr,
    PENALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = load_logits(logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, inside, MASKED)
    out = out_ptr + row.to(tl.int64) * vocab
    tl.store(out + ids, x, mask=inside)
    begin, end = tile * BLOCK, tile * BLOCK + BLOCK
    entry = tl.arange(0, ENTRIES)
    if BIASED:
        # A bias changes nothing of what is masked, so it may come after the mask.
        start, stop = tl.load(bias_start_ptr + row), tl.load(bias_start_ptr + row + 1)
        start = _first_from(bias_token_ptr, start, stop, begin, ENTRIES)
        stop = _first_from(bias_token_ptr, start, stop, end, ENTRIES)
        if start < stop:
            tl.debug_barrier()  # other threads have stored what is changed here
            for first in range(start, stop, ENTRIES):
                there = first + entry < stop
                token = tl.load(bias_token_ptr + first + entry, mask=there, other=0)
                bias = tl.load(bias_ptr + first + entry, mask=there, other=0.0)
                old = tl.load(out + token, mask=there, other=0.0)
                banned = bias == float("-inf")
                tl.store(out + token, tl.where(banned, bias, old + bias), mask=there)
    if PENALISED:
        start, stop = tl.load(seen_start_ptr + row), tl.load(seen_start_ptr + row + 1)
        start = _first_from(seen_token_ptr, start, stop, begin, ENTRIES)
        stop = _first_from(seen_token_ptr, start, stop, end, ENTRIES)
        if start < stop:
            tl.debug_barrier()
            factor = tl.load(repetition_penalty_ptr + row).to(tl.float32)
            frequency = tl.load(frequency_penalty_ptr + row)
            presence = tl.load(presence_penalty_ptr + row)
            for first in range(start, stop, ENTRIES):
                there = first + entry < stop
                token = tl.load(seen_token_ptr + first + entry, mask=there, other=0)
                count = tl.load(seen_count_ptr + first + entry, mask=there, other=0)
                old = tl.load(out + token, mask=there, other=0.0)
                scaled = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
                amount = frequency * count.to(tl.float64) + presence
                amount = tl.where(count > 0, amount, 0.0)
                tl.store(out + token, scaled - amount.to(tl.float32), mask=there)


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], not changed -> float32 [R, V]."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab = logits.shape
    out = torch.empty((count, vocab), dtype=torch.float32, device=logits.device)
    if not out.numel():
        return out
    launch = settings("edit_logits", architecture(logits.device))
    block = launch.blocks["BLOCK"]
    penalties = edits.penalties or dict.fromkeys(PENALTIES, out)
    edit_logits_kernel[(triton.cdiv(vocab, block), count)](
        logits,
        # A tensor that the launch does not read may be any.
        _or(edits.mask_table, out),
        _or(edits.mask_row, out),
        _or(edits.bias_start, out),
        _or(edits.bias_token, out),
        _or(edits.bias, out),
        _or(edits.seen_start, out),
        _or(edits.seen_token, out),
        _or(edits.seen_count, out),
        *(penalties[name] for name in PENALTIES),
        out,
        vocab,
        logits.stride(0),
        0 if edits.mask_table is None else edits.mask_table.shape[1],
        MASKED=edits.mask_row is not None,
        BIASED=edits.bias_start is not None,
        PENALISED=edits.seen_start is not None,
        BLOCK=block,
        ENTRIES=launch.blocks["ENTRIES"],
        num_warps=launch.num_warps,
        # The product of the repetition penalty is rounded before the rest is subtracted.
        enable_fp_fusion=False,
    )
    return out


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def variants(arch: int) -> list[Variant]:
    launch = settings("edit_logits", arch)
    types = {
        **dict.fromkeys(("bias_ptr", "out_ptr"), "*fp32"),
        **dict.fromkeys([f"{name}_ptr" for name in PENALTIES], "*fp64"),
    }
    found = []
    for dtype, masked, biased, penalised in (
        (torch.bfloat16, True, True, True),
        (torch.float32, True, True, True),
        (torch.bfloat16, False, True, True),
        (torch.bfloat16, False, True, False),
        (torch.bfloat16, False, False, True),
        (torch.bfloat16, True, False, False),
    ):
        names = edit_logits_kernel.arg_names
        parts = [("mask", masked), ("biases", biased), ("penalties", penalised)]
        found.append(
            Variant(
                ", ".join([TYPE_NAMES[dtype], *(part for part, there in parts if there)]),
                edit_logits_kernel,
                {**types, "logits_ptr": f"*{TYPE_NAMES[dtype]}"},
                {
                    "MASKED": masked,
                    "BIASED": biased,
                    "PENALISED": penalised,
                    **launch.blocks,
                },
                (*(name for name in names if name.endswith("_ptr")), "vocab", "stride"),
                num_warps=launch.num_warps,
                fp_fusion=False,
            )
        )
    return found
