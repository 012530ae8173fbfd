"""Which decode rows have leading blocks in common, so that these are read once for all of them.

A step's rows are in depth-first order of the prefix tree: rows that share blocks are neighbours, at
every depth. The runs found here are nested as the tree is; attention over a row's context is then
attention over the parts that its runs cover and over the rest, merged by their log-sum-exps
(cascade attention; Ye et al. 2024, "Cascade Inference"; Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MIN_SAVED = 1024
"""Slots that sharing must save a run: below, another call costs more than reading them again."""


@dataclass(frozen=True)
class SharedRun:
    """Rows `begin : end` have the blocks `low : high` of their tables in common."""

    begin: int
    end: int
    low: int
    high: int


def shared_runs(
    tables: np.ndarray, context: np.ndarray, decoding: np.ndarray, block_size: int
) -> list[SharedRun]:
    """Runs worth sharing among the rows that are `decoding` (bool [R]), outer before inner.

    tables int [R, W], context int [R]. Only whole blocks count, and every row keeps at least one
    position of its own.
    """
    whole = np.where(decoding, (context - 1) // block_size, 0)
    equal = tables[1:] == tables[:-1]
    common = np.where(equal.all(1), tables.shape[1], equal.argmin(1))
    common = np.minimum(common, np.minimum(whole[1:], whole[:-1]))
    runs = []
    stack = [(0, len(context), 0)]
    while stack:
        begin, end, low = stack.pop()
        if end - begin < 2:
            continue
        between = common[begin : end - 1]
        high = int(between.min())
        if (end - begin - 1) * (high - low) * block_size >= MIN_SAVED:
            runs.append(SharedRun(begin, end, low, high))
            low = high
        cuts = (begin + 1 + np.flatnonzero(between == high)).tolist()
        stack.extend((a, b, low) for a, b in pairwise((begin, *cuts, end)))
    return runs
