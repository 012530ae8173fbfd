"""Cost rule of tree attention: which nodes of a step's rows are read once for all rows below them.

What sharing saves is bytes of keys and values. What it costs is a partial result per row and
segment (written, and read again by the merge) and a launch that ends before the rows' own begins.
The constants come from counting bytes; no GPU has measured them yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.reference.attention import SharedRun, chosen_runs, whole_blocks


@dataclass(frozen=True)
class SharingRule:
    """`node_bytes` a node must save beyond its partial results, `step_bytes` all of them together.

    The second is what the memory delivers while the launch starts and drains (about 2 us at
    4 TB/s), the first a part of that. Nodes are cut into segments of at least `least_segment`
    positions, so many that each of `programs` programs has one; their lengths are multiples of
    `unit`, which tiles of keys divide.
    """

    node_bytes: int = 1 << 20
    step_bytes: int = 8 << 20
    least_segment: int = 256
    programs: int = 132
    unit: int = 128


@dataclass(frozen=True)
class SharedRange:
    """Rows `begin : end` share the keys of the positions `low : high`; `saved` positions are read
    less often. `outer`: no other range holds these rows and more."""

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
    """What is worth sharing among the rows that are `decoding` (bool [R]), outer before inner.

    first [R]: the first position that a row sees, not 0 if a window hides some. A row's ranges
    follow one another without gaps and begin at its first position or before; none of them holds
    its last position.
    """
    size, group = batch.block_size, batch.num_heads // batch.num_kv_heads
    # A row's partial result is 4 Nq D bytes, written and read; a position 2 Nk D elements.
    partial = max(4 * group // batch.dtype.itemsize, 1)
    position_bytes = 2 * batch.num_kv_heads * batch.head_dim * batch.dtype.itemsize
    windowed = bool(first.any())
    ranges: list[SharedRange] = []
    reach = 0  # behind the last row of all ranges so far

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
    """Into how many segments each range is cut; with a tile of `tile` (row, query head) pairs.

    Every row of every segment takes one of `slots` partial results; None if that cannot be.
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
