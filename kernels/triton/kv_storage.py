"""A KV cache, whatever it is stored in: how kernels are given it, check it and read it."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import KVCodes, KVScaling
from rootlace.kernels.reference import kv_cache
from rootlace.kernels.reference.kv_cache import slot_bytes
from rootlace.kernels.triton.numerics import from_e4m3, round_to

# Paging -------------------------------------------------------------------------------------------
#
# From positions to slots, in kernels that loop over tiles of a row's positions.
#
# Keys can only be asked for once it is known where they are. A loop that reads the table and then
# the keys of the same tile is pipelined at half the depth, as the compiler has to overlap both. So
# blocks are read one tile ahead:
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
    """Where tiles that cover `first` begin: where they fit into blocks, none lies in two."""
    return first // BLOCK_N * BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else first


@triton.jit
def blocks_of(table, start, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of the positions start : start + BLOCK_N; 0 from `last` on.

    One number for all if tiles fit into blocks. `table`: where that of position 0 would be.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        position = start + tl.arange(0, BLOCK_N)
        index = position.to(tl.uint32) // BLOCK_SIZE  # a shift, where a signed one is four steps
        block = tl.load(table + index.to(tl.int32), mask=position < last, other=0)
    return block


@triton.jit
def slots_of(block, position, BLOCK_SIZE: tl.constexpr):
    """int64: a layer's cache may have more than 2^31 elements."""
    inside = position.to(tl.uint32) % BLOCK_SIZE
    return block.to(tl.int64) * BLOCK_SIZE + inside.to(tl.int32)


# Kv codes -----------------------------------------------------------------------------------------
#
# Keys and values as integers with scales beside them: `reference/kv_cache.py`, to the bit.
#
# Kernels are given a cache of integers twice, as bytes and, for scales and offsets, as words.


_LEAST_SCALE = tl.constexpr(kv_cache.LEAST_SCALE)
_LOWER = tl.constexpr(kv_cache.LOWER)
_UPPER = tl.constexpr(kv_cache.UPPER)
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23, whose last place is 1: a number below 2^22 that is added to it is rounded."""


_GROUP_BYTES = tl.constexpr(kv_cache.GROUP_BYTES)

_num_groups = triton.constexpr_function(kv_cache.num_groups)
_mixing_steps = triton.constexpr_function(kv_cache.mixing_steps)
_slot_bytes = triton.constexpr_function(kv_cache.slot_bytes)
_words_at = triton.constexpr_function(kv_cache.words_at)


@triton.jit
def load_codes(
    cache, words, slot, head, column, seen, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Keys or values [N, columns] of a head at slots int64 [N], in `dtype`; 0 where not `seen`."""
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
        # Each word is loaded once, and stands for both halves of its group.
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
    """Both halves [heads, columns] of queries or keys, `kv_cache.mixed`, in their dtype."""
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
    """Both halves [heads, columns] of a token's keys, or values, to its slot, where `inside`.

    head [heads, 1], column [heads, columns]; what is outside the halves is 0.
    """
    slot_size: tl.constexpr = _slot_bytes(BITS, KV_HEADS, 2 * HALF)
    first_word: tl.constexpr = _words_at(BITS, KV_HEADS, 2 * HALF) // 4
    groups: tl.constexpr = _num_groups(BITS, 2 * HALF)
    most: tl.constexpr = (1 << BITS) - 1
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
    pattern = tl.div_rn(spread, tl.full(spread.shape, most, tl.float32)).to(tl.int32, bitcast=True)
    scale = ((pattern + _LOWER) & _UPPER).to(tl.float32, bitcast=True)
    scale = tl.where(scale < _LEAST_SCALE, 0.0, scale)
    ones = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(scale > 0.0, tl.div_rn(ones, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    code_1 = tl.reshape(_code(wide_1, offset, inverse, most), column.shape)
    code_2 = tl.reshape(_code(wide_2, offset, inverse, most), column.shape)

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
def _code(values, offset, inverse, most: tl.constexpr):
    """int32. The bounds stand between product and sum, which else would be rounded as one."""
    scaled = (values - offset[:, :, None]) * inverse[:, :, None]
    scaled = tl.minimum(tl.maximum(scaled, 0.0), most * 1.0)
    return (scaled + _WHOLE).to(tl.int32, bitcast=True) & most


# Kv storage ---------------------------------------------------------------------------------------


Stored = Literal["plain", "fp8", "int8", "int4"]
"""Kinds of cache storage, which name the variants of kernels."""


def stored_signature(stored: Stored, plain: str) -> tuple[dict[str, str], dict[str, Any]]:
    """(types of a kernel's arguments, what is constant of them): of attention over a cache that is
    stored so, for queries of the type `plain`."""
    cache = f"*{plain}" if stored == "plain" else "*u8"
    scales = {"plain": "constexpr", "fp8": "*fp32"}.get(stored, "*i32")
    types = {"k_cache": cache, "v_cache": cache, "k_scales": scales, "v_scales": scales}
    constants: dict[str, Any] = {
        "FP8": stored == "fp8",
        "BITS": {"int8": 8, "int4": 4}.get(stored, 0),
    }
    if stored == "plain":
        constants |= {"k_scales": None, "v_scales": None}
    return types, constants


def bits_of(scales: KVScaling | None) -> int:
    """Bits of a cache's integers; 0: the cache holds no integers."""
    return scales.bits if isinstance(scales, KVCodes) else 0


def scale_arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScaling | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where kernels find the scales of keys and of values: among integers, in the cache's words."""
    if scales is None:
        return None, None
    if isinstance(scales, KVCodes):
        return k_cache.view(torch.int32), v_cache.view(torch.int32)
    return scales.k, scales.v


@triton.jit
def load_heads(
    cache, scales, slot, head, column, seen, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    FP8: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys or values [N, columns] of a head at slots int64 [N], in `dtype`; 0 where not `seen`:
    slots that nobody has written may hold anything. Those of fp8 are not scaled yet."""
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
    """Raises ValueError for a layer's keys or values that are not stored as `scales` say, for the
    dtype and width of `heads` [T, N, D]."""
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
