"""The step plan: collects the rows of a step and lays them out as arrays.

rows       decode | decode | prefill chunk ........ | draft ....     depth-first order of the tree
token_ids  t        t        t t t t t t t t t t t    t t t t
samples    s        s                          s      s s s s       the last row of a chunk samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache import BlockPool
from rootlace.runtime.contracts.plan import PooledRow, PromptScoreRow, StepPlan
from rootlace.runtime.scheduler.request import InFlightStep, RequestState
from rootlace.runtime.scheduler.rows import Constraint, DecodeLayout, DepthFirst, SampleRows

_NONE = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 3), np.int32)
_NO_FEEDS = np.empty((0, 2), np.int32)


@dataclass(slots=True)
class _Chunk:
    """`count` tokens of `sequence` from position `start`.

    `flat`: tokens of all chunks planned before.
    """

    sequence: RequestState
    start: int
    count: int
    flat: int
    table: np.ndarray
    sample: bool
    score_start: int
    score_stop: int
    pool_start: int = 0
    pool_stop: int = 0
    draft: list[Constraint | None] | None = None
    """The constraint of the token sampled behind each of the rows; all rows but the first are
    drafted."""


@dataclass(slots=True)
class _Origin:
    """Origin of the first rows of a block made in this step.

    The first `copied` rows come from block `source`, the next rows from the flat tokens
    `duplicates`.
    """

    source: int
    copied: int
    duplicates: np.ndarray


class PlanBuilder:
    """One step under construction.

    The builder knows which rows of which block this step writes. So a block shared within the step
    gets each row from the place of the row when copies run (see "Same-step sharing").
    """

    def __init__(
        self, step: int, pool: BlockPool, *, feeding: bool = True, adapters: bool = True
    ) -> None:
        """`feeding`: a step in flight may supply tokens. `adapters`: rows may have adapters."""
        self.step = step
        self._feeding = feeding
        self._have_adapters = adapters
        self._decoding: list[RequestState] = []
        self._chunks: list[_Chunk] = []
        self._complete: list[RequestState] = []
        self._pool = pool
        self._block_size = pool.block_size
        self._flat = 0
        self._copies: list[tuple[int, int, int]] = []
        self._duplicates: list[tuple[np.ndarray, np.ndarray]] = []
        self._origins: dict[int, _Origin] = {}
        self._writers: dict[int, _Chunk] = {}
        """Block -> its writer among the first `_noted` chunks."""
        self._noted = 0
        self._guards: list[np.ndarray] = []

    # ------------------------------------------------------------ collecting

    @property
    def num_rows(self) -> int:
        return len(self._decoding) + len(self._chunks)

    def add_decodes(self, sequences: list[RequestState]) -> None:
        """Add the next token, known or pending, of each sequence; the table has the slot."""
        self._decoding = sequences

    def add_chunk(
        self,
        sequence: RequestState,
        count: int,
        *,
        complete: bool,
        scores: tuple[int, int],
        pooled: tuple[int, int] = (0, 0),
    ) -> None:
        """Add `count` tokens from `sequence.computed` on, whose blocks are in the table.

        `complete`: the chunk ends before a sample, or before the sequence's end. Tokens scores[0]
        up to scores[1] get log-probabilities. Of tokens pooled[0] up to pooled[1] hidden states are
        returned.
        """
        start, size = sequence.computed, self._block_size
        sample = complete and sequence.ending is None
        if complete and not sample:
            self._complete.append(sequence)
        end = start + count
        # Copied: storing the chunk may replace written blocks with the tree's.
        table = sequence.table[: -(-end // size)].copy()
        self._chunks.append(
            _Chunk(sequence, start, count, self._flat, table, sample, *scores, *pooled)
        )
        self._flat += count

    def add_draft(self, sequence: RequestState, constraints: list[Constraint | None]) -> None:
        """Add the next token of a decoding sequence and its draft.

        A token is sampled behind each of these rows, under `constraints`. Blocks as for
        `add_chunk`.
        """
        start, count = sequence.computed, len(constraints)
        table = sequence.table[: -(-(start + count) // self._block_size)].copy()
        self._chunks.append(
            _Chunk(
                *(sequence, start, count, self._flat, table, False),
                score_start=0,
                score_stop=0,
                draft=constraints,
            )
        )
        self._flat += count

    def _written(self, block: int, count: int) -> tuple[int, int]:
        """First row of `block` that this step writes, and the flat token of row 0 as if written.

        The first row is `count` if none of the first `count` rows is written.
        """
        size = self._block_size
        # Computed on demand: few steps share blocks that they write to.
        for chunk in self._chunks[self._noted :]:
            self._writers.update(dict.fromkeys(chunk.table[chunk.start // size :].tolist(), chunk))
        self._noted = len(self._chunks)
        writer = self._writers.get(block)
        if writer is None:
            return count, 0
        first = int((writer.table == block).argmax()) * size
        return min(max(writer.start - first, 0), count), writer.flat + first - writer.start

    def share_rows(self, source: int, target: int, count: int) -> None:
        """Fill the first `count` rows of block `target` from `source` before attention runs."""
        first_written, flat = self._written(source, count)
        origin = self._origins.get(source)
        base, copied, duplicates = source, first_written, _NONE
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
        """Free `blocks`, which this step writes to, when the plan is complete."""
        self._guards.append(blocks)

    # ------------------------------------------------------------ layout

    def build(
        self,
        order: DepthFirst,
        sample_rows: SampleRows,
        lay_out: Callable[[list[RequestState]], DecodeLayout],
    ) -> InFlightStep:
        """Lay the rows out in `order`, which has every row's sequence; `lay_out` places decode
        rows."""
        decode = lay_out(self._decoding)
        if self._chunks:
            flight = self._mixed(order, decode, sample_rows)
        else:
            flight = self._decode_only(decode, sample_rows)
        self.close()
        for at, (sequence, _) in enumerate(flight.sampled):
            sequence.pending += 1
            sequence.sampled_at = at
        return flight

    def _decode_only(self, decode: DecodeLayout, sample_rows: SampleRows) -> InFlightStep:
        sequences = decode.sequences
        samples, wait_for_masks = sample_rows.start(list(enumerate(sequences)))
        plan = StepPlan(
            step=self.step,
            token_ids=decode.token_ids,
            positions=decode.positions,
            slots=decode.slots,
            row_start=decode.row_start,
            context_len=decode.positions + 1,
            block_tables=decode.block_tables,
            copies=_NO_COPIES,
            duplicate_tokens=_NO_TOKENS,
            duplicate_slots=_NONE,
            samples=samples,
            wait_for_masks=wait_for_masks,
            feeds=_feeds(sequences, range(len(sequences))) if self._feeding else _NO_FEEDS,
            adapters=self._adapters(sequences),
            common_blocks=decode.common_blocks,
            rids=decode.rids,
        )
        sampled = [(sequence, sequence.epoch) for sequence in sequences]
        return InFlightStep(plan, sequences, sampled, [], [])

    def _mixed(
        self, order: DepthFirst, decode: DecodeLayout, sample_rows: SampleRows
    ) -> InFlightStep:
        size, chunks = self._block_size, self._chunks
        members = {*decode.sequences, *(chunk.sequence for chunk in chunks)}
        if len(members) < len(order.sequences):
            order = order.only(members)
        sequences = order.sequences
        row_of = {sequence: row for row, sequence in enumerate(sequences)}
        decoding = np.array([row_of[sequence] for sequence in decode.sequences], np.int64)
        counts = np.ones(len(sequences), np.int32)
        for chunk in chunks:
            counts[row_of[chunk.sequence]] = chunk.count
        row_start = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=row_start[1:])
        total = int(row_start[-1])
        width = max(-(-(chunk.start + chunk.count) // size) for chunk in chunks)
        if len(decoding):
            width = max(width, int(decode.positions.max()) // size + 1)
        token_ids = np.empty(total, np.int32)
        positions = np.empty(total, np.int32)
        slots = np.empty(total, np.int64)
        context_len = np.empty(len(sequences), np.int32)
        tables = np.zeros((len(sequences), width), np.int32)
        remap = np.empty(self._flat, np.int64) if self._duplicates else _NONE
        flats = row_start[decoding]
        token_ids[flats] = decode.token_ids
        positions[flats] = decode.positions
        slots[flats] = decode.slots
        context_len[decoding] = decode.positions + 1
        used = min(width, decode.block_tables.shape[1])
        tables[decoding, :used] = decode.block_tables[:, :used]
        sampling = dict.fromkeys(decoding.tolist(), True)
        scores: list[PromptScoreRow] = []
        scored: list[tuple[RequestState, int, int]] = []
        pooled: list[PooledRow] = []
        pooling: list[tuple[RequestState, int]] = []
        chunks.sort(key=lambda chunk: row_of[chunk.sequence])
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            row = row_of[sequence]
            at, stop = int(row_start[row]), int(row_start[row + 1])
            where = np.arange(start, end)
            token_ids[at:stop] = sequence.tokens[start:end]
            positions[at:stop] = where
            slots[at:stop] = chunk.table[where // size].astype(np.int64) * size + where % size
            context_len[row] = end
            tables[row, : len(chunk.table)] = chunk.table
            if chunk.sample:
                sampling[row] = True
            if len(remap):
                remap[chunk.flat : chunk.flat + chunk.count] = np.arange(at, stop)
            if chunk.score_start < chunk.score_stop:
                targets = sequence.tokens[chunk.score_start : chunk.score_stop]
                top = sequence.request.params.top_logprobs
                flat = at + chunk.score_start - 1 - start
                scores.append(PromptScoreRow(row, flat, targets, top))
                scored.append((sequence, chunk.score_start, chunk.score_stop))
            if chunk.pool_start < chunk.pool_stop and sequence.pool is not None:
                flat, states = at + chunk.pool_start - start, chunk.pool_stop - chunk.pool_start
                pooled.append(PooledRow(flat, states, sequence.pool.labels))
                pooling.append((sequence, chunk.pool_start))
        sampled = [(row, sequences[row]) for row in sorted(sampling)]
        samples, wait_for_masks = sample_rows.start(sampled)
        for chunk in chunks:
            if chunk.draft is not None:
                row = row_of[chunk.sequence]
                samples += sample_rows.drafted(row, chunk.sequence, chunk.draft)
                sampled += [(row, chunk.sequence)] * chunk.count
        wait_for_masks = sample_rows.start_drafts(wait_for_masks)
        duplicate_tokens, duplicate_slots = _NO_TOKENS, _NONE
        if self._duplicates:
            written, targets = zip(*self._duplicates, strict=True)
            duplicate_tokens = remap[np.concatenate(written)].astype(np.int32)
            duplicate_slots = np.concatenate(targets)
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
            pooled=pooled,
            feeds=_feeds(decode.sequences, flats.tolist()),
            adapters=self._adapters(sequences),
            common_blocks=_common_blocks(order, context_len - counts, size),
            rids=np.array([sequence.rid for sequence in sequences], np.int64),
        )
        return InFlightStep(
            plan=plan,
            rows=sequences,
            sampled=[(sequence, sequence.epoch) for _, sequence in sampled],
            scored=scored,
            complete=self._complete,
            pooled=pooling,
        )

    def close(self) -> None:
        """Release the blocks held while planning."""
        for blocks in self._guards:
            self._pool.drop(blocks, pinned=True)
        self._guards = []

    def _adapters(self, sequences: list[RequestState]) -> np.ndarray:
        """Adapter index of each row."""
        if not self._have_adapters:
            return _NO_TOKENS
        adapters = [sequence.adapter for sequence in sequences]
        return np.array(adapters, np.int32) if max(adapters, default=-1) >= 0 else _NO_TOKENS


def _common_blocks(order: DepthFirst, starts: np.ndarray, size: int) -> np.ndarray:
    """Shared leading blocks of neighbouring rows; `starts` [R]: tokens before the new ones."""
    common = np.array(order.common, np.int32)
    return np.minimum(common, np.minimum(starts[1:], starts[:-1])) // size


def _feeds(sequences: list[RequestState], flats: Iterable[int]) -> np.ndarray:
    """The `feeds` of decode rows at the flat tokens `flats`."""
    feeds = [
        (flat, sequence.sampled_at)
        for flat, sequence in zip(flats, sequences, strict=True)
        if sequence.computed > sequence.length
    ]
    return np.array(feeds, np.int32) if feeds else _NO_FEEDS
