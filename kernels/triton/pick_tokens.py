"""From logits to tokens: `reference/sampling.py`, without a sort, in float64.

A row is cut into tiles of a length that no batch changes. Each program has one tile of one row: so
many programs work on one row, and sums run in an order of the row alone. The launches (a step's
`choice` "greedy" or "random" needs only 1 and 6):

1. `tile_stats`: each tile's best token, its least logit, and its mass relative to its own largest
   logit. Greedy rows and random rows without a cut need no more, in one pass over the logits.
2. `tile_levels`, twice (`row_cuts`): for rows with top-k or top-p, two logits that enclose the cut.
3. `tile_candidates`: the tokens between these two logits, and the mass above them.
4. `row_cut` (`row_cuts`): the rank of the last token kept.
5. `tile_kept`: the kept part of each tile's mass.
6. `row_pick`: the tile in which the cumulative mass exceeds u times the whole, then the token.

Bytes: the logits are read once ("greedy", "random"), or five times, four of them from the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import AutomatonTables, Choice, PickRows
from rootlace.kernels.triton.launching import architecture, padded, settings
from rootlace.kernels.triton.logits import (
    EVERYTHING,
    MAX_VOCAB,
    cut_parameters,
    inverse_of,
    key_value,
    largest_of,
    load_logits,
    rank_id,
    rank_key,
    rank_of,
    row_mass,
    uniform,
)
from rootlace.kernels.triton.row_cuts import (
    LEVELS,
    kept_weights,
    row_cut_kernel,
    tile_candidates_kernel,
    tile_kept_kernel,
    tile_levels_kernel,
)

PART = 2048
"""Number of a tile's tokens processed together if registers are scarce."""
PICK_WARPS = 4
"""Warps of the last launch: with more, Triton 3.6 or 3.9 spills registers on Hopper."""


@triton.jit
def tile_stats_kernel(
    source,
    temperature_ptr,
    best_ptr,
    least_ptr,
    mass_ptr,
    tiles,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_logits(source, row, ids, MASKED)
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
            mass = tl.sum(tl.exp(below * inverse_of(temperature)), 0)
            tl.store(mass_ptr + place, mass)


@triton.jit
def row_pick_kernel(
    source,
    params,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    mass_ptr,
    cut_ptr,
    kept_ptr,
    out_ptr,
    tiles,
    MASKED: tl.constexpr,
    DRAW: tl.constexpr,
    CUT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0)
    rank, largest, finite = largest_of(best_ptr, row, tiles, TILES)
    token = tl.where(finite, rank_id(rank), -1)
    if DRAW:
        temperature_ptr, _top_k_ptr, _top_p_ptr, vocab = params
        temperature = tl.load(temperature_ptr + row)
        if finite & (temperature > 0):
            inverse = inverse_of(temperature)
            tile = tl.arange(0, TILES)
            masses = row_mass(best_ptr, mass_ptr, row, tiles, largest, inverse, TILES)
            cut = tl.full([], EVERYTHING, tl.int64)
            min_p = tl.full([], 0.0, tl.float64)
            if CUT:
                min_p = tl.load(min_p_ptr + row)
                searched, _top_k, _top_p = cut_parameters(row, finite, params)
                if searched | (min_p > 0):
                    cut = tl.load(cut_ptr + row)
                    masses = tl.load(kept_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
            reached = tl.cumsum(masses, 0)
            number = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
            target = number * tl.max(reached, 0)
            # Rounding may put the target at the very end: then the last tile with mass is taken.
            final = tl.max(tl.where(masses > 0, tile, 0), 0)
            chosen = tl.min(tl.where((reached > target) & (masses > 0), tile, final), 0)
            before = tl.max(tl.where(tile < chosen, reached, 0.0), 0)
            # Part by part: the first token beyond the target, or else the last token with mass.
            first, last = vocab, 0
            for start in range(0, TILE, PART):
                ids = chosen * TILE + start + tl.arange(0, PART)
                x = load_logits(source, row, ids, MASKED)
                weights = kept_weights(x, ids, largest, inverse, cut, min_p)
                upto = before + tl.cumsum(weights, 0)
                beyond = (upto > target) & (weights > 0)
                first = tl.minimum(first, tl.min(tl.where(beyond, ids, vocab), 0))
                last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
                before = tl.max(upto, 0)
            token = tl.where(first < vocab, first, last)
    tl.store(out_ptr + row, token)


class Sizes(NamedTuple):
    """Block sizes: tokens of a tile (at most 2^13), candidates held at once, warps."""

    tile: int
    candidates: int
    num_warps: int


def sizes(arch: int) -> Sizes:
    launch = settings("pick_tokens", arch)
    blocks = launch.blocks
    return Sizes(blocks["TILE"], blocks["ROOM"], launch.num_warps)


def pick_tokens(
    logits: torch.Tensor, rows: PickRows, choice: Choice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Pick tokens from logits float32 or bfloat16 [R, V], not changed -> int32 [R]. Raises
    ValueError for vocabularies of 2^24 tokens and more."""
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
    # Any tensor stands in for one that a launch does not read.
    params = rows.params
    table = rows.mask_table if masked else params["top_k"]
    mask_row = rows.mask_row if masked else params["top_k"]
    assert table is not None and mask_row is not None
    words = table.shape[1] if masked else 0
    draw, cut = choice != "greedy", choice == "cut"

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    source = (logits, logits.stride(0), table, mask_row, words, vocab)
    sampling = (params["temperature"], params["top_k"], params["top_p"], vocab)
    every = (tiles, count)
    best = scratch(torch.int64, count, tiles)
    mass = scratch(torch.float64, count, tiles) if draw else best
    least = scratch(torch.float32, count, tiles) if cut else best
    options = {"num_warps": size.num_warps, "enable_fp_fusion": False}
    grid = {"TILE": size.tile, "TILES": padded(tiles)}
    tile_stats_kernel[every](
        source,
        params["temperature"],
        best,
        least,
        mass,
        tiles,
        MASKED=masked,
        MASS=draw,
        LEAST=cut,
        TILE=size.tile,
        **options,
    )
    bounds, kept = best, mass
    if cut:
        reached = scratch(torch.int64, 2, count, tiles, LEVELS.value)
        ladders = (best, least, mass, reached, tiles, count * tiles * LEVELS.value)
        for second in (False, True):
            tile_levels_kernel[every](
                source, sampling, ladders, MASKED=masked, SECOND=second, **grid, **options
            )
        above = scratch(torch.float64, count, tiles)
        values = scratch(torch.float32, count, size.candidates)
        candidates = (above, values, scratch(torch.int32, count, size.candidates))
        tile_candidates_kernel[every](
            source,
            sampling,
            ladders,
            candidates,
            MASKED=masked,
            ROOM=size.candidates,
            PART=min(PART, size.tile),
            **grid,
            **options,
        )
        bounds = scratch(torch.int64, count)
        row_cut_kernel[(count,)](
            source,
            sampling,
            ladders,
            candidates,
            bounds,
            MASKED=masked,
            TILES=padded(tiles),
            ROOM=size.candidates,
            **options,
        )
        kept = scratch(torch.float64, count, tiles)
        tile_kept_kernel[every](
            source,
            sampling,
            params["min_p"],
            best,
            bounds,
            kept,
            tiles,
            MASKED=masked,
            **grid,
            **options,
        )
    row_pick_kernel[(count,)](
        source,
        sampling,
        params["min_p"],
        rows.seed,
        rows.position,
        best,
        mass,
        bounds,
        kept,
        out,
        tiles,
        MASKED=masked,
        DRAW=draw,
        CUT=cut,
        PART=min(PART, size.tile),
        **grid,
        **options | {"num_warps": PICK_WARPS},
    )
    return out


# Steps of automata by tokens on the device: `reference/sampling.py`.
#
# A row is a chain of five dependent loads; one program computes all rows of a small batch. Speed
# comes from a single launch that waits for nothing on the host.

_AUTOMATON_ROWS = 128


@triton.jit
def step_automata_kernel(
    state_ptr,
    source_ptr,
    token_ptr,
    row_ptr,
    mask_of_ptr,
    class_row_ptr,
    next_start_ptr,
    next_state_ptr,
    token_class_ptr,
    after_ptr,
    mask_ptr,
    count,
    vocab,
    _AUTOMATON_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * _AUTOMATON_ROWS + tl.arange(0, _AUTOMATON_ROWS)
    inside = row < count
    state = tl.load(state_ptr + row, mask=inside, other=-1)
    source = tl.load(source_ptr + row, mask=inside, other=-1)
    steps = (state >= 0) & (source >= 0)
    token = tl.load(token_ptr + source, mask=steps, other=-1)
    known = steps & (token >= 0) & (token < vocab)
    classes = tl.load(class_row_ptr + state, mask=known, other=0).to(tl.int64)
    token_class = tl.load(token_class_ptr + classes * vocab + token, mask=known, other=0)
    start = tl.load(next_start_ptr + state, mask=known, other=0)
    after = tl.load(next_state_ptr + start + token_class, mask=known, other=0)  # 0: dead
    state = tl.where(steps, after, state)
    mask = tl.load(mask_of_ptr + state, mask=state >= 0, other=0)
    old = tl.load(row_ptr + row, mask=inside, other=-1)
    tl.store(after_ptr + row, state, mask=inside)
    tl.store(mask_ptr + row, tl.where(state >= 0, mask, old), mask=inside)


def step_automata(
    states: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    tables: AutomatonTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance automata: states, source, rows int32 [R], tokens int32 [P] -> (states, rows), int32
    [R] each. See `interface.StepAutomata`."""
    count = len(states)
    found = torch.empty_like(states)
    masks = torch.empty_like(states)
    if count:
        step_automata_kernel[(triton.cdiv(count, _AUTOMATON_ROWS),)](
            states,
            source,
            tokens,
            rows,
            tables.mask_of,
            tables.class_row,
            tables.next_start,
            tables.next_state,
            tables.token_class,
            found,
            masks,
            count,
            tables.token_class.shape[1],
            _AUTOMATON_ROWS=_AUTOMATON_ROWS,
            num_warps=4,
        )
    return found, masks
