"""Exact cut of a row's top-k and top-p: the rank of the last token kept, and the mass kept.

Ladders gather candidates, which one program holds in registers. A bisection over the candidates'
ranks (logit, then id) finds the cut. Ladders sum rounded weights, so this program checks that the
cut is among the candidates. If not, or if too many candidates were found (many ties, for example),
the program bisects the whole row. That takes some fifty passes of one program, which real logits do
not need.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootlace.kernels.triton.logits import (
    EVERYTHING,
    cut_parameters,
    inverse_of,
    largest_of,
    load_logits,
    rank_of,
    row_mass,
)

# Ladders narrow down a row's top-k or top-p cut, and gather the tokens around the cut.
#
# A *ladder* is a series of equally spaced logits, from the row's largest to its least. Each tile
# sums the count and the mass of its tokens that reach each level. Two neighbouring levels enclose
# the cut; a second ladder divides the range between them. The tokens between the second ladder's
# enclosing levels are gathered, in order of ids.
#
# `ladders` is (best_ptr, least_ptr, mass_ptr, reached_ptr, tiles, total): reached int64
# [2, R, tiles, LEVELS], by ladder; `total` = R * tiles * LEVELS. `candidates` is (above_ptr,
# value_ptr, id_ptr): float64 [R, tiles], the mass above; float32 and int32 [R, ROOM], the tokens.

LEVELS = tl.constexpr(16)
WIDEST = tl.constexpr(3.0e38)
"""Largest difference between two levels or logits. An overflow would make levels of -inf, which
masked tokens reach; and 0 times infinity is NaN."""


@triton.jit
def least_of(least_ptr, row, tiles, TILES: tl.constexpr):
    """Return the row's least logit above -inf."""
    tile = tl.arange(0, TILES)
    least = tl.load(least_ptr + row * tiles + tile, mask=tile < tiles, other=float("inf"))
    return tl.min(least, 0)


@triton.jit
def _level(upper, lower, largest, step):
    """Return a ladder's level, float32: `upper` (inf at first) at step 0, equal steps down to
    `lower`."""
    top = tl.minimum(upper, largest)
    level = top - tl.minimum(top - lower, WIDEST) * (step.to(tl.float32) * (1.0 / (LEVELS - 1)))
    level = tl.where(step == LEVELS - 1, lower, level)
    return tl.where(step == 0, upper, level)


@triton.jit
def _enclosing(reached_ptr, upper, lower, largest, row, tiles, wanted, TILES: tl.constexpr):
    """Return the neighbouring levels that enclose the cut: (upper, lower, step of the lower one).
    `wanted`: (top_k, vocab, the mass to reach without top-k)."""
    top_k, vocab, wanted_mass = wanted
    tile = tl.arange(0, TILES)[:, None]
    step = tl.arange(0, LEVELS)
    place = reached_ptr + (row * tiles + tile) * LEVELS + step[None, :]
    reached = tl.load(place, mask=tile < tiles, other=0)
    counts = tl.sum(_count(reached), 0)
    masses = tl.sum(_mass(reached), 0)
    enough = ((top_k < vocab) & (counts >= top_k)) | ((top_k >= vocab) & (masses >= wanted_mass))
    found = tl.min(tl.where(enough & (step > 0), step, LEVELS - 1), 0)
    return (_level(upper, lower, largest, found - 1), _level(upper, lower, largest, found), found)


@triton.jit
def _pair(weight):
    """Pack one token and its weight (at most 1) into an int64 that can sum 2^13 such pairs."""
    return (weight * 17179869184.0).to(tl.int64) + 0x1000000000000  # 2^34, 2^48


@triton.jit
def _count(pairs):
    return (pairs >> 48).to(tl.int32)


@triton.jit
def _mass(pairs):
    return (pairs & 0xFFFFFFFFFFFF).to(tl.float64) * 5.820766091346741e-11  # 2^-34


@triton.jit
def tile_levels_kernel(
    source,
    params,
    ladders,
    MASKED: tl.constexpr,
    SECOND: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    best_ptr, least_ptr, mass_ptr, reached_ptr, tiles, total = ladders
    temperature_ptr, _top_k_ptr, _top_p_ptr, vocab = params
    tile, row = tl.program_id(0), tl.program_id(1)
    _rank, largest, finite = largest_of(best_ptr, row, tiles, TILES)
    searched, top_k, top_p = cut_parameters(row, finite, params)
    if searched:
        inverse = inverse_of(tl.load(temperature_ptr + row))
        upper = largest + float("inf")
        lower = least_of(least_ptr, row, tiles, TILES)
        if SECOND:
            mass = tl.sum(row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES), 0)
            wanted = (top_k, vocab, top_p * mass)
            upper, lower, _step = _enclosing(
                reached_ptr, upper, lower, largest, row, tiles, wanted, TILES
            )
            reached_ptr += total
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(source, row, ids, MASKED)
        scale = tl.minimum(inverse * 1.4426950408889634, 1.0e30).to(tl.float32)  # log2(e) / T
        pairs = _pair(tl.exp2(tl.maximum(x - largest, -WIDEST) * scale))
        for index in range(LEVELS):
            step = tl.zeros([], tl.int32) + index
            reaches = (x >= _level(upper, lower, largest, step)) & (ids < vocab)
            place = (row * tiles + tile) * LEVELS + step
            tl.store(reached_ptr + place, tl.sum(tl.where(reaches, pairs, 0), 0))


@triton.jit
def last_levels(ladders, cut, row, largest, inverse, TILES: tl.constexpr):
    """Return the levels that enclose the cut on the second ladder: (upper, lower, step of the lower
    one). `cut`: (top_k, top_p, vocab)."""
    best_ptr, least_ptr, mass_ptr, reached_ptr, tiles, total = ladders
    top_k, top_p, vocab = cut
    mass = tl.sum(row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES), 0)
    wanted = (top_k, vocab, top_p * mass)
    upper = largest + float("inf")
    lower = least_of(least_ptr, row, tiles, TILES)
    upper, lower, _step = _enclosing(reached_ptr, upper, lower, largest, row, tiles, wanted, TILES)
    return _enclosing(reached_ptr + total, upper, lower, largest, row, tiles, wanted, TILES)


@triton.jit
def gathered(reached_ptr, row, tiles, total, step, split, TILES: tl.constexpr):
    """Return int32 [TILES] each: the tokens of each tile above the two levels (0 unless `split`),
    and the tokens of the tile between the levels."""
    tile = tl.arange(0, TILES)
    place = reached_ptr + total + (row * tiles + tile) * LEVELS + step
    above = _count(tl.load(place - 1, mask=tile < tl.where(split, tiles, 0), other=0))
    return above, _count(tl.load(place, mask=tile < tiles, other=0)) - above


@triton.jit
def tile_candidates_kernel(
    source,
    params,
    ladders,
    candidates,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROOM: tl.constexpr,
    PART: tl.constexpr,
):
    best_ptr, _least_ptr, _mass_ptr, reached_ptr, tiles, total = ladders
    above_ptr, value_ptr, id_ptr = candidates
    temperature_ptr, _top_k_ptr, _top_p_ptr, vocab = params
    tile, row = tl.program_id(0), tl.program_id(1)
    _rank, largest, finite = largest_of(best_ptr, row, tiles, TILES)
    searched, top_k, top_p = cut_parameters(row, finite, params)
    if searched:
        inverse = inverse_of(tl.load(temperature_ptr + row))
        upper, lower, step = last_levels(
            ladders, (top_k, top_p, vocab), row, largest, inverse, TILES
        )
        # top-p takes a share of the top k's mass, known once all of the top k are gathered.
        split = (top_k >= vocab) | (top_p >= 1.0)
        _above, between = gathered(reached_ptr, row, tiles, total, step, split, TILES)
        if tl.sum(between, 0) <= ROOM:
            start = tl.sum(tl.where(tl.arange(0, TILES) < tile, between, 0), 0)
            mass = tl.zeros([], tl.float64)
            for part in range(0, TILE, PART):
                ids = tile * TILE + part + tl.arange(0, PART)
                x = load_logits(source, row, ids, MASKED)
                above = x >= tl.where(split, upper, float("inf"))
                chosen = (x >= lower) & (above == 0) & (ids < vocab)
                upto = start + tl.cumsum(chosen.to(tl.int32), 0)
                place = row * ROOM + upto - 1
                tl.store(value_ptr + place, x, mask=chosen)
                tl.store(id_ptr + place, ids, mask=chosen)
                start = tl.max(upto, 0)
                below = x.to(tl.float64) - largest.to(tl.float64)
                mass += tl.sum(tl.where(above, tl.exp(below * inverse), 0.0), 0)
            tl.store(above_ptr + row * tiles + tile, mass)


@triton.jit
def _last_by_count(ranks, count, wanted, low, high):
    """Return the largest rank that at least `wanted` tokens reach. `count` tokens rank above all of
    `ranks`. At least `wanted` tokens reach `low`, fewer reach `high`."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = count + tl.sum((ranks >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _last_by_mass(ranks, weights, mass, wanted, low, high):
    """Return the rank as `_last_by_count` does, with tokens weighted, and `mass` above all of
    `ranks`."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = mass + tl.sum(tl.where(ranks >= middle, weights, 0.0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _reached(
    source,
    row,
    rank,
    largest,
    inverse,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the row's tokens of at least `rank`, or sum their masses (`MASS`); float64, exact for
    counts."""
    _logits_ptr, _stride, _mask_ptr, _mask_row_ptr, _words, vocab = source
    found = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(source, row, ids, MASKED)
        counts = (ids < vocab) & (rank_of(x, ids) >= rank)
        if MASS:
            below = x.to(tl.float64) - largest.to(tl.float64)
            found += tl.where(counts, tl.exp(below * inverse), 0.0)
        else:
            found += counts.to(tl.float64)
    return tl.sum(found, 0)


@triton.jit
def _last_of_row(
    source,
    row,
    wanted,
    best,
    largest,
    inverse,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest rank that `wanted` tokens, or a mass of `wanted`, reach: by bisection of
    all ranks."""
    low = rank_of(tl.full([], float("-inf"), tl.float32), (1 << 24) - 1)
    high = best + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        found = _reached(source, row, middle, largest, inverse, MASKED, MASS, BLOCK)
        low = tl.where(found >= wanted, middle, low)
        high = tl.where(found >= wanted, high, middle)
    return low


@triton.jit
def row_cut_kernel(
    source,
    params,
    ladders,
    candidates,
    cut_ptr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    ROOM: tl.constexpr,
):
    best_ptr, least_ptr, mass_ptr, reached_ptr, tiles, total = ladders
    above_ptr, value_ptr, id_ptr = candidates
    temperature_ptr, _top_k_ptr, _top_p_ptr, vocab = params
    row = tl.program_id(0)
    best, largest, finite = largest_of(best_ptr, row, tiles, TILES)
    searched, top_k, top_p = cut_parameters(row, finite, params)
    cut = tl.full([], EVERYTHING, tl.int64)
    if searched:
        inverse = inverse_of(tl.load(temperature_ptr + row))
        _upper, lower, step = last_levels(
            ladders, (top_k, top_p, vocab), row, largest, inverse, TILES
        )
        by_count = top_k < vocab
        by_mass = top_p < 1.0
        split = (top_k >= vocab) | (top_p >= 1.0)
        all_there = lower == least_of(least_ptr, row, tiles, TILES)
        above, between = gathered(reached_ptr, row, tiles, total, step, split, TILES)
        count_above, size = tl.sum(above, 0), tl.sum(between, 0)
        everything = tl.sum(row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES), 0)
        found = size < 0
        if size <= ROOM:
            index = tl.arange(0, ROOM)
            there = index < size
            x = tl.load(value_ptr + row * ROOM + index, mask=there, other=float("-inf"))
            ids = tl.load(id_ptr + row * ROOM + index, mask=there, other=0)
            ranks = tl.where(there, rank_of(x, ids), EVERYTHING)
            weights = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) * inverse)
            weights = tl.where(there, weights, 0.0)
            low = tl.min(tl.where(there, ranks, best), 0)
            high = tl.max(ranks, 0) + 1
            if by_count:
                enough = count_above + size >= top_k
                found = (count_above < top_k) & (enough | all_there)
                if enough:
                    cut = _last_by_count(ranks, count_above, top_k, low, high)
                if by_mass:
                    mass = tl.sum(tl.where(ranks >= cut, weights, 0.0), 0)
                    cut = _last_by_mass(ranks, weights, 0.0, top_p * mass, low, high)
            else:
                tile = tl.arange(0, TILES)
                masses = tl.load(above_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
                mass_above, wanted = tl.sum(masses, 0), top_p * everything
                enough = mass_above + tl.sum(weights, 0) >= wanted
                found = (mass_above < wanted) & (enough | all_there)
                if enough:
                    cut = _last_by_mass(ranks, weights, mass_above, wanted, low, high)
        if not found:
            mass = everything
            if by_count:
                cut = _last_of_row(
                    source, row, top_k.to(tl.float64), best, largest, inverse, MASKED, False, ROOM
                )
                mass = _reached(source, row, cut, largest, inverse, MASKED, True, ROOM)
            if by_mass:
                cut = _last_of_row(
                    source, row, top_p * mass, best, largest, inverse, MASKED, True, ROOM
                )
    tl.store(cut_ptr + row, cut)


@triton.jit
def kept_weights(x, ids, largest, inverse, cut, min_p):
    """Return the weights of kept tokens as float64, 0 for other tokens."""
    weights = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) * inverse)
    return tl.where((rank_of(x, ids) >= cut) & (weights >= min_p), weights, 0.0)


@triton.jit
def tile_kept_kernel(
    source,
    params,
    min_p_ptr,
    best_ptr,
    cut_ptr,
    kept_ptr,
    tiles,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    _rank, largest, finite = largest_of(best_ptr, row, tiles, TILES)
    searched, _top_k, _top_p = cut_parameters(row, finite, params)
    temperature_ptr, _top_k_ptr, _top_p_ptr, _vocab = params
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    if searched | (finite & (temperature > 0) & (min_p > 0)):
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(source, row, ids, MASKED)
        cut = tl.load(cut_ptr + row)
        weights = kept_weights(x, ids, largest, inverse_of(temperature), cut, min_p)
        tl.store(kept_ptr + row * tiles + tile, tl.sum(weights, 0))
