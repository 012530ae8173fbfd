"""Keys and values as integers with scales beside them: `reference/kv_cache.py`, to the bit.

Kernels are given a cache of integers twice, as bytes and, for scales and offsets, as words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootlace.kernels.reference import kv_cache
from rootlace.kernels.triton.numerics import round_to

_LEAST_SCALE = tl.constexpr(kv_cache.LEAST_SCALE)
_LOWER = tl.constexpr(kv_cache.LOWER)
_UPPER = tl.constexpr(kv_cache.UPPER)
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23, whose last place is 1: a number below 2^22 that is added to it is rounded."""


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
    word = words + slot * (slot_size // 4) + first_word + head
    word = tl.load(word, mask=seen, other=0)
    scale = (word << 16).to(tl.float32, bitcast=True)
    offset = (word & _UPPER).to(tl.float32, bitcast=True)
    return round_to(code.to(tl.float32) * scale[:, None] + offset[:, None], dtype)


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
    most: tl.constexpr = (1 << BITS) - 1
    across = column < HALF
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    low = tl.where(across, tl.minimum(wide_1, wide_2), float("inf"))
    high = tl.where(across, tl.maximum(wide_1, wide_2), float("-inf"))
    pattern = tl.min(low, 1).to(tl.int32, bitcast=True)
    pattern = tl.where(pattern < 0, pattern + _LOWER, pattern) & _UPPER
    offset = pattern.to(tl.float32, bitcast=True)
    spread = tl.max(high, 1) - offset
    pattern = tl.div_rn(spread, tl.full(spread.shape, most, tl.float32)).to(tl.int32, bitcast=True)
    scale = ((pattern + _LOWER) & _UPPER).to(tl.float32, bitcast=True)
    scale = tl.where(scale < _LEAST_SCALE, 0.0, scale)
    ones = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(scale > 0.0, tl.div_rn(ones, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    code_1 = _code(wide_1, offset, inverse, most)
    code_2 = _code(wide_2, offset, inverse, most)

    row = slot * slot_size + head * (2 * HALF * BITS // 8) + column
    if BITS == 4:
        tl.store(cache + row, (code_1 | (code_2 << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(cache + row, code_1.to(tl.uint8), mask=inside)
        tl.store(cache + row + HALF, code_2.to(tl.uint8), mask=inside)
    strange = tl.sum((wide_1 - wide_1) + (wide_2 - wide_2), 1)  # 0, or NaN
    lower = (scale + strange).to(tl.int32, bitcast=True) >> 16
    upper = (offset + strange).to(tl.int32, bitcast=True)
    word = ((lower & _LOWER) | (upper & _UPPER))[:, None]
    place = words + slot * (slot_size // 4) + first_word + head
    tl.store(place, word, mask=head < KV_HEADS)


@triton.jit
def _code(values, offset, inverse, most: tl.constexpr):
    """int32. The bounds stand between product and sum, which else would be rounded as one."""
    scaled = (values - offset[:, None]) * inverse[:, None]
    scaled = tl.minimum(tl.maximum(scaled, 0.0), most * 1.0)
    return (scaled + _WHOLE).to(tl.int32, bitcast=True) & most
