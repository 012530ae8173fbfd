"""Access to a KV cache in any format: kernel arguments, checks and loads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import KVCodes, KVScales, KVScaling, slot_bytes
from rootlace.kernels.reference import kv_cache
from rootlace.kernels.triton.launching import (
    architecture,
    as_bits,
    from_e4m3,
    native_e4m3,
    padded,
    round_to,
    settings,
    to_e4m3,
)

# Paging -------------------------------------------------------------------------------------------
#
# From positions to slots, in kernels that loop over tiles of a row's positions.
#
# The load of keys needs their block numbers. A loop that reads the table and then the keys of the
# same tile is pipelined at half the depth, as the compiler has to overlap both loads. So kernels
# read block numbers one tile ahead:
#
#     begin = first_tile(first, BLOCK_SIZE, BLOCK_N)
#     block = blocks_of(table, begin, last, BLOCK_SIZE, BLOCK_N)
#     for start in range(begin, last, BLOCK_N):
#         position = start + tl.arange(0, BLOCK_N)
#         slot = slots_of(block, position, BLOCK_SIZE)
#         block = blocks_of(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
#         ...


@triton.jit
def first_tile(first, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the start of the tiles that cover `first`. Tiles that fit into blocks lie in one block
    each."""
    return first // BLOCK_N * BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else first


@triton.jit
def blocks_of(table, start, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the blocks of positions start : start + BLOCK_N; 0 from `last` on.

    Tiles that fit into blocks have one number for all positions. `table` points to the entry of
    position 0, even if the row has none there.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        position = start + tl.arange(0, BLOCK_N)
        index = position.to(tl.uint32) // BLOCK_SIZE  # unsigned: one shift; signed: four steps
        block = tl.load(table + index.to(tl.int32), mask=position < last, other=0)
    return block


@triton.jit
def slots_of(block, position, BLOCK_SIZE: tl.constexpr):
    """Return slots as int64: a layer's cache may have more than 2^31 elements."""
    inside = position.to(tl.uint32) % BLOCK_SIZE
    return block.to(tl.int64) * BLOCK_SIZE + inside.to(tl.int32)


# Kv codes -----------------------------------------------------------------------------------------
#
# Keys and values as integers with scales: equal to `reference/kv_cache.py`, to the bit.
#
# Kernels take a cache of integers twice: as bytes, and as words for scales and offsets.


_LEAST_SCALE = tl.constexpr(kv_cache.LEAST_SCALE)
_LOWER = tl.constexpr(kv_cache.LOWER)
_UPPER = tl.constexpr(kv_cache.UPPER)
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23, with a last place of 1: adding it to a number below 2^22 rounds the number."""


_GROUP_BYTES = tl.constexpr(kv_cache.GROUP_BYTES)

_num_groups = triton.constexpr_function(kv_cache.num_groups)
_mixing_steps = triton.constexpr_function(kv_cache.mixing_steps)
_slot_bytes = triton.constexpr_function(slot_bytes)
_words_at = triton.constexpr_function(kv_cache.words_at)


@triton.jit
def load_codes(
    cache, words, slot, head, column, seen, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Load keys or values [N, columns] of a head at slots int64 [N], in `dtype`; 0 where not
    `seen`."""
    slot_size: tl.constexpr = _slot_bytes(BITS, KV_HEADS, DIM)
    first_word: tl.constexpr = _words_at(BITS, KV_HEADS, DIM) // 4
    width: tl.constexpr = DIM * BITS // 8
    inside = seen[:, None] & (column < DIM)[None, :]
    at = cache + slot[:, None] * slot_size + head * width
    code = tl.load(at + (column % width)[None, :], mask=inside, other=0)
    if BITS == 4:
        code = (code >> (column // width * 4).to(tl.uint8)[None, :]) & 15
    groups: tl.constexpr = _num_groups(BITS, DIM)
    words += slot[:, None] * (slot_size // 4) + first_word + head * groups
    if groups == 1:
        word = tl.load(words, mask=seen[:, None], other=0)
    elif column.shape[0] == DIM and groups * 32 == DIM:
        # Each word is loaded once, for both halves of its group.
        word = tl.load(words + tl.arange(0, groups)[None, :], mask=seen[:, None], other=0)
        shape: tl.constexpr = (slot.shape[0], 2, groups, _GROUP_BYTES)
        word = tl.broadcast_to(word[:, None, :, None], shape)
        word = tl.reshape(word, (slot.shape[0], DIM))
    else:
        word = tl.load(words + (column % width // _GROUP_BYTES)[None, :], mask=inside, other=0)
    scale = (word << 16).to(tl.float32, bitcast=True)
    offset = (word & _UPPER).to(tl.float32, bitcast=True)
    return round_to(code.to(tl.float32) * scale + offset, dtype)


@triton.jit
def mixed(first, second, column, HALF: tl.constexpr):
    """Mix both halves [heads, columns] of queries or keys, in their dtype, as `kv_cache.mixed`
    does."""
    kind: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    steps: tl.constexpr = _mixing_steps(HALF)
    for step in tl.static_range(steps):
        other = column ^ (1 << step)
        later = other < column
        beside_1, beside_2 = tl.gather(first, other, 1), tl.gather(second, other, 1)
        first = tl.where(later, beside_1 - first, first + beside_1)
        second = tl.where(later, beside_2 - second, second + beside_2)
    factor: tl.constexpr = (2 << steps) ** -0.5
    return round_to((first + second) * factor, kind), round_to((first - second) * factor, kind)


@triton.jit
def store_codes(
    cache, words, slot, head, column, first, second, inside,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store both halves [heads, columns] of a token's keys, or values, in its slot, where `inside`.
    head [heads, 1], column [heads, columns]; columns outside the halves hold 0."""
    slot_size: tl.constexpr = _slot_bytes(BITS, KV_HEADS, 2 * HALF)
    first_word: tl.constexpr = _words_at(BITS, KV_HEADS, 2 * HALF) // 4
    groups: tl.constexpr = _num_groups(BITS, 2 * HALF)
    top: tl.constexpr = (1 << BITS) - 1
    # [heads, groups, columns of a group], padded to powers of two.
    together: tl.constexpr = column.shape[1] if groups == 1 else _GROUP_BYTES
    shape: tl.constexpr = (column.shape[0], column.shape[1] // together, together)
    across = tl.reshape(column, shape) < HALF
    wide_1, wide_2 = (
        tl.reshape(first.to(tl.float32), shape),
        tl.reshape(second.to(tl.float32), shape),
    )
    low = tl.where(across, tl.minimum(wide_1, wide_2), float("inf"))
    high = tl.where(across, tl.maximum(wide_1, wide_2), float("-inf"))
    pattern = tl.min(low, 2).to(tl.int32, bitcast=True)
    pattern = tl.where(pattern < 0, pattern + _LOWER, pattern) & _UPPER
    offset = pattern.to(tl.float32, bitcast=True)
    spread = tl.max(high, 2) - offset
    pattern = tl.div_rn(spread, tl.full(spread.shape, top, tl.float32)).to(tl.int32, bitcast=True)
    scale = ((pattern + _LOWER) & _UPPER).to(tl.float32, bitcast=True)
    scale = tl.where(scale < _LEAST_SCALE, 0.0, scale)
    ones = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(scale > 0.0, tl.div_rn(ones, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    code_1 = tl.reshape(_code(wide_1, offset, inverse, top), column.shape)
    code_2 = tl.reshape(_code(wide_2, offset, inverse, top), column.shape)

    row = slot * slot_size + head * (2 * HALF * BITS // 8) + column
    if BITS == 4:
        tl.store(cache + row, (code_1 | (code_2 << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(cache + row, code_1.to(tl.uint8), mask=inside)
        tl.store(cache + row + HALF, code_2.to(tl.uint8), mask=inside)
    strange = tl.sum((wide_1 - wide_1) + (wide_2 - wide_2), 2)  # 0, or NaN
    lower = (scale + strange).to(tl.int32, bitcast=True) >> 16
    upper = (offset + strange).to(tl.int32, bitcast=True)
    group = tl.arange(0, shape[1])[None, :]
    place = words + slot * (slot_size // 4) + first_word + head * groups + group
    word = (lower & _LOWER) | (upper & _UPPER)
    tl.store(place, word, mask=(head < KV_HEADS) & (group < groups))


@triton.jit
def _code(values, offset, inverse, top: tl.constexpr):
    """Return codes, int32. The bounds between product and sum keep the compiler from fusing these,
    which would round once instead of twice."""
    scaled = (values - offset[:, :, None]) * inverse[:, :, None]
    scaled = tl.minimum(tl.maximum(scaled, 0.0), top * 1.0)
    return (scaled + _WHOLE).to(tl.int32, bitcast=True) & top


# Kv storage ---------------------------------------------------------------------------------------


LOG2_E = 1.4426950408889634


def bits_of(scales: KVScaling | None) -> int:
    """Return the bits of a cache's integers; 0 if the cache holds no integers."""
    return scales.bits if isinstance(scales, KVCodes) else 0


def scale_arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScaling | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales of keys and of values, or the words of a cache of integers."""
    if scales is None:
        return None, None
    if isinstance(scales, KVCodes):
        return k_cache.view(torch.int32), v_cache.view(torch.int32)
    return scales.k, scales.v


class AttentionInputs(NamedTuple):
    """Inputs of every attention kernel for a layer: queries, cache, scales and constants.
    `score_scale` and `soft_cap` are factors of scores in base 2."""

    arrays: tuple[torch.Tensor | None, ...]
    factors: tuple[float, float]
    constants: dict[str, Any]


def attention_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    scales: KVScaling | None = None,
) -> AttentionInputs:
    """Take the arguments of `interface.PagedAttention`. Raises ValueError for a cache that is not
    contiguous or of another dtype, and for a scale that is not positive."""
    check_cache("keys", k_cache, q, scales)
    check_cache("values", v_cache, q, scales)
    heads, dim = q.shape[1:]
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    scale = dim**-0.5 if scale is None else scale
    if scale <= 0.0:
        raise ValueError(f"scale {scale} is not positive")
    capped = soft_cap > 0.0
    return AttentionInputs(
        (q, as_bits(k_cache), as_bits(v_cache), *scale_arguments(k_cache, v_cache, scales)),
        (scale / soft_cap, soft_cap * LOG2_E) if capped else (scale * LOG2_E, 0.0),
        {
            "KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "DIM": dim,
            "BLOCK_SIZE": k_cache.shape[1],
            "CAPPED": capped,
            "FP8": isinstance(scales, KVScales),
            "BITS": bits_of(scales),
            "NATIVE": native_e4m3(architecture(q.device)),
            "BLOCK_D": padded(dim, 16),
        },
    )


@triton.jit
def load_heads(
    cache, scales, slot, head, column, seen, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    FP8: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Load keys or values [N, columns] of a head at slots int64 [N], in `dtype`; 0 where not
    `seen`, since unwritten slots may hold anything. fp8 values are not scaled yet."""
    if BITS:
        found = load_codes(cache, scales, slot, head, column, seen, dtype, KV_HEADS, DIM, BITS)
    else:
        inside = seen[:, None]
        if column.shape[0] != DIM:
            inside &= (column < DIM)[None, :]
        place = cache + head * DIM + (slot[:, None] * (KV_HEADS * DIM) + column[None, :])
        found = tl.load(place, mask=inside, other=0)
        if FP8:
            found = from_e4m3(found, dtype, NATIVE)
    return found


def check_cache(
    name: str, cache: torch.Tensor, heads: torch.Tensor, scales: KVScaling | None
) -> None:
    """Check that the dtype of stored keys or values fits `scales`, and `heads` [T, N, D]. Raises
    ValueError."""
    dtype, dim = heads.dtype, heads.shape[2]
    shape = tuple(cache.shape[2:])
    if isinstance(scales, KVCodes):
        dtype, wanted = torch.uint8, (1, slot_bytes(scales.bits, scales.heads, dim))
    else:
        dtype, wanted = dtype if scales is None else torch.float8_e4m3fn, (shape[0], dim)
    if cache.dtype != dtype:
        raise ValueError(f"{name} are {cache.dtype}, where {dtype} is wanted")
    if not cache.is_contiguous():
        raise ValueError(f"the {name} of a layer must be contiguous")
    if shape != wanted:
        raise ValueError(f"the slots of {name} are {list(shape)}, where {list(wanted)} is wanted")


# Norm and rotation of queries and keys, and writing of keys and values: `reference/layers.py`.
#
# One pass over qkv reads and writes every element once: 2 * (Nq + 2 Nk) * D elements per token, and
# the keys and values of a duplicate again. A program takes one write and a group of heads, in two
# tiles [heads, D / 2], the halves of the rotation.
#
# Numbers are rounded where the reference rounds: the normed quotient, its product with the weight,
# each product and the sum of the rotation (in float32 the compiler may fuse the last two). fp8
# values are the rounded keys and values, divided by their head's scale in float32. Integers are
# made as in `reference/kv_cache.py`.


@triton.jit
def _product(x, factor, kind: tl.constexpr):
    return round_to(x * factor, kind).to(tl.float32)


@triton.jit
def _norm(first, second, weight_ptr, column, eps, HALF: tl.constexpr):
    """Normalise both halves [HEADS, BLOCK] of heads over 2 * HALF columns, in their dtype."""
    inside = column < HALF
    weight_1 = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_1 * wide_1 + wide_2 * wide_2, 1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    kind: tl.constexpr = first.dtype
    normed_1 = _product(wide_1, scale, kind) * weight_1
    normed_2 = _product(wide_2, scale, kind) * weight_2
    return round_to(normed_1, kind), round_to(normed_2, kind)


@triton.jit
def _rotate(first, second, cos, sin):
    """Return [x1 c - x2 s, x2 c + x1 s], every operation rounded to the dtype."""
    kind: tl.constexpr = first.dtype
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    left = _product(wide_1, cos, kind) - _product(wide_2, sin, kind)
    right = _product(wide_2, cos, kind) + _product(wide_1, sin, kind)
    return round_to(left, kind), round_to(right, kind)


@triton.jit
def _store_scaled(target, values, scale_ptr, head, inside, num_heads):
    """Store values [HEADS, BLOCK] unchanged, or as fp8 after division by their head's scale."""
    if scale_ptr is None:
        tl.store(target, values, mask=inside)
    else:
        scale = tl.load(scale_ptr + head, mask=head < num_heads, other=1.0)
        stored = tl.div_rn(values.to(tl.float32), tl.broadcast_to(scale, values.shape))
        tl.store(target, to_e4m3(stored), mask=inside)


@triton.jit
def _store(
    cache_ptr, scale_ptr, slot, head, column, first, second, inside,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store both halves [HEADS, BLOCK] of a token's keys, or values, in its slot."""
    if BITS:
        store_codes(
            cache_ptr, scale_ptr, slot, head, column, first, second, inside, KV_HEADS, HALF, BITS
        )
    else:
        place = cache_ptr + (slot * KV_HEADS + head) * (2 * HALF) + column
        _store_scaled(place, first, scale_ptr, head, inside, KV_HEADS)
        _store_scaled(place + HALF, second, scale_ptr, head, inside, KV_HEADS)


# Sizes and pointers that vary from step to step must not cause another compilation.
@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr", "tokens_ptr"]
)
def rope_and_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    tokens_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    qkv_token_stride,
    qkv_head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute write i and head group g in program (i, g). Groups below cdiv(Q_HEADS, HEADS) are
    query heads, the others key and value heads. HALF = D / 2 columns are padded to BLOCK."""
    write = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    token = write
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + write).to(tl.int64)

    # Each head loads its own cosines (from the L1 cache): vector loads without an exchange.
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    across = column < HALF
    cos = tl.load(cos_ptr + token * HALF + column, mask=across, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + column, mask=across, other=0.0)
    qkv = qkv_ptr + token * qkv_token_stride

    if group < q_groups:
        if write < num_tokens:
            head = group * HEADS + tl.arange(0, HEADS)[:, None]
            inside = (head < Q_HEADS) & across
            source = qkv + head * qkv_head_stride + column
            first = tl.load(source, mask=inside, other=0.0)
            second = tl.load(source + HALF, mask=inside, other=0.0)
            if q_norm_ptr is not None:
                first, second = _norm(first, second, q_norm_ptr, column, eps, HALF)
            first, second = _rotate(first, second, cos, sin)
            if BITS:
                first, second = mixed(first, second, column, HALF)
            target = q_out_ptr + (token * Q_HEADS + head) * (2 * HALF) + column
            tl.store(target, first, mask=inside)
            tl.store(target + HALF, second, mask=inside)
    else:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        slot = tl.load(slots_ptr + write).to(tl.int64)
        inside = (head < KV_HEADS) & across

        source = qkv + (Q_HEADS + head) * qkv_head_stride + column
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + HALF, mask=inside, other=0.0)
        if k_norm_ptr is not None:
            first, second = _norm(first, second, k_norm_ptr, column, eps, HALF)
        first, second = _rotate(first, second, cos, sin)
        if BITS:
            first, second = mixed(first, second, column, HALF)
        _store(
            k_cache_ptr, k_scale_ptr, slot, head, column, first, second, inside,
            KV_HEADS, HALF, BITS,
        )  # fmt: skip

        source += KV_HEADS * qkv_head_stride
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + HALF, mask=inside, other=0.0)
        _store(
            v_cache_ptr, v_scale_ptr, slot, head, column, first, second, inside,
            KV_HEADS, HALF, BITS,
        )  # fmt: skip


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: KVScaling | None = None,
) -> torch.Tensor:
    """Compute `interface.RopeAndWrite`. A view of qkv with adjacent columns is read without a copy.
    Raises ValueError for caches whose shape or layout is not the interface's."""
    count, _, head_dim = qkv.shape
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    q_heads = qkv.shape[1] - 2 * kv_heads
    check_cache("keys", k_cache, qkv, scales)
    check_cache("values", v_cache, qkv, scales)
    k_scales, v_scales = scale_arguments(k_cache, v_cache, scales)
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    q = torch.empty((count, q_heads, head_dim), device=qkv.device, dtype=qkv.dtype)
    if not count:
        return q
    launch = settings("rope_and_write", architecture(qkv.device), head_dim=padded(head_dim))
    heads = launch.blocks["HEADS"]
    groups = triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads)
    rope_and_write_kernel[(len(slots), groups)](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        q,
        as_bits(k_cache),
        as_bits(v_cache),
        slots,
        tokens,
        q_norm,
        k_norm,
        k_scales,
        v_scales,
        count,
        qkv.stride(0),
        qkv.stride(1),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BITS=bits_of(scales),
        HEADS=heads,
        BLOCK=padded(head_dim // 2),
        num_warps=launch.num_warps,
    )
    return q
