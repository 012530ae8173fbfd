"""Collects the rows of a step and lays them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache import BlockPool
from rootlace.runtime.scheduler.flight import Flight
from rootlace.runtime.scheduler.plan import PromptScoreRow, StepPlan
from rootlace.runtime.scheduler.sample_rows import SampleRows
from rootlace.runtime.scheduler.sequence import Sequence

_NONE = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 3), np.int32)
_NO_FEEDS = np.empty((0, 2), np.int32)


@dataclass(slots=True)
class _Row:
    """`count` tokens of `sequence` from position `start`; `flat` counts in order of planning."""

    sequence: Sequence
    start: int
    count: int
    flat: int
    table: np.ndarray
    sample: bool
    score_start: int
    score_stop: int


@dataclass(slots=True)
class _Origin:
    """Where the first rows of a block made in this step come from: `copied` rows of block `source`,
    then those of the flat tokens `duplicates`."""

    source: int
    copied: int
    duplicates: np.ndarray


class PlanBuilder:
    """One step under construction.

    Knows which rows of which block this step writes, so that a block shared within the step gets
    its rows from where they really are when the copies run (see "Same-step sharing").
    """

    def __init__(self, step: int, pool: BlockPool) -> None:
        self.step = step
        self.rows: list[_Row] = []
        self._complete: list[Sequence] = []
        self._pool = pool
        self._block_size = pool.block_size
        self._flat = 0
        self._copies: list[tuple[int, int, int]] = []
        self._duplicates: list[tuple[np.ndarray, np.ndarray]] = []
        self._origins: dict[int, _Origin] = {}
        self._written: dict[int, tuple[int, int]] = {}
        """Block -> (first row written by this step, flat token of row 0 as if it were written)."""
        self._guards: list[np.ndarray] = []

    # ------------------------------------------------------------ collecting

    def add_decode(self, sequence: Sequence) -> None:
        """The next token of a decoding sequence, known or pending; its slot is in its table."""
        row = _Row(sequence, sequence.computed, 1, self._flat, sequence.table, True, 0, 0)
        self.rows.append(row)
        self._flat += 1

    def add_chunk(
        self, sequence: Sequence, count: int, *, complete: bool, scores: tuple[int, int]
    ) -> None:
        """`count` tokens from `sequence.computed` on, whose blocks are in its table.

        `complete`: these are the last before a sample, or before the sequence's end. `scores`: the
        tokens from scores[0] up to scores[1] get log-probabilities.
        """
        start, size = sequence.computed, self._block_size
        sample = complete and sequence.ending is None
        if complete and not sample:
            self._complete.append(sequence)
        end = start + count
        # A copy: storing the chunk may put the tree's blocks in place of those it writes to.
        table = sequence.table[: -(-end // size)].copy()
        self.rows.append(_Row(sequence, start, count, self._flat, table, sample, *scores))
        first = start // size
        if size > 1:  # with one slot per block there are no partial blocks to share
            for index, block in enumerate(table[first:].tolist(), first):
                offset = max(start - index * size, 0)
                self._written[block] = (offset, self._flat + index * size - start)
        self._flat += count

    def share_rows(self, source: int, target: int, count: int) -> None:
        """Block `target` is to hold the first `count` rows of `source` before anybody attends."""
        first_written, flat = self._written.get(source, (count, 0))
        origin = self._origins.get(source)
        base, copied, duplicates = source, min(first_written, count), _NONE
        if origin is not None:
            base = origin.source
            duplicates = origin.duplicates[: max(copied - origin.copied, 0)]
            copied = min(copied, origin.copied)
        if first_written < count:
            written = np.arange(flat + first_written, flat + count)
            duplicates = np.concatenate((duplicates, written))
        if copied:
            self._copies.append((base, target, copied))
            guard = np.array([base], np.int32)
            self._pool.retain(guard, pinned=True)
            self._guards.append(guard)
        if len(duplicates):
            slots = target * self._block_size + np.arange(copied, count)
            self._duplicates.append((duplicates, slots))
        self._origins[target] = _Origin(base, copied, duplicates)

    def drop_later(self, blocks: np.ndarray) -> None:
        """Blocks that this step writes to and nobody needs: free when the plan is complete."""
        self._guards.append(blocks)

    # ------------------------------------------------------------ layout

    def build(self, order: list[Sequence], sample_rows: SampleRows) -> Flight:
        """Lay the rows out in the order of `order`, which names every row's sequence."""
        row_of = {row.sequence: row for row in self.rows}
        rows = [row_of[sequence] for sequence in order if sequence in row_of]
        sampled = [(index, row.sequence) for index, row in enumerate(rows) if row.sample]
        samples, wait_for_masks = sample_rows.start(sampled)
        feeds: list[tuple[int, int]] = []
        scored: list[tuple[Sequence, int, int]] = []
        size = self._block_size
        total, width = self._flat, 0
        if rows:
            width = max(-(-(row.start + row.count) // size) for row in rows)
        token_ids = np.empty(total, np.int32)
        positions = np.empty(total, np.int32)
        slots = np.empty(total, np.int64)
        row_start = np.zeros(len(rows) + 1, np.int32)
        context_len = np.empty(len(rows), np.int32)
        tables = np.zeros((len(rows), width), np.int32)
        remap = np.empty(total, np.int64) if self._duplicates else _NONE
        scores: list[PromptScoreRow] = []
        at = 0
        for index, row in enumerate(rows):
            sequence, start, end, stop = (
                row.sequence,
                row.start,
                row.start + row.count,
                at + row.count,
            )
            used = -(-end // size)
            tables[index, :used] = row.table[:used]
            context_len[index] = end
            row_start[index + 1] = stop
            if row.count == 1:
                if start < sequence.length:
                    token_ids[at] = sequence.tokens[start]
                else:
                    token_ids[at] = 0
                    feeds.append((at, sequence.sampled_at))
                positions[at] = start
                slots[at] = int(row.table[start // size]) * size + start % size
            else:
                token_ids[at:stop] = sequence.tokens[start:end]
                where = np.arange(start, end)
                positions[at:stop] = where
                slots[at:stop] = row.table[where // size].astype(np.int64) * size + where % size
            if len(remap):
                remap[row.flat : row.flat + row.count] = np.arange(at, stop)
            if row.score_start < row.score_stop:
                targets = sequence.tokens[row.score_start : row.score_stop]
                top = sequence.request.params.top_logprobs
                flat = at + row.score_start - 1 - start
                scores.append(PromptScoreRow(index, flat, targets, top))
                scored.append((sequence, row.score_start, row.score_stop))
            at = stop
        duplicate_tokens, duplicate_slots = _NO_TOKENS, _NONE
        if self._duplicates:
            flats, targets = zip(*self._duplicates, strict=True)
            duplicate_tokens = remap[np.concatenate(flats)].astype(np.int32)
            duplicate_slots = np.concatenate(targets)
        self.close()
        plan = StepPlan(
            step=self.step,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            row_start=row_start,
            context_len=context_len,
            block_tables=tables,
            copies=np.array(self._copies, np.int32) if self._copies else _NO_COPIES,
            duplicate_tokens=duplicate_tokens,
            duplicate_slots=duplicate_slots,
            samples=samples,
            wait_for_masks=wait_for_masks,
            prompt_scores=scores,
            feeds=np.array(feeds, np.int32) if feeds else _NO_FEEDS,
        )
        for at, (_, sequence) in enumerate(sampled):
            sequence.pending += 1
            sequence.sampled_at = at
        return Flight(
            plan=plan,
            rows=[row.sequence for row in rows],
            sampled=[(sequence, sequence.epoch) for _, sequence in sampled],
            scored=scored,
            complete=self._complete,
        )

    def close(self) -> None:
        """Let go of what was kept while planning."""
        for blocks in self._guards:
            self._pool.drop(blocks, pinned=True)
        self._guards = []
