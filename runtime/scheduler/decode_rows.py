"""The rows of sequences that decode, as arrays that go from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.scheduler.order import DepthFirst
from rootlace.runtime.scheduler.sequence import Sequence

_SPARE_COLUMNS = 32
"""Room in block tables: after this many more blocks per row they are made anew."""


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One token of each of R sequences, in the order of the rows.

    `block_tables` are shared with the steps before and after: entries behind a row's own blocks
    change.
    """

    sequences: list[Sequence]
    token_ids: np.ndarray  # [R] int32, those that are not known yet mean nothing
    positions: np.ndarray  # [R] int32
    slots: np.ndarray  # [R] int64
    row_start: np.ndarray  # [R+1] int32: 0, 1, ... R
    block_tables: np.ndarray  # [R, W] int32
    common_blocks: np.ndarray  # int32, see `StepPlan`
    rids: np.ndarray  # [R] int64


class DecodeRows:
    """Lays decode rows out.

    A sequence that decodes gains a block now and then at the end of its table, which changes in no
    other way, and is one token further in each step. So while the same sequences decode, a step's
    arrays follow from those before it, and nothing is done that grows with the context.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._ready: list[Sequence] = []
        self._order = DepthFirst([], [])
        self._version = -1
        self._last = _layout(self._order, block_size)
        self._inside = 0
        """Number of further steps in which no row begins a block."""

    def lay_out(self, ready: list[Sequence], order: DepthFirst, version: int) -> DecodeLayout:
        """The rows of `ready`, whose `computed` counts this step's token already.

        Call it for every step. `order` has these sequences, and perhaps others, in the order of the
        rows; it is a new object whenever the order changes. `version` changes whenever a table
        changed other than at its end, or `computed` other than by a step's token.
        """
        kept = order is self._order and version == self._version and ready == self._ready
        self._ready, self._order, self._version = ready, order, version
        following = self._following() if kept else None
        if following is None:
            if len(ready) < len(order.sequences):
                order = order.only(set(ready))
            following = _layout(order, self._size)
            self._inside = self._steps_inside(following.positions)
        self._last = following
        return following

    def _following(self) -> DecodeLayout | None:
        """The step behind the last one; None if the tables have no room for it."""
        last = self._last
        positions, slots = last.positions + 1, last.slots + 1
        if self._inside:
            self._inside -= 1
        else:
            tables, size = last.block_tables, self._size
            columns, inside = np.divmod(positions, size)
            rows = np.flatnonzero(inside == 0)
            if len(rows):
                columns = columns[rows]
                if columns.max() >= tables.shape[1]:
                    return None
                sequences = last.sequences
                blocks = [
                    sequences[row].table[column]
                    for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
                ]
                tables[rows, columns] = blocks
                slots[rows] = np.array(blocks, np.int64) * size
            self._inside = size - 1 - int(inside.max(initial=0))  # maybe no rows
        token_ids = np.array([sequence.last for sequence in last.sequences], np.int32)
        return DecodeLayout(
            last.sequences,
            token_ids,
            positions,
            slots,
            last.row_start,
            last.block_tables,
            last.common_blocks,
            last.rids,
        )

    def _steps_inside(self, positions: np.ndarray) -> int:
        """How many steps after the one with these positions begin no block in any row."""
        return self._size - 1 - int((positions % self._size).max(initial=0))


def _layout(order: DepthFirst, size: int) -> DecodeLayout:
    """The layout computed from the sequences alone."""
    sequences = order.sequences
    positions = np.array([sequence.computed for sequence in sequences], np.int32)
    positions -= 1
    columns = positions // size
    tables = np.zeros((len(sequences), int(columns.max(initial=-1)) + 1 + _SPARE_COLUMNS), np.int32)
    for row, sequence in enumerate(sequences):
        used = int(columns[row]) + 1
        tables[row, :used] = sequence.table[:used]
    slots = tables[np.arange(len(sequences)), columns].astype(np.int64)
    slots *= size
    slots += positions - columns * size
    return DecodeLayout(
        sequences,
        np.array([sequence.last for sequence in sequences], np.int32),
        positions,
        slots,
        np.arange(len(sequences) + 1, dtype=np.int32),
        tables,
        np.array(order.common, np.int32) // size,
        np.array([sequence.rid for sequence in sequences], np.int64),
    )
