"""Attention of rows with several new tokens over a paged cache (flash attention; Dao 2023,
arXiv:2307.08691).

A program takes one item of `plan_extend` and one KV head. The program computes `block_m` pairs (new
token, query head of the KV head's group) against the item's keys, `block_n` at a time, with the
running softmax in base 2. The heads of a group share every load. Keys of the context and of the
chunk are both read from the cache, in one loop. Only tiles on the diagonal and on the window's edge
need a mask; in other tiles every query sees every key.

Work: 4 D flops per (query, visible key, head). A tile of keys and values is 4 D block_n bytes in 16
bits and serves 4 D block_m block_n flops: block_m flops per byte read. All but the first reader of
a context find it in the L2 cache. At block_m = 128 the matrix units of an H100 (990 Tflop/s) would
take 7.7 TB/s, so the matrix units are the bound, not memory. Exponentials come on top: a tile of
128 x 128 with a head of 128 takes 2048 cycles of products. At 16 exponentials per cycle and
multiprocessor, its exponentials take 1024 cycles, and the compiler does not overlap the two. The
count predicts 60 % of the matrix units' peak; nobody has measured it. The bytes of its context
bound a row with few tokens, so such a context is cut into parts.

Keys and values are read two tiles ahead, which takes three buffers. Triton divides num_stages by
the depth of the chain table -> keys, so num_stages is five.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.attention_plan import FIELDS, MERGE_FIELDS, ExtendPlan
from rootlace.kernels.triton.kv_storage import AttentionInputs, load_codes
from rootlace.kernels.triton.launching import dot, from_e4m3, padded, tanh

LN_2 = tl.constexpr(0.6931471805599453)
ITEM = tl.constexpr(FIELDS)
MERGE = tl.constexpr(MERGE_FIELDS)
LOWEST = tl.constexpr(-1e30)
"""Maximum over no keys: finite, so that differences of maxima are numbers."""

MERGE_HEADS = 8
"""Heads per program of the merge: 8 of 128 columns are 8 float32 per thread."""


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "items"]
)
def _extend_kernel(
    q,  # [T, Nq, D]
    k_cache,  # [B * S, Nk, D], or of integers [B * S, W]
    v_cache,
    k_scales,  # [Nk] float32, or the words of a cache of integers, or nothing
    v_scales,
    block_tables,  # [R, W]
    items,  # [I, 8]
    out,  # [T, Nq, D]
    lse,  # [T, Nq] float32, or nothing
    part_out,  # [P, Nq, D] float32
    part_lse,  # [P, Nq] float32
    score_scale,  # base 2; with a soft cap, natural and divided by the cap
    soft_cap,  # base 2
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute item `pid // KV_HEADS` for KV head `pid % KV_HEADS`."""
    item = items + (tl.program_id(0) // KV_HEADS) * ITEM
    head = tl.program_id(0) % KV_HEADS
    row = tl.load(item)
    first_token = tl.load(item + 1)
    count = tl.load(item + 2)
    first_position = tl.load(item + 3)
    begin = tl.multiple_of(tl.load(item + 4), BLOCK_N)
    end = tl.load(item + 5)

    pair = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    token = pair // GROUP
    query_head = head * GROUP + pair % GROUP
    # With a group that does not divide block_m, the last pairs belong to a token of another tile.
    query = tl.load(
        q
        + (first_token + token).to(tl.int64)[:, None] * q_token_stride
        + query_head[:, None] * q_head_stride
        + column[None, :],
        mask=(token < count)[:, None] & (column < DIM)[None, :],
        other=0,
    )
    position = first_position + tl.minimum(token, count - 1)
    table = block_tables + row.to(tl.int64) * table_stride
    k_head = k_cache + head * DIM
    v_head = v_cache + head * DIM
    if FP8:
        score_scale *= tl.load(k_scales + head)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        place = start + tl.arange(0, BLOCK_N)
        # Places beyond the end read the last key again. No query sees these places, so the load
        # needs no mask and never reads an unwritten slot.
        stored = tl.minimum(place, end - 1).to(tl.uint32)  # unsigned: the division is a shift
        block = tl.load(table + stored // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + stored % BLOCK_SIZE
        offset = slot[:, None] * (KV_HEADS * DIM) + column[None, :]
        if BITS:
            seen = place < end
            k = load_codes(
                k_cache, k_scales, slot, head, column, seen, query.dtype, KV_HEADS, DIM, BITS
            )
            if BLOCK_M > 64:
                v = load_codes(
                    v_cache, v_scales, slot, head, column, seen, query.dtype, KV_HEADS, DIM, BITS
                )
        elif BLOCK_D == DIM:
            k = tl.load(k_head + offset)
            v = tl.load(v_head + offset)
        else:
            k = tl.load(k_head + offset, mask=(column < DIM)[None, :], other=0)
            v = tl.load(v_head + offset, mask=(column < DIM)[None, :], other=0)
        if FP8:
            k = from_e4m3(k, query.dtype, NATIVE)
            v = from_e4m3(v, query.dtype, NATIVE)
        score = dot(query, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if CAPPED:
            # soft_cap is in base 2 already, and so is the score.
            score = soft_cap * tanh(score * score_scale)
        every = start + BLOCK_N <= first_position + 1  # key is visible to every query
        if WINDOW:
            every = every & (start > first_position + count - 1 - WINDOW)
        if not every:
            visible = place[None, :] <= position[:, None]
            if WINDOW:
                visible &= place[None, :] > position[:, None] - WINDOW
            score = tl.where(visible, score, float("-inf"))
        if CAPPED:
            new_peak = tl.maximum(peak, tl.max(score, 1))
            weight = tl.exp2(score - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(score, 1) * score_scale)
            weight = tl.exp2(score * score_scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        if BITS and BLOCK_M <= 64:
            # Unpacked late, values spare sm_80 registers; in larger tiles they cost sm_90 some.
            v = load_codes(
                v_cache, v_scales, slot, head, column, seen, query.dtype, KV_HEADS, DIM, BITS
            )
        acc = dot(weight.to(query.dtype), v, acc * shrink[:, None])
        peak = new_peak

    # A query may see no position of a part: its output is 0, its log-sum-exp -inf.
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    if FP8:
        factor *= tl.load(v_scales + head)
    acc = acc * factor[:, None]
    log_sum = (tl.log2(total) + peak) * LN_2
    # The item's numbers are read again, and a number is added that is always 0, unknown to the
    # compiler. Otherwise the compiler would keep the queries' addresses in dozens of registers
    # through the whole loop, for use here alone.
    pair = tl.arange(0, BLOCK_M) + tl.load(item + 7, volatile=True)
    token = pair // GROUP
    query_head = head * GROUP + pair % GROUP
    exists = token < tl.load(item + 2, volatile=True)
    stored = exists[:, None] & (column < DIM)[None, :]
    part = tl.load(item + 6, volatile=True)
    if part >= 0:
        place = (part + token).to(tl.int64) * (KV_HEADS * GROUP) + query_head
        tl.store(part_out + place[:, None] * DIM + column[None, :], acc, mask=stored)
        tl.store(part_lse + place, log_sum, mask=exists)
    else:
        flat = (tl.load(item + 1, volatile=True) + token).to(tl.int64)
        offset = flat[:, None] * out_token_stride + query_head[:, None] * out_head_stride
        tl.store(out + offset + column[None, :], acc.to(out.dtype.element_ty), mask=stored)
        if LSE:
            tl.store(lse + flat * (KV_HEADS * GROUP) + query_head, log_sum, mask=exists)


@triton.jit(do_not_specialize_on_alignment=["merges"])
def _merge_kernel(
    part_out,  # [P, Nq, D] float32
    part_lse,  # [P, Nq] float32
    merges,  # [M, 4]
    out,  # [T, Nq, D]
    lse,  # [T, Nq] float32, or nothing
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge `BLOCK_H` heads of one token of `merges`, its parts in their order."""
    merge = merges + tl.program_id(0) * MERGE
    token = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1).to(tl.int64)
    parts = tl.load(merge + 2)
    stride = tl.load(merge + 3)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    exists = head < HEADS
    stored = exists[:, None] & (column < DIM)[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], LOWEST, tl.float32)
    for part in range(parts):
        place = (first + part * stride) * HEADS + head
        log_sum = tl.load(part_lse + place, mask=exists, other=0.0)
        value = tl.load(part_out + place[:, None] * DIM + column[None, :], mask=stored, other=0.0)
        new_peak = tl.maximum(peak, log_sum)
        shrink = tl.exp(peak - new_peak)
        weight = tl.exp(log_sum - new_peak)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    offset = token * out_token_stride + head * out_head_stride
    value = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + offset[:, None] + column[None, :], value, mask=stored)
    if LSE:
        tl.store(lse + token * HEADS + head, peak + tl.log(total), mask=exists)


def extend_attention(
    inputs: AttentionInputs,
    block_tables: torch.Tensor,
    plan: ExtendPlan,
    arrays: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend with the planned rows' tokens; write only these tokens' places in `out` and `lse`.

    out [T, Nq, D] of the whole step (last axis contiguous, as that of the queries); block_tables
    int32 [R, W] (rows contiguous); `arrays` are `plan.arrays` on the device (int32, contiguous; any
    shape); lse float32 [T, Nq] contiguous or None. See `interface.PagedAttention`.
    """
    heads, dim = out.shape[1:]
    q = inputs.arrays[0]
    assert q is not None
    parts = max(plan.num_parts, 1)
    part_out = torch.empty(parts, heads, dim, dtype=torch.float32, device=out.device)
    part_lse = torch.empty(parts, heads, dtype=torch.float32, device=out.device)
    for launch, items in zip(plan.launches, arrays[:-1], strict=True):
        if not len(launch.items):
            continue
        _extend_kernel[(len(launch.items) * inputs.constants["KV_HEADS"],)](
            *inputs.arrays,
            block_tables,
            items,
            out,
            lse,
            part_out,
            part_lse,
            *inputs.factors,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            block_tables.stride(0),
            **inputs.constants,
            WINDOW=plan.window or 0,
            LSE=lse is not None,
            BLOCK_M=launch.shape.block_m,
            BLOCK_N=launch.shape.block_n,
            num_warps=launch.shape.num_warps,
            num_stages=launch.shape.num_stages,
        )
    if len(plan.merges):
        _merge_kernel[(len(plan.merges), triton.cdiv(heads, MERGE_HEADS))](
            part_out,
            part_lse,
            arrays[-1],
            out,
            lse,
            out.stride(0),
            out.stride(1),
            HEADS=heads,
            DIM=dim,
            LSE=lse is not None,
            BLOCK_H=MERGE_HEADS,
            BLOCK_D=padded(dim, 16),
        )
