"""What kernels over rows of logits share: masked loads, keys that order logits, masses, random
numbers.

Masses are sums of weights w = exp((x - max x) / T), in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_VOCAB = 1 << 24
"""A rank (`rank_of`) has 24 bits for the token."""
EVERYTHING = tl.constexpr(-(1 << 62))
"""A rank below all."""


@triton.jit
def load_logits(
    logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, inside, MASKED: tl.constexpr
):
    """float32 logits of tokens `ids` of a row; -inf outside, and where the row's mask forbids."""
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    if MASKED:
        mask_row = tl.load(mask_row_ptr + row)
        if mask_row >= 0:
            word = ids // 32
            place = mask_ptr + mask_row.to(tl.int64) * words + word
            bits = tl.load(place, mask=inside & (word < words), other=0)
            x = tl.where(((bits >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def order_key(x):
    """int32 keys that order float32 as numbers: -0.0 is 0.0, NaN above everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def key_value(key):
    """The float32 whose `order_key` is `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(x, ids):
    """int64, larger for what ranks before: the larger logit, then the smaller id."""
    return (order_key(x).to(tl.int64) << 24) | (0xFFFFFF - ids)


@triton.jit
def rank_key(rank):
    """The int32 `order_key` in a rank."""
    return (rank >> 24).to(tl.int32)


@triton.jit
def rank_id(rank):
    """The int32 token in a rank."""
    return (0xFFFFFF - (rank & 0xFFFFFF)).to(tl.int32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """float64 in [0, 1) from int64 each: `reference/sampling.py`."""
    stream = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    counter = position.to(tl.uint64, bitcast=True) + 1
    bits = _mix(stream + counter * 0x9E3779B97F4A7C15) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def inverse_of(temperature):
    """1 / T, finite: a product with 0 stays 0."""
    return tl.minimum(1.0 / temperature, 1.0e308)


@triton.jit
def largest_of(best_ptr, row, tiles, TILES: tl.constexpr):
    """(rank of the row's best token, its logit, whether that is a finite number)."""
    tile = tl.arange(0, TILES)
    ranks = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=EVERYTHING)
    rank = tl.max(ranks, 0)
    key = rank_key(rank)
    # The keys of -inf, and of +inf; NaN is above it.
    finite = (key > -2139095041) & (key < 2139095040)
    return rank, key_value(key), finite


@triton.jit
def cut_parameters(row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab):
    """(whether the row has a cut to be searched for, top_k, top_p)."""
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    cut = (top_k < vocab) | (top_p < 1.0)
    return finite & cut & (tl.load(temperature_ptr + row) > 0), top_k, top_p


@triton.jit
def row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES: tl.constexpr):
    """float64 [TILES]: the tiles' masses relative to the row's largest logit."""
    tile = tl.arange(0, TILES)
    there = tile < tiles
    ranks = tl.load(best_ptr + row * tiles + tile, mask=there, other=EVERYTHING)
    tops = tl.where(there, key_value(rank_key(ranks)), float("-inf"))
    mass = tl.load(mass_ptr + row * tiles + tile, mask=there, other=0.0)
    share = tl.exp((tops.to(tl.float64) - largest.to(tl.float64)) * inverse)
    return tl.where(tops > float("-inf"), mass * share, 0.0)
