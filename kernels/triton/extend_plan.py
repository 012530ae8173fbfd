"""Host side of the extend kernel: rows with more than one new token become tiles of queries.

A tile is as many tokens as have `block_m` (token, query head of one KV head's group) pairs; an item
of work is a tile and the range of positions whose keys it attends to, and is done once for every KV
head. Rows with many new tokens have large tiles and read their whole context in one item. Rows with
few of them (text that a constraint forces, the end of a long prompt) would leave most of the device
idle: their tiles are small and their context is cut at multiples of `SPLIT` positions into parts
that are merged by their log-sum-exps. How a row is cut depends on that row alone, so its results do
not depend on which rows are beside it.

Items are in order of falling size: the hardware starts programs in order, so the last ones to start
are the shortest, and no long one is left running alone (longest processing time first; Graham
1969, "Bounds on Multiprocessing Timing Anomalies").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.triton.numerics import TYPE_NAMES
from rootlace.kernels.triton.tuning import Launch, settings

SPLIT = 2048
"""Positions per part of a context that is cut; a multiple of every `block_n`."""
MIN_PROGRAMS = 128
"""A row with fewer programs than this (tiles x KV heads) has its context cut, if it is long."""

FIELDS = 8
"""Numbers of an item: see `ExtendPlan`."""
MERGE_FIELDS = 4


@dataclass(frozen=True)
class TileShape:
    """One specialisation of the kernel.

    `block_m` pairs (query token, query head of the group) by `block_n` keys, and how it is
    compiled. A tile has `block_m // group` tokens: the last pairs may be left over.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Query tokens of a tile, for `group` query heads per KV head."""
        return max(self.block_m // group, 1)


@dataclass(frozen=True)
class ExtendLaunch:
    """The items that one specialisation works on, int32 [I, 8]. An item is:

    row of the block tables, first flat token, number of tokens (at most a tile's), position of the
    first token, first key position (a multiple of `block_n`), end of the key positions (at most the
    last token's, plus one), first row of the partial results or -1 (to write the final ones), 0.
    """

    shape: TileShape
    items: np.ndarray


@dataclass(frozen=True)
class ExtendPlan:
    """What `extend_attention` needs to know on the host.

    `launches` are large tiles and small ones; either may have no items. `merges` int32 [M, 4] says
    for each token whose context is cut: flat token, its row of the first part's partial results,
    number of parts, how many rows of partial results lie between two parts of it. `num_parts` rows
    of partial results are needed in all.
    """

    launches: tuple[ExtendLaunch, ...]
    merges: np.ndarray
    num_parts: int
    window: int | None
    block_size: int

    @property
    def arrays(self) -> list[np.ndarray]:
        """What the kernels read of it: give them to `extend_attention` as device tensors."""
        return [*(launch.items for launch in self.launches), self.merges]


def plan_extend(
    batch: AttentionBatch,
    rows: np.ndarray,
    window: int | None,
    shapes: tuple[TileShape, TileShape],
) -> ExtendPlan:
    """Plan the rows `rows` (int [E], indices into the batch) with the (large, small) tiles.

    Any number of new tokens is allowed, one too.
    """
    rows = np.asarray(rows, dtype=np.int64)
    large, small = shapes
    group = batch.num_heads // batch.num_kv_heads
    starts = batch.row_start.astype(np.int64)
    lengths = starts[rows + 1] - starts[rows]
    few = lengths <= small.tokens(group)

    launches, merges, num_parts = [], [], 0
    for shape, chosen in ((large, rows[~few]), (small, rows[few])):
        items = _tiles(batch, chosen, window, shape)
        items, merged = _cut(items, batch.num_kv_heads, shape, num_parts)
        size = items[:, 5] - items[:, 4]
        launches.append(ExtendLaunch(shape, _int32(items[np.argsort(-size, kind="stable")])))
        merges.append(merged)
        if len(merged):
            num_parts = int((merged[:, 1] + (merged[:, 2] - 1) * merged[:, 3]).max()) + 1
    return ExtendPlan(
        tuple(launches), _int32(np.concatenate(merges)), num_parts, window, batch.block_size
    )


def _tiles(
    batch: AttentionBatch, rows: np.ndarray, window: int | None, shape: TileShape
) -> np.ndarray:
    """One item per tile, with all positions that its tokens see, [I, 8] in order of rows."""
    tokens = shape.tokens(batch.num_heads // batch.num_kv_heads)
    starts = batch.row_start.astype(np.int64)
    lengths = starts[rows + 1] - starts[rows]
    tiles = -(-lengths // tokens)
    which = np.repeat(np.arange(len(rows)), tiles)
    offset = (np.arange(len(which)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    items = np.zeros((len(which), FIELDS), np.int64)
    items[:, 0] = rows[which]
    items[:, 1] = starts[rows][which] + offset
    items[:, 2] = np.minimum(lengths[which] - offset, tokens)
    items[:, 3] = (batch.context_len[rows] - lengths)[which] + offset
    items[:, 5] = items[:, 3] + items[:, 2]
    if window is not None:
        first = np.maximum(items[:, 3] - (window - 1), 0)
        items[:, 4] = first - first % shape.block_n
    items[:, 6] = -1
    return items


def _cut(
    items: np.ndarray, num_kv_heads: int, shape: TileShape, first_part: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the items of rows with few programs -> items, merges [M, 4] (see `ExtendPlan`)."""
    if SPLIT % shape.block_n:
        raise ValueError(f"block_n {shape.block_n} does not divide {SPLIT}")
    _, which, tiles = np.unique(items[:, 0], return_inverse=True, return_counts=True)
    begin = items[:, 4] // SPLIT
    parts = -(-items[:, 5] // SPLIT) - begin
    parts[tiles[which] * num_kv_heads >= MIN_PROGRAMS] = 1

    source = np.repeat(np.arange(len(items)), parts)
    index = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)
    cut = items[source]
    many = parts[source] > 1
    edge = (begin[source] + index) * SPLIT
    cut[:, 4] = np.where(many, np.maximum(cut[:, 4], edge), cut[:, 4])
    cut[:, 5] = np.where(many, np.minimum(cut[:, 5], edge + SPLIT), cut[:, 5])
    rows = np.where(many, cut[:, 2], 0)
    cut[:, 6] = np.where(many, first_part + np.cumsum(rows) - rows, -1)

    # Per token of the tiles that were cut. Parts of a tile lie one behind the other.
    first = cut[index == 0][:, 6]
    tiled = np.flatnonzero(parts > 1)
    counts = items[tiled, 2]
    tile = np.repeat(tiled, counts)
    token = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    merges = np.empty((len(tile), MERGE_FIELDS), np.int64)
    merges[:, 0] = items[tile, 1] + token
    merges[:, 1] = first[tile] + token
    merges[:, 2] = parts[tile]
    merges[:, 3] = items[tile, 2]
    return cut, merges


def _int32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)


def tile_shapes(
    arch: int, head_dim: int, group: int, dtype: torch.dtype
) -> tuple[TileShape, TileShape]:
    """The (large, small) tiles for `plan_extend`; `arch` as in `numerics.architecture`.

    They suit an fp8 cache too. Raises ValueError for a group of more query heads than a tile has
    rows.
    """
    if arch == 0:  # interpreted: every operation costs the same, whatever its size
        large, small = TileShape(64, 64, 4, 1), TileShape(16, 64, 4, 1)
    else:
        kind = TYPE_NAMES[dtype]
        large, small = (
            _shape(settings("extend_attention", arch, head_dim=head_dim, dtype=kind, tile=tile))
            for tile in ("large", "small")
        )
    if group > large.block_m:
        raise ValueError(f"{group} query heads per KV head; at most {large.block_m} are supported")
    return large, small if group <= small.block_m else large


def _shape(launch: Launch) -> TileShape:
    return TileShape(
        launch.blocks["BLOCK_M"], launch.blocks["BLOCK_N"], launch.num_warps, launch.num_stages
    )
