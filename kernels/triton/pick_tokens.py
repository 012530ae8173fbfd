"""From logits to tokens: `reference/pick_tokens.py`, without a sort, in float64.

A row is cut into tiles of the same length whatever the batch is; each program has one tile of one
row, so that one row is spread over many programs, and sums run in an order of their own row. The
launches, of which a step's `choice` takes the first two and the last ("greedy", "random") or all:

1. `tile_stats`: each tile's best token, its least logit, and its mass relative to its own largest
   logit: all that greedy and plainly random rows need, in one pass over the logits.
2. `tile_levels`, twice: of the rows with top-k or top-p, how many tokens of the tile, and what
   mass, reach each of a ladder of levels between the row's largest and least logit, then of a
   ladder between the two levels of the first that enclose the cut.
3. `tile_candidates`: the tokens between the two levels, gathered, and the mass above them.
4. `row_cut`: the rank of the last token kept, by bisection over the candidates' ranks (logit, then
   id), which one program holds in registers. Ladders sum in float32; whether they led to the cut
   is seen here, exactly. If not, or if more tokens tie than there is room for, the row is bisected
   as a whole.
5. `tile_kept`: what is kept of each tile's mass.
6. `row_pick`: the tile in which the cumulative mass exceeds u times the whole, then the token.

Bytes: the logits are read once ("greedy", "random"), or five times, four of them from the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import Choice, PickRows
from rootlace.kernels.triton.logit_rows import (
    MAX_VOCAB,
    key_value,
    load_logits,
    rank_id,
    rank_key,
    rank_of,
    uniform,
)
from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture, padded
from rootlace.kernels.triton.tuning import settings
from rootlace.kernels.triton.variants import Variant

LEVELS = tl.constexpr(16)
PART = 2048
"""Tokens of a tile that are looked at together where registers are short."""
EVERYTHING = tl.constexpr(-(1 << 62))
"""A rank below all."""


@triton.jit
def _inverse(temperature):
    """1 / T, finite: a product with 0 stays 0."""
    return tl.minimum(1.0 / temperature, 1.0e308)


@triton.jit
def _largest(best_ptr, row, tiles, TILES: tl.constexpr):
    """(rank of the row's best token, its logit, whether that is a finite number)."""
    tile = tl.arange(0, TILES)
    ranks = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=EVERYTHING)
    rank = tl.max(ranks, 0)
    key = rank_key(rank)
    # The keys of -inf, and of +inf; NaN is above it.
    finite = (key > -2139095041) & (key < 2139095040)
    return rank, key_value(key), finite


@triton.jit
def _searched(row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab):
    """(whether the row has a cut to be searched for, top_k, top_p)."""
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    cut = (top_k < vocab) | (top_p < 1.0)
    return finite & cut & (tl.load(temperature_ptr + row) > 0), top_k, top_p


@triton.jit
def tile_stats_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    temperature_ptr,
    best_ptr,
    least_ptr,
    mass_ptr,
    vocab,
    stride,
    words,
    tiles,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_logits(
        logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, ids < vocab, MASKED
    )
    place = row * tiles + tile
    rank = tl.max(rank_of(x, ids), 0)
    tl.store(best_ptr + place, rank)
    if MASS:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            if LEAST:
                least = tl.min(tl.where(x > float("-inf"), x, float("inf")), 0)
                tl.store(least_ptr + place, least)
            top = key_value(rank_key(rank))
            top = tl.where(top > float("-inf"), top, 0.0)
            below = x.to(tl.float64) - top.to(tl.float64)
            mass = tl.sum(tl.exp(below * _inverse(temperature)), 0)
            tl.store(mass_ptr + place, mass)


@triton.jit
def _row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES: tl.constexpr):
    """float64 [TILES]: the tiles' masses relative to the row's largest logit."""
    tile = tl.arange(0, TILES)
    there = tile < tiles
    ranks = tl.load(best_ptr + row * tiles + tile, mask=there, other=EVERYTHING)
    tops = tl.where(there, key_value(rank_key(ranks)), float("-inf"))
    mass = tl.load(mass_ptr + row * tiles + tile, mask=there, other=0.0)
    share = tl.exp((tops.to(tl.float64) - largest.to(tl.float64)) * inverse)
    return tl.where(tops > float("-inf"), mass * share, 0.0)


@triton.jit
def _least(least_ptr, row, tiles, TILES: tl.constexpr):
    """The row's least logit above -inf."""
    tile = tl.arange(0, TILES)
    least = tl.load(least_ptr + row * tiles + tile, mask=tile < tiles, other=float("inf"))
    return tl.min(least, 0)


@triton.jit
def _level(upper, lower, largest, step):
    """float32: `upper` (inf at first) at step 0, then in equal steps down to `lower`."""
    top = tl.minimum(upper, largest)
    level = top - (top - lower) * (step.to(tl.float32) * (1.0 / (LEVELS - 1)))
    level = tl.where(step == LEVELS - 1, lower, level)
    return tl.where(step == 0, upper, level)


@triton.jit
def _enclosing(
    reached_ptr,
    upper,
    lower,
    largest,
    row,
    tiles,
    top_k,
    vocab,
    wanted,
    TILES: tl.constexpr,
):
    """The cut lies between two neighbours of a ladder: (upper, lower, step of the lower one)."""
    tile = tl.arange(0, TILES)[:, None]
    step = tl.arange(0, LEVELS)
    place = reached_ptr + (row * tiles + tile) * LEVELS + step[None, :]
    reached = tl.load(place, mask=tile < tiles, other=0)
    counts = tl.sum(_count(reached), 0)
    masses = tl.sum(_mass(reached), 0)
    enough = ((top_k < vocab) & (counts >= top_k)) | ((top_k >= vocab) & (masses >= wanted))
    found = tl.min(tl.where(enough & (step > 0), step, LEVELS - 1), 0)
    return (
        _level(upper, lower, largest, found - 1),
        _level(upper, lower, largest, found),
        found,
    )


@triton.jit
def _pair(weight):
    """One token and its weight (at most 1) as an int64: sums of 2^13 of them hold both."""
    return (weight * 17179869184.0).to(tl.int64) + 0x1000000000000  # 2^34, 2^48


@triton.jit
def _count(pairs):
    return (pairs >> 48).to(tl.int32)


@triton.jit
def _mass(pairs):
    return (pairs & 0xFFFFFFFFFFFF).to(tl.float64) * 5.820766091346741e-11  # 2^-34


@triton.jit
def tile_levels_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    least_ptr,
    mass_ptr,
    reached_ptr,
    vocab,
    stride,
    words,
    tiles,
    total,
    MASKED: tl.constexpr,
    SECOND: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """reached int64 [2, R, tiles, LEVELS]: of each ladder; `total` = R * tiles * LEVELS."""
    tile, row = tl.program_id(0), tl.program_id(1)
    _rank, largest, finite = _largest(best_ptr, row, tiles, TILES)
    searched, top_k, top_p = _searched(row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab)
    if searched:
        inverse = _inverse(tl.load(temperature_ptr + row))
        upper = largest + float("inf")
        lower = _least(least_ptr, row, tiles, TILES)
        if SECOND:
            mass = tl.sum(_row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES), 0)
            upper, lower, _step = _enclosing(
                reached_ptr,
                upper,
                lower,
                largest,
                row,
                tiles,
                top_k,
                vocab,
                top_p * mass,
                TILES,
            )
            reached_ptr += total
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(
            logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, ids < vocab, MASKED
        )
        scale = tl.minimum(inverse * 1.4426950408889634, 1.0e30).to(tl.float32)  # log2(e) / T
        pairs = _pair(tl.exp2((x - largest) * scale))
        for index in range(LEVELS):
            step = tl.zeros([], tl.int32) + index
            reaches = (x >= _level(upper, lower, largest, step)) & (ids < vocab)
            place = (row * tiles + tile) * LEVELS + step
            tl.store(reached_ptr + place, tl.sum(tl.where(reaches, pairs, 0), 0))


@triton.jit
def _last_levels(
    best_ptr,
    least_ptr,
    mass_ptr,
    reached_ptr,
    row,
    tiles,
    total,
    largest,
    inverse,
    top_k,
    top_p,
    vocab,
    TILES: tl.constexpr,
):
    """What both ladders led to: (upper, lower, step of the lower one on the second)."""
    mass = tl.sum(_row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES), 0)
    wanted = top_p * mass
    upper = largest + float("inf")
    lower = _least(least_ptr, row, tiles, TILES)
    upper, lower, _step = _enclosing(
        reached_ptr, upper, lower, largest, row, tiles, top_k, vocab, wanted, TILES
    )
    return _enclosing(
        reached_ptr + total,
        upper,
        lower,
        largest,
        row,
        tiles,
        top_k,
        vocab,
        wanted,
        TILES,
    )


@triton.jit
def _gathered(reached_ptr, row, tiles, total, step, split, TILES: tl.constexpr):
    """int32 [TILES]: how many tokens of each tile are above the two levels, and between them."""
    tile = tl.arange(0, TILES)
    place = reached_ptr + total + (row * tiles + tile) * LEVELS + step
    above = _count(tl.load(place - 1, mask=tile < tl.where(split, tiles, 0), other=0))
    return above, _count(tl.load(place, mask=tile < tiles, other=0)) - above


@triton.jit
def tile_candidates_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    least_ptr,
    mass_ptr,
    reached_ptr,
    above_ptr,
    value_ptr,
    id_ptr,
    vocab,
    stride,
    words,
    tiles,
    total,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROOM: tl.constexpr,
    PART: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    _rank, largest, finite = _largest(best_ptr, row, tiles, TILES)
    searched, top_k, top_p = _searched(row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab)
    if searched:
        inverse = _inverse(tl.load(temperature_ptr + row))
        upper, lower, step = _last_levels(
            best_ptr,
            least_ptr,
            mass_ptr,
            reached_ptr,
            row,
            tiles,
            total,
            largest,
            inverse,
            top_k,
            top_p,
            vocab,
            TILES,
        )
        # The mass of the top k, of which top-p takes a share, is known once all are gathered.
        split = (top_k >= vocab) | (top_p >= 1.0)
        _above, between = _gathered(reached_ptr, row, tiles, total, step, split, TILES)
        if tl.sum(between, 0) <= ROOM:
            start = tl.sum(tl.where(tl.arange(0, TILES) < tile, between, 0), 0)
            mass = tl.zeros([], tl.float64)
            for part in range(0, TILE, PART):
                ids = tile * TILE + part + tl.arange(0, PART)
                x = load_logits(
                    logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, ids < vocab, MASKED
                )
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
    """The largest rank that, with `count` tokens above all of `ranks`, at least `wanted` reach.
    `low` is reached by so many, `high` is not."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = count + tl.sum((ranks >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _last_by_mass(ranks, weights, mass, wanted, low, high):
    """As `_last_by_count`, for what has a mass."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = mass + tl.sum(tl.where(ranks >= middle, weights, 0.0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _reached(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    vocab,
    stride,
    words,
    row,
    rank,
    largest,
    inverse,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens of the whole row rank `rank` or before, or with `MASS` their mass; float64,
    which counts exactly."""
    found = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = load_logits(logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, inside, MASKED)
        counts = inside & (rank_of(x, ids) >= rank)
        if MASS:
            below = x.to(tl.float64) - largest.to(tl.float64)
            found += tl.where(counts, tl.exp(below * inverse), 0.0)
        else:
            found += counts.to(tl.float64)
    return tl.sum(found, 0)


@triton.jit
def _last_of_row(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    vocab,
    stride,
    words,
    row,
    wanted,
    best,
    largest,
    inverse,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest rank that `wanted` tokens, or such a mass, reach: by bisection of all ranks."""
    low = rank_of(tl.full([], float("-inf"), tl.float32), (1 << 24) - 1)
    high = best + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        found = _reached(
            logits_ptr,
            mask_ptr,
            mask_row_ptr,
            vocab,
            stride,
            words,
            row,
            middle,
            largest,
            inverse,
            MASKED,
            MASS,
            BLOCK,
        )
        low = tl.where(found >= wanted, middle, low)
        high = tl.where(found >= wanted, high, middle)
    return low


@triton.jit
def row_cut_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    least_ptr,
    mass_ptr,
    reached_ptr,
    above_ptr,
    value_ptr,
    id_ptr,
    cut_ptr,
    vocab,
    stride,
    words,
    tiles,
    total,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0)
    best, largest, finite = _largest(best_ptr, row, tiles, TILES)
    searched, top_k, top_p = _searched(row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab)
    cut = tl.full([], EVERYTHING, tl.int64)
    if searched:
        inverse = _inverse(tl.load(temperature_ptr + row))
        _upper, lower, step = _last_levels(
            best_ptr,
            least_ptr,
            mass_ptr,
            reached_ptr,
            row,
            tiles,
            total,
            largest,
            inverse,
            top_k,
            top_p,
            vocab,
            TILES,
        )
        by_count = top_k < vocab
        by_mass = top_p < 1.0
        split = (top_k >= vocab) | (top_p >= 1.0)
        all_there = lower == _least(least_ptr, row, tiles, TILES)
        above, between = _gathered(reached_ptr, row, tiles, total, step, split, TILES)
        count_above, size = tl.sum(above, 0), tl.sum(between, 0)
        everything = tl.sum(_row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES), 0)
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
                    logits_ptr,
                    mask_ptr,
                    mask_row_ptr,
                    vocab,
                    stride,
                    words,
                    row,
                    top_k.to(tl.float64),
                    best,
                    largest,
                    inverse,
                    MASKED,
                    False,
                    ROOM,
                )
                mass = _reached(
                    logits_ptr,
                    mask_ptr,
                    mask_row_ptr,
                    vocab,
                    stride,
                    words,
                    row,
                    cut,
                    largest,
                    inverse,
                    MASKED,
                    True,
                    ROOM,
                )
            if by_mass:
                cut = _last_of_row(
                    logits_ptr,
                    mask_ptr,
                    mask_row_ptr,
                    vocab,
                    stride,
                    words,
                    row,
                    top_p * mass,
                    best,
                    largest,
                    inverse,
                    MASKED,
                    True,
                    ROOM,
                )
    tl.store(cut_ptr + row, cut)


@triton.jit
def _kept_weights(x, ids, largest, inverse, cut, min_p):
    """float64: the weights of those tokens that are kept, 0 for the others."""
    weights = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) * inverse)
    return tl.where((rank_of(x, ids) >= cut) & (weights >= min_p), weights, 0.0)


@triton.jit
def tile_kept_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    cut_ptr,
    kept_ptr,
    vocab,
    stride,
    words,
    tiles,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    _rank, largest, finite = _largest(best_ptr, row, tiles, TILES)
    searched, _top_k, _top_p = _searched(row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    if searched | (finite & (temperature > 0) & (min_p > 0)):
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(
            logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, ids < vocab, MASKED
        )
        cut = tl.load(cut_ptr + row)
        weights = _kept_weights(x, ids, largest, _inverse(temperature), cut, min_p)
        tl.store(kept_ptr + row * tiles + tile, tl.sum(weights, 0))


@triton.jit
def row_pick_kernel(
    logits_ptr,
    mask_ptr,
    mask_row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    mass_ptr,
    cut_ptr,
    kept_ptr,
    out_ptr,
    vocab,
    stride,
    words,
    tiles,
    MASKED: tl.constexpr,
    DRAW: tl.constexpr,
    CUT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0)
    rank, largest, finite = _largest(best_ptr, row, tiles, TILES)
    token = tl.where(finite, rank_id(rank), -1)
    if DRAW:
        temperature = tl.load(temperature_ptr + row)
        if finite & (temperature > 0):
            inverse = _inverse(temperature)
            tile = tl.arange(0, TILES)
            masses = _row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES)
            cut = tl.full([], EVERYTHING, tl.int64)
            min_p = tl.full([], 0.0, tl.float64)
            if CUT:
                min_p = tl.load(min_p_ptr + row)
                searched, _top_k, _top_p = _searched(
                    row, finite, temperature_ptr, top_k_ptr, top_p_ptr, vocab
                )
                if searched | (min_p > 0):
                    cut = tl.load(cut_ptr + row)
                    masses = tl.load(kept_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
            reached = tl.cumsum(masses, 0)
            number = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
            target = number * tl.max(reached, 0)
            # Rounding may leave the target at the end of all: then it is the last that has mass.
            final = tl.max(tl.where(masses > 0, tile, 0), 0)
            chosen = tl.min(tl.where((reached > target) & (masses > 0), tile, final), 0)
            before = tl.max(tl.where(tile < chosen, reached, 0.0), 0)
            # Part by part: the first token beyond the target, or else the last with mass.
            first, last = vocab, 0
            for start in range(0, TILE, PART):
                ids = chosen * TILE + start + tl.arange(0, PART)
                x = load_logits(
                    logits_ptr, stride, mask_ptr, mask_row_ptr, words, row, ids, ids < vocab, MASKED
                )
                weights = _kept_weights(x, ids, largest, inverse, cut, min_p)
                upto = before + tl.cumsum(weights, 0)
                beyond = (upto > target) & (weights > 0)
                first = tl.minimum(first, tl.min(tl.where(beyond, ids, vocab), 0))
                last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
                before = tl.max(upto, 0)
            token = tl.where(first < vocab, first, last)
    tl.store(out_ptr + row, token)


class Sizes(NamedTuple):
    """Tokens of a tile (at most 2^13), candidates held at once, warps."""

    tile: int
    room: int
    num_warps: int


def sizes(arch: int) -> Sizes:
    launch = settings("pick_tokens", arch)
    blocks = launch.blocks
    return Sizes(blocks["TILE"], blocks["ROOM"], launch.num_warps)


def pick_tokens(
    logits: torch.Tensor, rows: PickRows, choice: Choice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], not changed -> int32 [R]. Raises ValueError for
    vocabularies of 2^24 tokens and more."""
    count, vocab = logits.shape
    if vocab >= MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens; the kernel ranks fewer than {MAX_VOCAB}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    if out is None:
        out = torch.empty(count, dtype=torch.int32, device=device)
    if not count:
        return out
    size = sizes(architecture(device))
    tiles = triton.cdiv(vocab, size.tile)
    masked = rows.mask_row is not None
    # What a launch does not read is any tensor.
    table = rows.mask_table if masked else rows.top_k
    mask_row = rows.mask_row if masked else rows.top_k
    assert table is not None and mask_row is not None
    words = table.shape[1] if masked else 0
    draw, cut = choice != "greedy", choice == "cut"

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    source = (logits, table, mask_row)
    lengths = (vocab, logits.stride(0), words, tiles)
    every = (tiles, count)
    best = scratch(torch.int64, count, tiles)
    mass = scratch(torch.float64, count, tiles) if draw else best
    least = scratch(torch.float32, count, tiles) if cut else best
    options = {"num_warps": size.num_warps, "enable_fp_fusion": False}
    grid = {"TILE": size.tile, "TILES": padded(tiles)}
    tile_stats_kernel[every](
        *source,
        rows.temperature,
        best,
        least,
        mass,
        *lengths,
        MASKED=masked,
        MASS=draw,
        LEAST=cut,
        TILE=size.tile,
        **options,
    )
    bounds, kept = best, mass
    if cut:
        asked = (rows.temperature, rows.top_k, rows.top_p)
        reached = scratch(torch.int64, 2, count, tiles, LEVELS.value)
        total = count * tiles * LEVELS.value
        found = (best, least, mass, reached)
        for second in (False, True):
            tile_levels_kernel[every](
                *source,
                *asked,
                *found,
                *lengths,
                total,
                MASKED=masked,
                SECOND=second,
                **grid,
                **options,
            )
        above = scratch(torch.float64, count, tiles)
        values = scratch(torch.float32, count, size.room)
        ids = scratch(torch.int32, count, size.room)
        gathered = (*found, above, values, ids)
        tile_candidates_kernel[every](
            *source,
            *asked,
            *gathered,
            *lengths,
            total,
            MASKED=masked,
            ROOM=size.room,
            PART=min(PART, size.tile),
            **grid,
            **options,
        )
        bounds = scratch(torch.int64, count)
        row_cut_kernel[(count,)](
            *source,
            *asked,
            *gathered,
            bounds,
            *lengths,
            total,
            MASKED=masked,
            TILES=padded(tiles),
            ROOM=size.room,
            **options,
        )
        kept = scratch(torch.float64, count, tiles)
        tile_kept_kernel[every](
            *source,
            *asked,
            rows.min_p,
            best,
            bounds,
            kept,
            *lengths,
            MASKED=masked,
            **grid,
            **options,
        )
    row_pick_kernel[(count,)](
        *source,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        best,
        mass,
        bounds,
        kept,
        out,
        *lengths,
        MASKED=masked,
        DRAW=draw,
        CUT=cut,
        PART=min(PART, size.tile),
        **grid,
        **options,
    )
    return out


def variants(arch: int) -> list[Variant]:
    """Every launch of a vocabulary of up to 64 tiles, as all models' are, masked and not."""
    size = sizes(arch)
    types = {
        **dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp64"),
        **dict.fromkeys(("mass_ptr", "above_ptr", "kept_ptr"), "*fp64"),
        **dict.fromkeys(("seed_ptr", "position_ptr", "best_ptr", "cut_ptr", "reached_ptr"), "*i64"),
        **dict.fromkeys(("least_ptr", "value_ptr"), "*fp32"),
        **dict.fromkeys(("vocab", "stride", "words", "tiles", "total"), "i32"),
    }
    sized = {"TILE": size.tile, "TILES": 64, "ROOM": size.room}
    sized["PART"] = min(PART, size.tile)
    launches: list[tuple[Any, str, dict[str, bool]]] = [
        (tile_stats_kernel, "greedy", {"MASS": False, "LEAST": False}),
        (tile_stats_kernel, "random", {"MASS": True, "LEAST": False}),
        (tile_stats_kernel, "cut", {"MASS": True, "LEAST": True}),
        (tile_levels_kernel, "first", {"SECOND": False}),
        (tile_levels_kernel, "second", {"SECOND": True}),
        (tile_candidates_kernel, "", {}),
        (row_cut_kernel, "", {}),
        (tile_kept_kernel, "", {}),
        (row_pick_kernel, "greedy", {"DRAW": False, "CUT": False}),
        (row_pick_kernel, "random", {"DRAW": True, "CUT": False}),
        (row_pick_kernel, "cut", {"DRAW": True, "CUT": True}),
    ]
    found = []
    for kernel, what, flags in launches:
        for dtype, masked in (
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float32, False),
        ):
            names = kernel.arg_names
            constants = {**sized, **flags, "MASKED": masked}
            signature = {name: types.get(name, "*i32") for name in names}
            signature |= {name: "constexpr" for name in constants if name in names}
            signature["logits_ptr"] = f"*{TYPE_NAMES[dtype]}"
            parts = [what, TYPE_NAMES[dtype], "masked" if masked else ""]
            found.append(
                Variant(
                    ", ".join(part for part in parts if part),
                    kernel,
                    signature,
                    {name: value for name, value in constants.items() if name in names},
                    (*(name for name in names if name.endswith("_ptr")), "vocab", "stride"),
                    num_warps=size.num_warps,
                )
            )
    return found
