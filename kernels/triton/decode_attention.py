"""First stage of decode attention: one new token per row against its own cached positions.

Split over positions (flash decoding; Dao, Haziza, Massa, Sizov 2023), by the fixed parts of
`attention_plan`. The unit of work is an item and a KV head: the query heads of the group are the
rows of a matrix product (padded to 16), so keys and values are read once for all of them. Programs
are as many as the GPU holds at a time and loop over units; the KV heads of an item are neighbours,
as they are in memory.

Bound by memory: 4 D bytes per (position, KV head) in 16 bits, and two partial results of 4 D bytes
per (item, query head). Products of 16 rows need 16 flops per byte, a tenth of what a GPU can do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import KVCodes, KVScales, KVScaling
from rootlace.kernels.triton.attention_plan import FIELDS, HEADER
from rootlace.kernels.triton.kv_storage import (
    Stored,
    bits_of,
    blocks_of,
    first_tile,
    load_heads,
    scale_arguments,
    slots_of,
    stored_signature,
)
from rootlace.kernels.triton.launching import (
    TYPE_NAMES,
    Launch,
    Variant,
    as_bits,
    dot,
    multiprocessors,
    native_e4m3,
    padded,
    settings,
    tanh,
)

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
ITEM = tl.constexpr(FIELDS)


@triton.jit
def to_half(query):
    """A tile of queries in float16, for products with e4m3, and the factor of these products.

    e4m3 is exact in float16, and one instruction converts two of them, where bfloat16 takes five:
    with bfloat16, conversion is more work than all else that is done with a byte of the cache.
    Queries keep all their bits, except those that float16 cannot hold: in a tile with larger ones
    than it can hold all are scaled down, and the smallest are then rounded.
    """
    wide = query.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), 1), 0)
    unit = tl.maximum(largest / 32768.0, 1.0)
    return (wide / unit).to(tl.float16), unit


@triton.jit(
    do_not_specialize=["items_at"],
    do_not_specialize_on_alignment=["numbers"],
)
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
    """Program p: units p, p + programs, ...; unit u: item `u // KV_HEADS`, head `u % KV_HEADS`."""
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
        factor = score_scale
        if FP8:
            factor = score_scale * tl.load(k_scales + head)
            if query.dtype != tl.float32:
                query, divisor = to_half(query)
                factor *= divisor

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        # Every tile has a position that is seen, so that its maximum is a number.
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
            score = dot(query, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            hidden = tl.where(seen, 0.0, float("-inf"))
            if CAPPED:
                score = soft_cap * tanh(score * factor) + hidden[None, :]
            else:
                score = score * factor + hidden[None, :]
            new_peak = tl.maximum(peak, tl.max(score, 1))
            weight = tl.exp2(score - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weight, 1)
            acc = dot(weight.to(query.dtype), v, acc * shrink[:, None])
            peak = new_peak

        norm = 1.0 / total
        if FP8:
            norm *= tl.load(v_scales + head)
        acc *= norm[:, None]
        log_sum = peak + tl.log2(total)
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


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """(`score_scale`, `soft_cap`) as the kernels take them, for scores in base 2."""
    if soft_cap > 0.0:
        return scale / soft_cap, soft_cap * LOG2_E
    return scale * LOG2_E, 0.0


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    numbers: torch.Tensor,
    items_at: int,
    arch: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    scales: KVScaling | None,
) -> None:
    """Work off the own items of `numbers` (see `attention_plan`).

    q, out [T, Nq, D]; k_cache, v_cache [B, S, Nk, D]; lse float32 [T, Nq] or None; part_out
    [P, Nq, D] and part_lse [P, Nq] float32; all contiguous. `arch` as in `launching.architecture`.
    """
    heads, dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    if isinstance(scales, KVCodes):
        kv_heads = scales.heads
    k_scales, v_scales = scale_arguments(k_cache, v_cache, scales)
    launch = settings("decode_attention", arch, **decode_key(dim, q.dtype, scales is not None))
    factor, cap = score_factors(scale, soft_cap)
    rows = padded(heads // kv_heads, 16)
    # No more programs than run at the same time: a further one would start when others have ended.
    # A larger group needs more of a multiprocessor than the table assumes.
    resident = max(launch.blocks["PROGRAMS"] - (rows > 16), 1)
    decode_kernel[(multiprocessors(q.device) * resident,)](
        q,
        as_bits(k_cache),
        as_bits(v_cache),
        k_scales,
        v_scales,
        numbers,
        out,
        lse,
        part_out,
        part_lse,
        factor,
        cap,
        items_at,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        CAPPED=soft_cap > 0.0,
        FP8=isinstance(scales, KVScales),
        BITS=bits_of(scales),
        NATIVE=native_e4m3(arch),
        LSE=lse is not None,
        BLOCK_M=rows,
        BLOCK_N=launch.blocks["BLOCK_N"],
        BLOCK_D=padded(dim, 16),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def decode_key(dim: int, dtype: torch.dtype, fp8: bool) -> dict[str, int | str | bool]:
    """Keys of `decode_attention` in the tuning tables: padded width, types of queries and cache."""
    return {"head_dim": padded(dim, 16), "dtype": TYPE_NAMES[dtype], "fp8": fp8}


def _decode_variants(arch: int) -> list[Variant]:
    """Groups, widths and types in use, with and without fp8, integers, soft cap, log-sum-exp."""
    bf16, fp16 = torch.bfloat16, torch.float16
    cases: list[tuple[int, int, int, torch.dtype, Stored, bool, bool, int]] = [
        # group, KV heads, D, dtype, stored, capped, log-sum-exp, block size
        (4, 8, 64, bf16, "plain", False, False, 16),
        (1, 32, 64, bf16, "plain", False, False, 16),
        (4, 8, 128, bf16, "plain", False, False, 16),
        (4, 8, 128, bf16, "plain", False, False, 64),
        (4, 8, 128, bf16, "plain", False, False, 1),
        (4, 8, 128, bf16, "plain", False, True, 16),
        (8, 8, 128, bf16, "plain", False, False, 16),
        (7, 4, 128, fp16, "plain", False, False, 16),
        (1, 32, 128, bf16, "plain", False, False, 16),
        (32, 1, 128, bf16, "plain", False, False, 16),
        (4, 8, 64, bf16, "fp8", False, False, 16),
        (4, 8, 128, bf16, "fp8", False, False, 16),
        (8, 8, 128, bf16, "fp8", False, False, 16),
        (4, 8, 64, bf16, "int8", False, False, 16),
        (4, 8, 128, bf16, "int8", False, False, 16),
        (4, 8, 64, bf16, "int4", False, False, 16),
        (4, 8, 128, bf16, "int4", False, False, 16),
        (2, 8, 256, bf16, "int4", True, False, 16),
        (2, 8, 256, bf16, "plain", True, False, 16),
        (2, 8, 256, bf16, "fp8", True, False, 16),
        (4, 8, 80, bf16, "plain", False, False, 16),
        (4, 8, 128, torch.float32, "plain", False, False, 16),
    ]
    found = []
    for group, kv_heads, dim, dtype, stored, capped, wants, block_size in cases:
        launch = settings("decode_attention", arch, **decode_key(dim, dtype, stored != "plain"))
        name = TYPE_NAMES[dtype]
        cache_types, kinds = stored_signature(stored, name)
        constants: dict[str, object] = {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "DIM": dim,
            "BLOCK_SIZE": block_size,
            "CAPPED": capped,
            **kinds,
            "NATIVE": native_e4m3(arch),
            "LSE": wants,
            "BLOCK_M": padded(group, 16),
            "BLOCK_N": launch.blocks["BLOCK_N"],
            "BLOCK_D": padded(dim, 16),
        }
        if not wants:
            constants |= {"lse": None}
        types = {
            "q": f"*{name}",
            **cache_types,
            "numbers": "*i32",
            "out": f"*{name}",
            "lse": "*fp32",
            "part_out": "*fp32",
            "part_lse": "*fp32",
            "score_scale": "fp32",
            "soft_cap": "fp32",
        }
        options = [f"blocks of {block_size}"]
        options += [stored] * (stored != "plain") + ["soft cap"] * capped + ["log-sum-exp"] * wants
        found.append(
            Variant(
                f"{name}, group of {group}, heads of {dim}, {', '.join(options)}",
                decode_kernel,
                types,
                constants,
                ("q", "k_cache", "v_cache", "out", "part_out", "part_lse"),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                matrix_units=dtype != torch.float32,
            )
        )
    return found


# Tree attention: the keys of a node of the prefix tree, read once for all rows below it.
#
# The query heads of a KV head's group, of all rows under the node, are the rows of one matrix
# product: `BLOCK_M` (row, query head) pairs per tile, against a segment of the node's positions.
# What it leaves are partial results per row and segment, joined with the row's others by the merge
# (cascade attention; Ye et al. 2024, "Cascade Inference"; Juravsky et al. 2024, arXiv:2402.05099;
# here over every level of the tree at once: one launch whatever the tree). `attention_plan` says
# what is shared and how it is cut.
#
# 64 rows under 8192 positions, 32 query heads over 8 KV heads of 128, 16 bits: 33.5 MB are read
# instead of 2.1 GB, for 8.6 Gflop; 256 flops per byte, where memory and matrix units of an H100
# take about as long. Partial results of 8 segments are 8 MB, in the L2 cache.

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
    """Program p: units p, p + programs, ...; unit u: item `u // KV_HEADS`, head `u % KV_HEADS`.

    The tiles of a segment, which read the same keys, are neighbours and run at the same time.
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
        if WINDOW:
            row_first = tl.load(numbers + STARTS + 2 * rows + 1 + row, mask=exists, other=0)
        factor = score_scale
        if FP8:
            factor = score_scale * tl.load(k_scales + head)
            if query.dtype != tl.float32:
                query, divisor = to_half(query)
                factor *= divisor

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
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
            score = dot(query, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            # Hiding positions by a sum costs nothing: it is fused with the product by the factor.
            hidden = tl.where(seen, 0.0, float("-inf"))
            if CAPPED:
                score = soft_cap * tanh(score * factor) + hidden[None, :]
            else:
                score = score * factor + hidden[None, :]
            if WINDOW:
                score = tl.where(position[None, :] >= row_first[:, None], score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            if WINDOW:  # a row may see nothing of a tile: a finite peak, no weights
                new_peak = tl.maximum(new_peak, -1e30)
            weight = tl.exp2(score - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weight, 1)
            acc = dot(weight.to(query.dtype), v, acc * shrink[:, None])
            peak = new_peak

        if WINDOW:  # a row that saw nothing: zeros, with a log-sum-exp that is as good as -inf
            total = tl.where(total == 0.0, 1.0, total)
        norm = 1.0 / total
        if FP8:
            norm *= tl.load(v_scales + head)
        acc *= norm[:, None]
        log_sum = peak + tl.log2(total)
        part = (tl.load(numbers + STARTS + row, mask=exists, other=0) + ordinal).to(tl.int64)
        place = part * (KV_HEADS * GROUP) + heads
        tl.store(part_out + place[:, None] * DIM + column[None, :], acc, mask=stored)
        tl.store(part_lse + place, log_sum, mask=exists)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    numbers: torch.Tensor,
    rows: int,
    tile: int,
    windowed: bool,
    arch: int,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    scales: KVScaling | None,
) -> None:
    """Work off the shared items of `numbers`, planned for `rows` rows and this `tile`.

    q [T, Nq, D]; k_cache, v_cache [B, S, Nk, D]; part_out [P, Nq, D] and part_lse [P, Nq] float32;
    all contiguous. `arch` as in `launching.architecture`.
    """
    heads, dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    if isinstance(scales, KVCodes):
        kv_heads = scales.heads
    k_scales, v_scales = scale_arguments(k_cache, v_cache, scales)
    launch = _launch(arch, dim, q.dtype, scales is not None, tile)
    factor, cap = score_factors(scale, soft_cap)
    tree_kernel[(tree_programs(q.device, arch, dim, q.dtype, tile),)](
        q,
        as_bits(k_cache),
        as_bits(v_cache),
        k_scales,
        v_scales,
        numbers,
        part_out,
        part_lse,
        factor,
        cap,
        rows,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        WINDOW=windowed,
        CAPPED=soft_cap > 0.0,
        FP8=isinstance(scales, KVScales),
        BITS=bits_of(scales),
        NATIVE=native_e4m3(arch),
        BLOCK_M=tile,
        BLOCK_N=launch.blocks["BLOCK_N"],
        BLOCK_D=padded(dim, 16),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def tree_tile(rows: int, group: int, dim: int, dtype: torch.dtype) -> int:
    """Pairs per tile for a family of `rows` rows: all there are, if their results fit into
    registers. Rows of the matrix units that are left over cost nothing where memory is the bound.
    """
    most = 32 if dtype == torch.float32 else 128 if dim <= 128 else 64
    return min(padded(rows * group, 16), most)


def tree_programs(device: torch.device, arch: int, dim: int, dtype: torch.dtype, tile: int) -> int:
    """How many programs the kernel is launched with: as many as run at a time."""
    return multiprocessors(device) * _launch(arch, dim, dtype, False, tile).blocks["PROGRAMS"]


def _launch(arch: int, dim: int, dtype: torch.dtype, fp8: bool, tile: int) -> Launch:
    return settings("tree_attention", arch, **decode_key(dim, dtype, fp8), tile=tile)


def _tree_variants(arch: int) -> list[Variant]:
    """Small and large tiles, with and without fp8, integers, window and soft cap."""
    bf16, fp16 = torch.bfloat16, torch.float16
    cases: list[tuple[int, int, int, torch.dtype, Stored, bool, bool, int, int]] = [
        # group, KV heads, D, dtype, stored, window, capped, tile, block size
        (4, 8, 64, bf16, "plain", False, False, 128, 16),
        (4, 8, 128, bf16, "plain", False, False, 128, 16),
        (4, 8, 128, bf16, "plain", False, False, 128, 64),
        (4, 8, 128, bf16, "plain", False, False, 64, 16),
        (4, 8, 128, bf16, "plain", False, False, 32, 16),
        (1, 32, 128, bf16, "plain", False, False, 16, 16),
        (8, 8, 128, fp16, "plain", False, False, 128, 16),
        (4, 8, 128, bf16, "fp8", False, False, 128, 16),
        (4, 8, 128, bf16, "fp8", False, False, 32, 16),
        (4, 8, 64, bf16, "fp8", False, False, 128, 16),
        (4, 8, 64, bf16, "int8", False, False, 128, 16),
        (4, 8, 128, bf16, "int8", False, False, 128, 16),
        (4, 8, 128, bf16, "int4", False, False, 128, 16),
        (4, 8, 128, bf16, "int4", False, False, 32, 16),
        (2, 8, 256, bf16, "plain", True, True, 64, 16),
        (2, 8, 256, bf16, "fp8", True, True, 64, 16),
        (2, 8, 256, bf16, "plain", False, True, 32, 16),
        (4, 8, 128, bf16, "plain", True, False, 128, 16),
        (4, 8, 80, bf16, "plain", False, False, 128, 16),
        (4, 8, 128, torch.float32, "plain", False, False, 32, 16),
    ]
    found = []
    for group, kv_heads, dim, dtype, stored, window, capped, tile, block_size in cases:
        launch = _launch(arch, dim, dtype, stored != "plain", tile)
        name = TYPE_NAMES[dtype]
        cache_types, kinds = stored_signature(stored, name)
        constants: dict[str, object] = {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "DIM": dim,
            "BLOCK_SIZE": block_size,
            "WINDOW": window,
            "CAPPED": capped,
            **kinds,
            "NATIVE": native_e4m3(arch),
            "BLOCK_M": tile,
            "BLOCK_N": launch.blocks["BLOCK_N"],
            "BLOCK_D": padded(dim, 16),
        }
        types = {
            "q": f"*{name}",
            **cache_types,
            "numbers": "*i32",
            "part_out": "*fp32",
            "part_lse": "*fp32",
            "score_scale": "fp32",
            "soft_cap": "fp32",
        }
        options = [f"{tile} pairs", f"blocks of {block_size}"]
        options += [stored] * (stored != "plain") + ["window"] * window + ["soft cap"] * capped
        found.append(
            Variant(
                f"{name}, group of {group}, heads of {dim}, {', '.join(options)}",
                tree_kernel,
                types,
                constants,
                ("q", "k_cache", "v_cache", "part_out", "part_lse"),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                matrix_units=dtype != torch.float32,
            )
        )
    return found


def variants(arch: int) -> list[Variant]:
    return [*_decode_variants(arch), *_tree_variants(arch)]
