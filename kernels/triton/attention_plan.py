"""Host side of decode attention: one array of numbers that assigns positions to programs.

The plan cuts each row's own positions into items of work, at multiples of a power of two. The row's
context alone decides the power (`split_lengths`). Positions that rows share are cut into segments
(`shared_ranges`). An item writes a partial result and its log-sum-exp; the merge joins the partial
results of a row in order of position. A row without shared positions is therefore computed by the
same operations in the same order in every batch. The only item of a row writes the row's output
directly.

The launches are the same for every step of a family (`rows`): a fixed number of programs loop over
the items, whose count is in this array. A partial result is Nq (D + 1) float32. There is memory for
`slots_per_row` (10 to 130) partial results per row: 256 rows of 32 heads of 128 over 8 KV heads
take 76 MB, which all layers reuse.

Layout, int32, in one array that may grow at its end only:

    header [8]: own items, shared items, start of the shared items, zeros
    starts [rows + 1]: a row's partial results are starts[r] : starts[r + 1]
    tokens [rows]: the row's flat token; -1: the row is empty
    firsts [rows]: the first position that the row sees
    zeros, to a multiple of 8
    own items [I, 8]: flat token; place of position 0's block (see blocks); first position, end of
        the positions; partial result, or -1 to write the output; zeros
    shared items [J, 8]: first row; first (row, query head of the group) pair of the tile; number of
        pairs of the node; place of position 0's block; first position, end of the positions; index
        among the partial results of its rows; 0
    blocks: blocks of every item's positions; position p is in `numbers[item's place + p // S]`
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.shared_runs import SharedRun, chosen_runs, whole_blocks
from rootlace.kernels.triton.launching import TYPE_NAMES, Launch, settings

# Shared nodes -------------------------------------------------------------------------------------
#
# Cost rule of tree attention: selects the nodes that are read once for all rows below them.
#
# Sharing saves bytes of keys and values. Sharing costs a partial result per row and segment
# (written, and read again by the merge) and a launch before that of the rows' own items. The
# constants come from counting bytes; no GPU has measured them yet.


class SharingRule(msgspec.Struct, frozen=True):
    """Rule for sharing a node: least bytes saved, net of partial results, by a node (`node_bytes`)
    and by all nodes (`step_bytes`).

    `step_bytes` is the memory traffic during a launch's start and drain (about 2 us at 4 TB/s),
    `node_bytes` a part of that. Nodes are cut into segments of at least `least_segment` positions,
    one for each of `programs` programs. Lengths of segments are multiples of `unit`, which tiles of
    keys divide.
    """

    node_bytes: int = 1 << 20
    step_bytes: int = 8 << 20
    least_segment: int = 256
    programs: int = 132
    unit: int = 128


class SharedRange(msgspec.Struct, frozen=True):
    """Range of rows with shared keys. Rows `begin : end` share the positions `low : high`; sharing
    saves `saved` reads of a position. `outer`: no other range holds these rows and more."""

    begin: int
    end: int
    low: int
    high: int
    saved: int
    outer: bool

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def length(self) -> int:
        return self.high - self.low


def shared_ranges(
    batch: AttentionBatch, decoding: np.ndarray, first: np.ndarray, rule: SharingRule
) -> list[SharedRange]:
    """Return the ranges worth sharing among the `decoding` rows (bool [R]), outer before inner.

    first [R]: the first position that a row sees, above 0 if a window hides some. A row's ranges
    are contiguous and begin at its first position or before. No range holds the row's last
    position.
    """
    size, group = batch.block_size, batch.num_heads // batch.num_kv_heads
    # A row's partial result is 4 Nq D bytes, written and read; a position 2 Nk D elements.
    partial = max(4 * group // batch.dtype.itemsize, 1)
    position_bytes = 2 * batch.num_kv_heads * batch.head_dim * batch.dtype.itemsize
    windowed = bool(first.any())
    ranges: list[SharedRange] = []
    reach = 0  # end of the rows of all ranges so far

    def worth(run: SharedRun) -> bool:
        nonlocal reach
        rows, low, high = run.end - run.begin, run.low * size, run.high * size
        read = rows * (high - low)
        if windowed:
            starts = np.maximum(first[run.begin : run.end], low)
            read = int(np.maximum(high - starts, 0).sum())
            low = int(starts.min())
        saved = read - (high - low) - rows * partial
        if low >= high or saved <= 0 or saved * position_bytes < rule.node_bytes:
            return False
        ranges.append(SharedRange(run.begin, run.end, low, high, saved, run.begin >= reach))
        reach = max(reach, run.end)
        return True

    context = batch.context_len.astype(np.int64)
    chosen_runs(batch.block_tables, whole_blocks(context, decoding, size), worth)
    if sum(found.saved for found in ranges) * position_bytes < rule.step_bytes:
        return []
    return ranges


def segment_counts(
    ranges: list[SharedRange],
    group: int,
    num_kv_heads: int,
    tile: int,
    rule: SharingRule,
    slots: int,
) -> list[int] | None:
    """Return the number of segments of each range, with a tile of `tile` (row, query head) pairs.

    Every row of every segment takes one of `slots` partial results. Returns None if `slots` is too
    small.
    """
    if sum(found.rows for found in ranges) > slots:
        return None
    work = sum(-(-found.rows * group // tile) * found.length for found in ranges)
    segment = max(rule.least_segment, -(-work * num_kv_heads // rule.programs))
    while True:
        segment = -(-segment // rule.unit) * rule.unit
        counts = [-(-found.length // segment) for found in ranges]
        needed = sum(found.rows * n for found, n in zip(ranges, counts, strict=True))
        if needed <= slots:
            return counts
        segment += segment // 4


# Extend plan --------------------------------------------------------------------------------------
#
# Host side of the extend kernel: rows with more than one new token become tiles of queries.
#
# A tile has as many tokens as give `block_m` (token, query head of one KV head's group) pairs. An
# item of work is a tile and a range of key positions; every KV head computes each item once. Rows
# with many new tokens have large tiles and read their whole context in one item. Rows with few new
# tokens (text that a constraint forces, the end of a long prompt) would leave most of the device
# idle. So these rows have small tiles, and their context is cut at multiples of `SPLIT` positions.
# The parts are merged by their log-sum-exps. The cuts of a row depend on the row alone, so its
# results do not depend on the other rows of the batch.
#
# Items are in order of falling size. The hardware starts programs in order, so the shortest items
# start last and no long item runs alone at the end (longest processing time first; Graham 1969,
# "Bounds on Multiprocessing Timing Anomalies").


SPLIT = 2048
"""Positions per part of a context that is cut; a multiple of every `block_n`."""
MIN_PROGRAMS = 128
"""Minimum number of a row's programs (tiles x KV heads); a long context with fewer is cut."""

FIELDS = 8
"""Number of fields of an item: see `ExtendPlan`."""
MERGE_FIELDS = 4


class TileShape(msgspec.Struct, frozen=True):
    """Specialisation of the extend kernel.

    A tile has `block_m` (query token, query head of the group) pairs by `block_n` keys; the rest
    are compile options. A tile has `block_m // group` tokens; leftover pairs stay idle.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Return the query tokens of a tile, for `group` query heads per KV head."""
        return max(self.block_m // group, 1)


class ExtendLaunch(msgspec.Struct, frozen=True):
    """Items of one specialisation, int32 [I, 8]. The fields of an item:

    row of the block tables, first flat token, number of tokens (at most a tile's), position of the
    first token, first key position (a multiple of `block_n`), end of the key positions (at most the
    last token's, plus one), first row of the partial results or -1 (to write the output), 0.
    """

    shape: TileShape
    items: np.ndarray


class ExtendPlan(msgspec.Struct, frozen=True):
    """Plan of `extend_attention` on the host.

    `launches`: large tiles, then small ones; either may have no items. `merges` int32 [M, 4] has a
    row for each token with a cut context. Its fields: flat token, its row in the first part's
    partial results, number of parts, rows of partial results between two parts. `num_parts`: total
    number of rows of partial results.
    """

    launches: tuple[ExtendLaunch, ...]
    merges: np.ndarray
    num_parts: int
    window: int | None
    block_size: int

    @property
    def arrays(self) -> list[np.ndarray]:
        """Return the arrays that `extend_attention` takes as device tensors."""
        return [*(launch.items for launch in self.launches), self.merges]


def plan_extend(
    batch: AttentionBatch, rows: np.ndarray, window: int | None, shapes: tuple[TileShape, TileShape]
) -> ExtendPlan:
    """Plan the rows `rows` (int [E], indices into the batch) with the (large, small) tiles. A row
    may have any number of new tokens, including one."""
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
    """Return one item per tile, with all positions that the tile's tokens see: [I, 8], in order of
    rows."""
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

    # Per token of the cut tiles. Partial results of a tile's parts follow one another.
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
    """Return the (large, small) tiles for `plan_extend`; `arch` as in `launching.architecture`.

    The tiles suit an fp8 cache too. Raises ValueError if the group has more query heads than a
    large tile has rows.
    """
    if arch == 0:  # interpreted: an operation's cost does not depend on its size
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


# Attention plan -----------------------------------------------------------------------------------


HEADER = 8


class SplitRule(msgspec.Struct, frozen=True):
    """Rule for cutting a row's context: at most `most` parts of at least `least` positions."""

    least: int
    most: int

    @property
    def slots_per_row(self) -> int:
        """Maximum number of a row's partial results: a window may begin and end inside a part, and
        shared positions add one."""
        return self.most + 2


def split_rule(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> SplitRule:
    """Return the rule whose parts keep a GPU busy with cheap partial results.

    A lone row should have a program for each of about 128 multiprocessors. A part should read at
    least 64 KiB, which hides latencies, and 32 times the bytes that the part writes. With large
    groups, that bound would leave a lone row few parts.
    """
    enough = max((1 << 16) // (2 * head_dim * itemsize), 64 * num_heads // num_kv_heads)
    least = int(_power_of_two(np.array(enough)))
    return SplitRule(least=min(max(least, 128), 256), most=max(128 // num_kv_heads, 8))


class DecodePlan(msgspec.Struct, frozen=True):
    """Plan of the decode launches on the host. `numbers` is the array of the module's docstring."""

    numbers: np.ndarray
    rows: int
    slots: int
    """Required number of partial results."""
    shares: bool
    """Whether the kernel for shared nodes is launched; with `rows`, whether any step may launch it.
    """

    @property
    def items_at(self) -> int:
        return items_at(self.rows)


def items_at(rows: int) -> int:
    """Return the index at which the rows' own items begin."""
    return -(-(HEADER + 3 * rows + 1) // FIELDS) * FIELDS


class _Rows(msgspec.Struct, frozen=True):
    """Rows of a step as plain numbers, int64 [R] each."""

    token: np.ndarray
    decoding: np.ndarray  # bool
    context: np.ndarray
    first: np.ndarray
    """First position that a row sees."""
    length: np.ndarray
    """Positions per part of the row."""

    def own_items(self, begin: np.ndarray) -> np.ndarray:
        """Return the number of parts with positions from `begin` on."""
        counts = -(-self.context // self.length) - begin // self.length
        return np.where(self.decoding, counts, 0)


def plan_decode(
    batch: AttentionBatch,
    window: int | None,
    rows: int | None,
    split: SplitRule,
    sharing: SharingRule,
    tile: int,
) -> DecodePlan:
    """Plan the rows with one new token; `tile` is the (row, query head) pairs of a node's tile.

    Raises ValueError if a context is empty. With `rows`, also for more rows or for a row with
    several new tokens.
    """
    step = _rows(batch, window, split)
    count = len(step.context)
    if rows is not None and (rows < count or not step.decoding.all()):
        raise ValueError(f"{rows} rows of one new token cannot hold these {count}")
    padded_rows = count if rows is None else rows
    slots = padded_rows * split.slots_per_row

    ranges: list[SharedRange] = []
    if np.count_nonzero(step.decoding) > 1:
        ranges = shared_ranges(batch, step.decoding, step.first, sharing)
    ranges, segments, begin = _fitting_ranges(ranges, step, slots, batch, sharing, tile)
    row_items = step.own_items(begin)
    above = np.zeros_like(row_items)  # partial results of a row's shared positions
    ordinals = []
    for found, number in zip(ranges, segments, strict=True):
        ordinals.append(int(above[found.begin]))
        above[found.begin : found.end] += number
    partial = above + row_items
    partial[partial == 1] = 0  # an only item writes the output directly
    starts = np.zeros(padded_rows + 1, np.int64)
    np.cumsum(partial, out=starts[1 : count + 1])
    starts[count + 1 :] = starts[count]

    items = _own_items(step, begin, row_items, np.where(partial > 0, starts[:count] + above, -1))
    group = batch.num_heads // batch.num_kv_heads
    shared = _shared_items(ranges, segments, ordinals, group, tile, sharing.unit)
    blocks_at = items_at(padded_rows) + items.size + shared.size
    blocks = _place_blocks(batch, step, begin, ranges, items, shared, blocks_at)

    numbers = np.zeros(blocks_at + sum(map(len, blocks)), np.int32)
    numbers[:3] = len(items), len(shared), items_at(padded_rows) + items.size
    head = numbers[HEADER : HEADER + 3 * padded_rows + 1]
    head[: padded_rows + 1] = starts
    head[padded_rows + 1 : 2 * padded_rows + 1] = -1
    head[padded_rows + 1 : padded_rows + 1 + count] = step.token
    head[2 * padded_rows + 1 : 2 * padded_rows + 1 + count] = step.first
    numbers[items_at(padded_rows) : blocks_at] = np.concatenate(
        (items.reshape(-1), shared.reshape(-1))
    )
    if blocks:
        np.concatenate(blocks, out=numbers[blocks_at:], casting="same_kind")
    return DecodePlan(
        numbers=numbers,
        rows=padded_rows,
        slots=int(starts[-1]) if rows is None else slots,
        shares=bool(ranges) if rows is None else rows > 1,
    )


def split_lengths(span: np.ndarray, rule: SplitRule) -> np.ndarray:
    """Return the positions per part of rows that see `span` positions [R]: powers of two times
    `least`."""
    parts = -(-span // (rule.least * rule.most))
    return rule.least * _power_of_two(parts)


def _power_of_two(values: np.ndarray) -> np.ndarray:
    """Return the least power of two at or above each value; values are below 2^52."""
    return 1 << np.ceil(np.log2(np.maximum(values, 1))).astype(np.int64)


def _rows(batch: AttentionBatch, window: int | None, split: SplitRule) -> _Rows:
    starts = batch.row_start.astype(np.int64)
    context = batch.context_len.astype(np.int64)
    if len(context) and int(context.min()) < 1:
        raise ValueError("a row's context holds its new tokens at least")
    first = np.zeros_like(context) if window is None else np.maximum(context - window, 0)
    decoding = np.diff(starts) == 1
    return _Rows(starts[:-1], decoding, context, first, split_lengths(context - first, split))


def _fitting_ranges(
    ranges: list[SharedRange],
    step: _Rows,
    slots: int,
    batch: AttentionBatch,
    rule: SharingRule,
    tile: int,
) -> tuple[list[SharedRange], list[int], np.ndarray]:
    """Return the ranges, the segments of each, and the start of each row's own positions.

    Deeply nested ranges may need more partial results than a row has. Then only the outermost
    ranges are shared: these add one partial result per row, which always fits.
    """
    group = batch.num_heads // batch.num_kv_heads
    begin = step.first.copy()
    for found in ranges:  # inner ranges come later, and reach further
        np.maximum(begin[found.begin : found.end], found.high, out=begin[found.begin : found.end])
    left = slots - int(step.own_items(begin).sum())
    segments = segment_counts(ranges, group, batch.num_kv_heads, tile, rule, left)
    if segments is None:
        outer = [found for found in ranges if found.outer]
        return _fitting_ranges(outer, step, slots, batch, rule, tile)
    return ranges, segments, begin


def _own_items(step: _Rows, begin: np.ndarray, counts: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """Return the rows' own items [I, 8], without places of blocks.

    The longest items come first, so that no long item starts last. slot [R]: the partial result of
    a row's first own item; -1: none.
    """
    order = np.argsort(-step.length, kind="stable")
    row = np.repeat(order, counts[order])
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
    length = step.length[row]
    edge = (begin[row] // length + index) * length
    items = np.zeros((len(row), FIELDS), np.int64)
    items[:, 0] = step.token[row]
    items[:, 1] = row  # replaced by the place of the row's blocks
    items[:, 2] = np.maximum(edge, begin[row])
    items[:, 3] = np.minimum(edge + length, step.context[row])
    items[:, 4] = np.where(slot[row] >= 0, slot[row] + index, -1)
    return items


def _shared_items(
    ranges: list[SharedRange],
    segments: list[int],
    ordinals: list[int],
    group: int,
    tile: int,
    unit: int,
) -> np.ndarray:
    """Return the shared items [J, 8], without places of blocks. The tiles of a segment are
    neighbours, as they read the same keys."""
    parts = [np.zeros((0, FIELDS), np.int64)]
    for node, (found, number, ordinal) in enumerate(zip(ranges, segments, ordinals, strict=True)):
        pairs = found.rows * group
        tiles = -(-pairs // tile)
        step = -(-found.length // (number * unit)) * unit
        segment = np.repeat(np.arange(number), tiles)
        items = np.zeros((len(segment), FIELDS), np.int64)
        items[:, 0] = found.begin
        items[:, 1] = np.tile(np.arange(tiles) * tile, number)
        items[:, 2] = pairs
        items[:, 3] = node  # replaced by the place of the node's blocks
        items[:, 4] = found.low + segment * step
        items[:, 5] = np.minimum(items[:, 4] + step, found.high)
        items[:, 6] = ordinal + segment
        parts.append(items)
    return np.concatenate(parts)


def _place_blocks(
    batch: AttentionBatch,
    step: _Rows,
    begin: np.ndarray,
    ranges: list[SharedRange],
    items: np.ndarray,
    shared: np.ndarray,
    at: int,
) -> list[np.ndarray]:
    """Return the blocks to append from index `at` on, and write each item's place of its blocks."""
    size, tables = batch.block_size, batch.block_tables
    low = begin // size
    high = np.where(step.decoding, -(-step.context // size), low)
    bases = at + np.cumsum(high - low) - high  # index of position 0's block
    items[:, 1] = bases[items[:, 1]]
    blocks = [
        tables[row, start:stop]
        for row, (start, stop) in enumerate(zip(low.tolist(), high.tolist(), strict=True))
    ]
    at += int((high - low).sum())
    places = np.zeros(len(ranges), np.int64)
    for node, found in enumerate(ranges):
        start, stop = found.low // size, -(-found.high // size)
        places[node] = at - start
        blocks.append(tables[found.begin, start:stop])
        at += stop - start
    shared[:, 3] = places[shared[:, 3]]
    return blocks
