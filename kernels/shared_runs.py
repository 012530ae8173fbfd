"""Runs of rows with common leading blocks, which are read once for all rows of a run.

A step's rows are in depth-first order of the prefix tree: rows that share blocks are neighbours, at
every depth. Runs nest as the tree's nodes do. Attention merges the runs' parts of a row's context
and the rest by their log-sum-exps (cascade attention; Ye et al. 2024, "Cascade Inference"; Juravsky
et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

FIRST_LOOK = 32
"""Number of blocks of neighbouring tables that are compared first; doubled repeatedly."""


class SharedRun(msgspec.Struct, frozen=True):
    """Run of rows: rows `begin : end` have the blocks `low : high` of their tables in common."""

    begin: int
    end: int
    low: int
    high: int


def whole_blocks(context: np.ndarray, decoding: np.ndarray, block_size: int) -> np.ndarray:
    """Return the number of blocks [R] that each row may share: full ones without the row's last
    position."""
    return np.where(decoding, (context - 1) // block_size, 0)


def chosen_runs(
    tables: np.ndarray, whole: np.ndarray, worth: Callable[[SharedRun], bool]
) -> list[SharedRun]:
    """Return the runs that `worth` accepts, outer before inner. A refused run leaves its common
    blocks to the runs inside. At most `whole[r]` blocks of row r count."""
    runs: list[SharedRun] = []
    around: list[tuple[int, int]] = []  # (end, blocks covered) of the enclosing runs
    for begin, end, high in _nested(common_blocks(tables, whole).tolist()):
        while around and begin >= around[-1][0]:
            around.pop()
        low = around[-1][1] if around else 0
        run = SharedRun(begin, end, low, high)
        if worth(run):
            runs.append(run)
            low = high
        around.append((end, low))
    return runs


def common_blocks(tables: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Count the leading blocks that rows r and r + 1 have in common, at most `whole` of each,
    [R-1].

    Most neighbours differ early, so the comparison reads little of the tables unless much is in
    common.
    """
    limit = np.minimum(whole[1:], whole[:-1])
    common = np.zeros_like(limit)
    equal = np.flatnonzero(limit)  # pairs not seen to differ yet
    low, step = 0, FIRST_LOOK
    while len(equal):
        high = min(low + step, int(limit[equal].max()))
        rows = slice(int(equal[0]), int(equal[-1]) + 2)
        part = tables[rows, low:high]
        same = (part[1:] == part[:-1])[equal - rows.start]
        every = same.all(1)
        common[equal] = np.where(every, high, low + same.argmin(1))
        equal = equal[every & (limit[equal] > high)]
        low, step = high, 2 * step
    return np.minimum(common, limit)


def _nested(common: list[int]) -> list[tuple[int, int, int]]:
    """Return maximal runs of rows with common blocks, depth first: (begin, end, number of blocks).

    These are the intervals of the longest-common-prefix array, found with one stack in linear time.
    """
    found: list[tuple[int, int, int]] = []
    open_runs: list[tuple[int, int]] = []  # (begin, blocks in common), growing
    for row, high in enumerate([*common, 0]):
        begin = row
        while open_runs and open_runs[-1][1] > high:
            begin, blocks = open_runs.pop()
            found.append((begin, row + 1, blocks))
        if high and (not open_runs or open_runs[-1][1] < high):
            open_runs.append((begin, high))
    return sorted(found, key=lambda run: (run[0], -run[1]))
