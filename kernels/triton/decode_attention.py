"""First stage of decode attention: one new token per row against the row's own cached positions.

Contexts are split over positions (flash decoding; Dao, Haziza, Massa, Sizov 2023), by the fixed
parts of `attention_plan`. A unit of work is an item and a KV head. The query heads of the group are
the rows of a matrix product (padded to 16), so keys and values are read once for the whole group.
As many programs as the GPU holds at a time loop over units. The KV heads of an item are neighbours,
as in memory.

The kernel is bound by memory: 4 D bytes per (position, KV head) in 16 bits, and two partial results
of 4 D bytes per (item, query head). Products of 16 rows need 16 flops per byte, a tenth of a GPU's
capability.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.attention_plan import FIELDS, HEADER
from rootlace.kernels.triton.kv_storage import (
    AttentionInputs,
    blocks_of,
    first_tile,
    load_heads,
    slots_of,
)
from rootlace.kernels.triton.launching import (
    TYPE_NAMES,
    architecture,
    dot,
    multiprocessors,
    padded,
    settings,
    tanh,
)

LN_2 = tl.constexpr(0.6931471805599453)
ITEM = tl.constexpr(FIELDS)


@triton.jit
def to_half(query):
    """Convert a tile of queries to float16 for products with e4m3 -> tile, factor of the products.

    e4m3 is exact in float16, and one instruction converts two numbers. The conversion to bfloat16
    takes five, more work than everything else done with a byte of the cache. Queries keep all their
    bits if float16 can hold the tile's largest query. Otherwise the whole tile is scaled down, and
    the smallest queries are rounded.
    """
    wide = query.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), 1), 0)
    unit = tl.maximum(largest / 32768.0, 1.0)
    return (wide / unit).to(tl.float16), unit


@triton.jit
def _attended(
    query, cache, score_scale, soft_cap, table, first, last, row_first, head, column,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, FP8: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend with queries [M, D] to a head's keys at positions first : last -> float32 [M, D], and
    log-sum-exps [M] in base 2.

    With WINDOW, a query sees positions from its `row_first` [M] on. `cache`: keys, values, and the
    scales of both.
    """
    k_cache, v_cache, k_scales, v_scales = cache
    factor = score_scale
    if FP8:
        factor = score_scale * tl.load(k_scales + head)
        if query.dtype != tl.float32:
            query, divisor = to_half(query)
            factor *= divisor

    acc = tl.zeros(query.shape, tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
    # Every tile has a visible position, except with a window: so its maximum is finite.
    begin = first_tile(first, BLOCK_SIZE, BLOCK_N)
    block = blocks_of(table, begin, last, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        seen = (position >= first) & (position < last)
        slot = slots_of(block, position, BLOCK_SIZE)
        block = blocks_of(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
        k = load_heads(
            k_cache, k_scales, slot, head, column, seen, query.dtype,
            KV_HEADS, DIM, FP8, BITS, NATIVE,
        )  # fmt: skip
        v = load_heads(
            v_cache, v_scales, slot, head, column, seen, query.dtype,
            KV_HEADS, DIM, FP8, BITS, NATIVE,
        )  # fmt: skip
        score = dot(query, tl.trans(k), tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        # Hiding positions by a sum costs nothing: the compiler fuses the sum with the product.
        hidden = tl.where(seen, 0.0, float("-inf"))
        if CAPPED:
            score = soft_cap * tanh(score * factor) + hidden[None, :]
        else:
            score = score * factor + hidden[None, :]
        if WINDOW:
            score = tl.where(position[None, :] >= row_first[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        if WINDOW:  # a row may see no position of a tile: finite peak, weights of 0
            new_peak = tl.maximum(new_peak, -1e30)
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        acc = dot(weight.to(query.dtype), v, acc * shrink[:, None])
        peak = new_peak

    if WINDOW:  # a row without visible positions: zeros, log-sum-exp of about -1e30
        total = tl.where(total == 0.0, 1.0, total)
    norm = 1.0 / total
    if FP8:
        norm *= tl.load(v_scales + head)
    acc *= norm[:, None]
    log_sum = peak + tl.log2(total)
    return acc, log_sum


@triton.jit(do_not_specialize=["items_at"], do_not_specialize_on_alignment=["numbers"])
def decode_kernel(
    q,  # [T, Nq, D]
    k_cache,  # [B * S, Nk, D], or of integers [B * S, W]
    v_cache,
    k_scales,  # [Nk] float32, or the words of a cache of integers, or nothing
    v_scales,
    numbers,  # see `attention_plan`
    out,  # [T, Nq, D]
    lse,  # [T, Nq] float32, natural, or nothing
    part_out,  # [P, Nq, D] float32
    part_lse,  # [P, Nq] float32, base 2
    score_scale,  # base 2; with a soft cap, natural and divided by the cap
    soft_cap,  # base 2
    items_at,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Run units p, p + programs, ... as program p. Unit u: item `u // KV_HEADS`, head `u %
    KV_HEADS`."""
    units = tl.load(numbers) * KV_HEADS
    column = tl.arange(0, BLOCK_D)
    member = tl.arange(0, BLOCK_M)
    exists = (member < GROUP)[:, None] & (column < DIM)[None, :]
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = numbers + items_at + (unit // KV_HEADS) * ITEM
        head = unit % KV_HEADS
        token = tl.load(item).to(tl.int64)
        table = numbers + tl.load(item + 1)
        first = tl.load(item + 2)
        last = tl.load(item + 3)
        part = tl.load(item + 4).to(tl.int64)

        heads = head * GROUP + member
        query = tl.load(
            q + (token * (KV_HEADS * GROUP) + heads[:, None]) * DIM + column[None, :],
            mask=exists,
            other=0,
        )
        acc, log_sum = _attended(
            query, (k_cache, v_cache, k_scales, v_scales), score_scale, soft_cap,
            table, first, last, first, head, column,
            KV_HEADS, DIM, BLOCK_SIZE, False, CAPPED, FP8, BITS, NATIVE, BLOCK_N,
        )  # fmt: skip
        if part >= 0:
            place = part * (KV_HEADS * GROUP) + heads
            tl.store(part_out + place[:, None] * DIM + column[None, :], acc, mask=exists)
            tl.store(part_lse + place, log_sum, mask=member < GROUP)
        else:
            place = token * (KV_HEADS * GROUP) + heads
            result = acc.to(out.dtype.element_ty)
            tl.store(out + place[:, None] * DIM + column[None, :], result, mask=exists)
            if LSE:
                tl.store(lse + place, log_sum * LN_2, mask=member < GROUP)


def decode_attention(
    inputs: AttentionInputs,
    numbers: torch.Tensor,
    items_at: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Compute the own items of `numbers` (see `attention_plan`).

    out [T, Nq, D]; lse float32 [T, Nq] or None; part_out [P, Nq, D] and part_lse [P, Nq] float32;
    all contiguous, as the queries are.
    """
    launch = settings("decode_attention", architecture(out.device), **_key(inputs, out.dtype))
    rows = padded(inputs.constants["GROUP"], 16)
    # No more programs than run at the same time: a further one would start after others have ended.
    # A larger group needs more of a multiprocessor than the table assumes.
    resident = max(launch.blocks["PROGRAMS"] - (rows > 16), 1)
    decode_kernel[(multiprocessors(out.device) * resident,)](
        *inputs.arrays,
        numbers,
        out,
        lse,
        part_out,
        part_lse,
        *inputs.factors,
        items_at,
        **inputs.constants,
        LSE=lse is not None,
        BLOCK_M=rows,
        BLOCK_N=launch.blocks["BLOCK_N"],
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _key(inputs: AttentionInputs, dtype: torch.dtype) -> dict[str, int | str | bool]:
    """Return the keys of both kernels in the tuning tables. `fp8`: the cache has another dtype than
    the queries."""
    other = inputs.constants["FP8"] or inputs.constants["BITS"] > 0
    return decode_key(inputs.constants["DIM"], dtype, other)


def decode_key(dim: int, dtype: torch.dtype, fp8: bool) -> dict[str, int | str | bool]:
    """Return the keys of `decode_attention` in the tuning tables: padded width, dtypes of queries
    and cache."""
    return {"head_dim": padded(dim, 16), "dtype": TYPE_NAMES[dtype], "fp8": fp8}


# Tree attention: the keys of a node of the prefix tree, read once for all rows below it.
#
# The query heads of a KV head's group, of all rows under the node, are the rows of one matrix
# product: `BLOCK_M` (row, query head) pairs per tile, against a segment of the node's positions.
# The kernel writes partial results per row and segment; the merge joins them with the row's other
# partial results (cascade attention; Ye et al. 2024, "Cascade Inference"; Juravsky et al. 2024,
# arXiv:2402.05099). One launch computes every level of any tree. `attention_plan` chooses the
# shared positions and cuts them.
#
# Example: 64 rows under 8192 positions, 32 query heads over 8 KV heads of 128, 16 bits. The kernel
# reads 33.5 MB instead of 2.1 GB, for 8.6 Gflop. At 256 flops per byte, memory and matrix units of
# an H100 take about as long. Partial results of 8 segments are 8 MB, in the L2 cache.

STARTS = tl.constexpr(HEADER)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["numbers"])
def tree_kernel(
    q,  # [T, Nq, D]
    k_cache,  # [B * S, Nk, D], or of integers [B * S, W]
    v_cache,
    k_scales,  # [Nk] float32, or the words of a cache of integers, or nothing
    v_scales,
    numbers,  # see `attention_plan`
    part_out,  # [P, Nq, D] float32
    part_lse,  # [P, Nq] float32, base 2
    score_scale,  # base 2; with a soft cap, natural and divided by the cap
    soft_cap,  # base 2
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Run units p, p + programs, ... as program p. Unit u: item `u // KV_HEADS`, head `u %
    KV_HEADS`. The tiles of a segment read the same keys; as neighbours they run at the same time.
    """
    units = tl.load(numbers + 1) * KV_HEADS
    items_at = tl.load(numbers + 2)
    column = tl.arange(0, BLOCK_D)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = numbers + items_at + (unit // KV_HEADS) * ITEM
        head = unit % KV_HEADS
        first_row = tl.load(item)
        pair = tl.load(item + 1) + tl.arange(0, BLOCK_M)
        exists = pair < tl.load(item + 2)
        table = numbers + tl.load(item + 3)
        first = tl.load(item + 4)
        last = tl.load(item + 5)
        ordinal = tl.load(item + 6)

        row = first_row + pair // GROUP
        heads = head * GROUP + pair % GROUP
        token = tl.load(numbers + STARTS + rows + 1 + row, mask=exists, other=0).to(tl.int64)
        stored = exists[:, None] & (column < DIM)[None, :]
        query = tl.load(
            q + (token * (KV_HEADS * GROUP) + heads)[:, None] * DIM + column[None, :],
            mask=stored,
            other=0,
        )
        row_first = first
        if WINDOW:
            row_first = tl.load(numbers + STARTS + 2 * rows + 1 + row, mask=exists, other=0)
        acc, log_sum = _attended(
            query, (k_cache, v_cache, k_scales, v_scales), score_scale, soft_cap,
            table, first, last, row_first, head, column,
            KV_HEADS, DIM, BLOCK_SIZE, WINDOW, CAPPED, FP8, BITS, NATIVE, BLOCK_N,
        )  # fmt: skip
        part = (tl.load(numbers + STARTS + row, mask=exists, other=0) + ordinal).to(tl.int64)
        place = part * (KV_HEADS * GROUP) + heads
        tl.store(part_out + place[:, None] * DIM + column[None, :], acc, mask=stored)
        tl.store(part_lse + place, log_sum, mask=exists)


def tree_attention(
    inputs: AttentionInputs,
    numbers: torch.Tensor,
    rows: int,
    tile: int,
    windowed: bool,
    dtype: torch.dtype,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Compute the shared items of `numbers`, planned for `rows` rows and this `tile`. `dtype` is
    that of the queries; part_out [P, Nq, D] and part_lse [P, Nq] float32; all contiguous."""
    device, arch = part_out.device, architecture(part_out.device)
    launch = settings("tree_attention", arch, **_key(inputs, dtype), tile=tile)
    programs = tree_programs(device, arch, inputs.constants["DIM"], dtype, tile)
    tree_kernel[(programs,)](
        *inputs.arrays,
        numbers,
        part_out,
        part_lse,
        *inputs.factors,
        rows,
        **inputs.constants,
        WINDOW=windowed,
        BLOCK_M=tile,
        BLOCK_N=launch.blocks["BLOCK_N"],
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def tree_tile(rows: int, group: int, dim: int, dtype: torch.dtype) -> int:
    """Return the pairs per tile for a family of `rows` rows: all pairs, if their results fit into
    registers. Unused rows of the matrix units cost nothing in a kernel bound by memory."""
    limit = 32 if dtype == torch.float32 else 128 if dim <= 128 else 64
    return min(padded(rows * group, 16), limit)


def tree_programs(device: torch.device, arch: int, dim: int, dtype: torch.dtype, tile: int) -> int:
    """Return the number of the kernel's programs: as many as run at a time."""
    launch = settings("tree_attention", arch, **decode_key(dim, dtype, False), tile=tile)
    return multiprocessors(device) * launch.blocks["PROGRAMS"]
