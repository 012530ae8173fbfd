"""Host side of decode attention: one array of numbers that says who reads what.

Each row's own positions are cut at fixed places, multiples of a power of two that its context alone
decides (`split_lengths`), into items of work; what rows share is cut into segments
(`shared_nodes`). An item leaves a partial result and its log-sum-exp, the merge joins those of a
row in order of position. A row that shares nothing is therefore computed by the same operations in
the same order whoever is beside it. A row with one item alone has no partial result: the item
writes the row's output.

The launches are the same for every step of a family (`rows`): a fixed number of programs loop over
items whose count they read here. A partial result is Nq (D + 1) float32, and there is room for
`slots_per_row` (10 to 130) of them per row: 256 rows of 32 heads of 128 over 8 KV heads take 76 MB,
which every layer uses again.

Layout, int32, everything in one array that may grow at its end only:

    header [8]: own items, shared items, where shared items begin, zeros
    starts [rows + 1]: a row's partial results are starts[r] : starts[r + 1]
    tokens [rows]: its flat token; -1: the row is empty
    firsts [rows]: the first position that it sees
    zeros, to a multiple of 8
    own items [I, 8]: flat token; where position 0's block would be (below); first position, behind
        the last; partial result, or -1 to write the output; zeros
    shared items [J, 8]: first row; first (row, query head of the group) pair of the tile; number of
        pairs of the node; block of position 0; first position, behind the last; which of its rows'
        partial results; 0
    blocks: of every item's positions; that of position p is `numbers[item's block + p // S]`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.triton.shared_nodes import (
    SharedRange,
    SharingRule,
    segment_counts,
    shared_ranges,
)

HEADER = 8
FIELDS = 8


@dataclass(frozen=True)
class SplitRule:
    """How a row's context is cut: into at most `most` parts of at least `least` positions."""

    least: int
    most: int

    @property
    def slots_per_row(self) -> int:
        """Partial results of a row, at most: a window may begin and end inside a part, and what a
        row shares adds one."""
        return self.most + 2


def split_rule(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> SplitRule:
    """Parts that keep a GPU busy and whose partial results cost little.

    A lone row should have a program for each of about 128 multiprocessors. A part should read 64
    KiB, which hides its latencies, and 32 times what it writes; but with large groups that would
    leave a lone row few parts.
    """
    enough = max((1 << 16) // (2 * head_dim * itemsize), 64 * num_heads // num_kv_heads)
    least = int(_power_of_two(np.array(enough)))
    return SplitRule(least=min(max(least, 128), 256), most=max(128 // num_kv_heads, 8))


@dataclass(frozen=True)
class DecodePlan:
    """What the launches need on the host; all else is in `numbers` (see the module)."""

    numbers: np.ndarray
    rows: int
    slots: int
    """Partial results there must be room for."""
    shares: bool
    """Whether the kernel for shared nodes is launched (with `rows`: whether it ever may be)."""

    @property
    def items_at(self) -> int:
        return items_at(self.rows)


def items_at(rows: int) -> int:
    """Where the own items begin."""
    return -(-(HEADER + 3 * rows + 1) // FIELDS) * FIELDS


def max_numbers(rows: int, blocks_per_row: int, rule: SplitRule) -> int:
    """The longest `DecodePlan.numbers` of a family, if a row has at most so many blocks."""
    items = rows * (rule.slots_per_row + 1)
    shared = rows * rule.slots_per_row  # a shared item has a partial result of its own at least
    return items_at(rows) + FIELDS * (items + shared) + rows * (blocks_per_row + rule.slots_per_row)


@dataclass(frozen=True)
class _Rows:
    """The rows of a step as plain numbers, int64 [R] each."""

    token: np.ndarray
    decoding: np.ndarray  # bool
    context: np.ndarray
    first: np.ndarray
    """The first position that a row sees."""
    length: np.ndarray
    """Positions per part of the row."""

    def own_items(self, begin: np.ndarray) -> np.ndarray:
        """How many parts the positions from `begin` on lie in."""
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
    """Plan the rows with one new token; `tile` (row, query head) pairs make a tile of a node.

    Raises ValueError if a context is empty or, with `rows`, if there are more or other rows.
    """
    step = _rows(batch, window, split)
    count = len(step.context)
    if rows is not None and (rows < count or not step.decoding.all()):
        raise ValueError(f"{rows} rows of one new token cannot hold these {count}")
    room = count if rows is None else rows
    slots = room * split.slots_per_row

    ranges: list[SharedRange] = []
    if np.count_nonzero(step.decoding) > 1:
        ranges = shared_ranges(batch, step.decoding, step.first, sharing)
    ranges, segments, begin = _fitting_ranges(ranges, step, slots, batch, sharing, tile)
    own = step.own_items(begin)
    above = np.zeros_like(own)  # partial results of what a row shares
    ordinals = []
    for found, number in zip(ranges, segments, strict=True):
        ordinals.append(int(above[found.begin]))
        above[found.begin : found.end] += number
    partial = above + own
    partial[partial == 1] = 0  # the only item writes the output itself
    starts = np.zeros(room + 1, np.int64)
    np.cumsum(partial, out=starts[1 : count + 1])
    starts[count + 1 :] = starts[count]

    items = _own_items(step, begin, own, np.where(partial > 0, starts[:count] + above, -1))
    group = batch.num_heads // batch.num_kv_heads
    shared = _shared_items(ranges, segments, ordinals, group, tile, sharing.unit)
    blocks_at = items_at(room) + items.size + shared.size
    blocks = _place_blocks(batch, step, begin, ranges, items, shared, blocks_at)

    numbers = np.zeros(blocks_at + sum(map(len, blocks)), np.int32)
    numbers[:3] = len(items), len(shared), items_at(room) + items.size
    head = numbers[HEADER : HEADER + 3 * room + 1]
    head[: room + 1] = starts
    head[room + 1 : 2 * room + 1] = -1
    head[room + 1 : room + 1 + count] = step.token
    head[2 * room + 1 : 2 * room + 1 + count] = step.first
    numbers[items_at(room) : blocks_at] = np.concatenate((items.reshape(-1), shared.reshape(-1)))
    if blocks:
        np.concatenate(blocks, out=numbers[blocks_at:], casting="same_kind")
    return DecodePlan(
        numbers=numbers,
        rows=room,
        slots=int(starts[-1]) if rows is None else slots,
        shares=bool(ranges) if rows is None else rows > 1,
    )


def split_lengths(span: np.ndarray, rule: SplitRule) -> np.ndarray:
    """Positions per part of rows that see `span` positions [R]: powers of two times `least`."""
    parts = -(-span // (rule.least * rule.most))
    return rule.least * _power_of_two(parts)


def _power_of_two(values: np.ndarray) -> np.ndarray:
    """The least power of two that is no smaller, of numbers below 2^52."""
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
    """Ranges, the segments of each, and where each row's own positions then begin.

    Where ranges nest so deeply that a row's partial results have no room, only the outermost ranges
    are shared: they add one partial result per row, for which there is always room.
    """
    group = batch.num_heads // batch.num_kv_heads
    begin = step.first.copy()
    for found in ranges:  # inner ones come later, and reach further
        np.maximum(begin[found.begin : found.end], found.high, out=begin[found.begin : found.end])
    left = slots - int(step.own_items(begin).sum())
    segments = segment_counts(ranges, group, batch.num_kv_heads, tile, rule, left)
    if segments is None:
        outer = [found for found in ranges if found.outer]
        return _fitting_ranges(outer, step, slots, batch, rule, tile)
    return ranges, segments, begin


def _own_items(step: _Rows, begin: np.ndarray, counts: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """Items [I, 8], the longest first, so that no long one is begun last. Blocks are not placed.

    slot [R]: the partial result of a row's first own item, -1: none.
    """
    order = np.argsort(-step.length, kind="stable")
    row = np.repeat(order, counts[order])
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
    length = step.length[row]
    edge = (begin[row] // length + index) * length
    items = np.zeros((len(row), FIELDS), np.int64)
    items[:, 0] = step.token[row]
    items[:, 1] = row  # until the blocks are placed
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
    """Items [J, 8]; the tiles of a segment are neighbours, as they read the same keys."""
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
        items[:, 3] = node  # until the blocks are placed
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
    """The blocks to be read, to be laid out from `at` on; items are told where theirs are."""
    size, tables = batch.block_size, batch.block_tables
    low = begin // size
    high = np.where(step.decoding, -(-step.context // size), low)
    bases = at + np.cumsum(high - low) - high  # where the block of position 0 would be
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
