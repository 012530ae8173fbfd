"""The step plan: collects the rows of a step and lays them out as arrays.

rows       decode | decode | prefill chunk ........ | draft ....     depth-first order of the tree
token_ids  t        t        t t t t t t t t t t t    t t t t
samples    s        s                          s      s s s s       the last row of a chunk samples

Sections: order of the rows, decode rows, plan builder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import BlockPool
from rootlace.runtime.contracts.plan import PooledRow, PromptScoreRow, SampleRow, StepPlan
from rootlace.runtime.scheduler.masks import Constraint, SampleRows
from rootlace.runtime.scheduler.request import InFlightStep, RequestState

_NONE = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 3), np.int32)
_NO_FEEDS = np.empty((0, 2), np.int32)
_ROW, _EPOCH = attrgetter("row"), attrgetter("epoch")
_LAST, _COMPUTED, _RID = attrgetter("last"), attrgetter("computed"), attrgetter("rid")


# Order --------------------------------------------------------------------------------------------


def depth_first(sequences: list[RequestState]) -> list[RequestState]:
    """Order `sequences` depth first; siblings, and sequences at one node, keep the given order.
    Paths that share a node are then neighbours, at every depth. Costs O(nodes locked)."""
    ending: dict[Node, list[RequestState]] = {}
    children: dict[Node, list[Node]] = {}
    roots: list[Node] = []
    alone: list[RequestState] = []
    for sequence in sequences:
        node = sequence.node
        if node is None:
            alone.append(sequence)
            continue
        ending.setdefault(node, []).append(sequence)
        if node in children:
            continue
        children[node] = []
        while node.parent is not None:
            child, node = node, node.parent
            if node in children:
                children[node].append(child)
                break
            children[node] = [child]
        else:
            roots.append(node)
    ordered: list[RequestState] = []
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        ordered.extend(ending.get(node, ()))
        stack.extend(reversed(children[node]))
    return ordered + alone


# Decode rows --------------------------------------------------------------------------------------


_SPARE_COLUMNS = 32
"""Spare columns of block tables: after this many more blocks per row the tables grow."""


@dataclass(slots=True)
class DecodeLayout:
    """Decode rows: one token of each of R sequences, in the order of the rows. The steps before and
    after share `block_tables`: entries behind a row's own blocks change."""

    sequences: list[RequestState]
    token_ids: np.ndarray  # [R] int32, arbitrary where the token is pending
    positions: np.ndarray  # [R] int32
    slots: np.ndarray  # [R] int64
    row_start: np.ndarray  # [R+1] int32: 0, 1, ... R
    block_tables: np.ndarray  # [R, W] int32
    rids: np.ndarray  # [R] int64


class DecodeRows:
    """Layout of decode rows, which reuses the arrays of the step before.

    A decoding sequence gains a token per step, and at times a block at the end of its table. So
    while the same sequences decode, a step's arrays follow from the step before, in time
    independent of the context.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._ready: list[RequestState] = []
        self._order: list[RequestState] = []
        self._version = -1
        self._last = self._none = _layout([], block_size)
        self._inside = 0
        """Number of further steps in which no row begins a block."""

    def lay_out(
        self, ready: list[RequestState], order: list[RequestState], version: int
    ) -> DecodeLayout:
        """Lay out the rows of `ready`, whose `computed` counts this step's token already.

        Call this method for every step. `order` contains `ready` and perhaps other sequences, in
        the order of the rows. `order` is a new object whenever the order changes. `version` changes
        with every change of a table other than at its end, and of `computed` other than by a step's
        token.
        """
        if not ready:
            self._ready = ready
            return self._none
        reusable = order is self._order and version == self._version and ready == self._ready
        self._ready, self._order, self._version = ready, order, version
        following = self._following() if reusable else None
        if following is None:
            if len(ready) < len(order):
                members = set(ready)
                order = [sequence for sequence in order if sequence in members]
            following = _layout(order, self._size)
            inside = following.positions % self._size
            self._inside = self._size - 1 - int(inside.max(initial=0))
        self._last = following
        return following

    def _following(self) -> DecodeLayout | None:
        """Return the layout of the following step; None if the tables lack columns."""
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
            self._inside = size - 1 - int(inside.max(initial=0))  # perhaps no rows
        token_ids = np.fromiter(map(_LAST, last.sequences), np.int32, len(last.sequences))
        return DecodeLayout(
            last.sequences,
            token_ids,
            positions,
            slots,
            last.row_start,
            last.block_tables,
            last.rids,
        )


def _layout(sequences: list[RequestState], size: int) -> DecodeLayout:
    """Return the layout computed from the sequences alone."""
    count = len(sequences)
    positions = np.fromiter(map(_COMPUTED, sequences), np.int32, count)
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
        np.fromiter(map(_LAST, sequences), np.int32, count),
        positions,
        slots,
        np.arange(len(sequences) + 1, dtype=np.int32),
        tables,
        np.fromiter(map(_RID, sequences), np.int64, count),
    )


# Plan builder -------------------------------------------------------------------------------------


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
    """Constraint of the token sampled behind each of the rows; all rows but the first are drafted.
    """
    row: int = -1
    """The sequence's row in the plan."""


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
    """The step under construction; one after another.

    The builder knows which rows of which block this step writes. So a block shared within the step
    gets each row from the place of the row when copies run (see "Same-step sharing").
    """

    def __init__(self, pool: BlockPool, sample_rows: SampleRows, *, adapters: bool = True) -> None:
        """`adapters`: rows may have adapters."""
        self._pool = pool
        self._block_size = pool.block_size
        self._have_adapters = adapters
        self._sample_rows = sample_rows
        self._decode_rows = DecodeRows(pool.block_size)
        self.decoding: list[RequestState] = []
        """Sequences with one next token, known or pending; the table has the slot."""
        self._clear()

    def _clear(self) -> None:
        """Forget all of a step but `decoding`."""
        self.chunks: list[_Chunk] = []
        self._complete: list[RequestState] = []
        self._flat = 0
        self._copies: list[tuple[int, int, int]] = []
        self._duplicates: list[tuple[np.ndarray, np.ndarray]] = []
        self._origins: dict[int, _Origin] = {}
        self._writers: dict[int, _Chunk] = {}
        """Block -> its writer among the first `_noted` chunks."""
        self._noted = 0
        self._guards: list[np.ndarray] = []

    # ------------------------------------------------------------ collecting

    def add_chunk(
        self,
        sequence: RequestState,
        count: int,
        *,
        complete: bool,
        scores: tuple[int, int],
        pooled: tuple[int, int] = (0, 0),
    ) -> None:
        """Add `count` tokens from `sequence.computed` on; their blocks are in the table.

        `complete`: the chunk ends before a sample, or before the sequence's end. Tokens scores[0]
        up to scores[1] get log-probabilities. Tokens pooled[0] up to pooled[1] return hidden
        states.
        """
        start, size = sequence.computed, self._block_size
        sample = complete and sequence.ending is None
        if complete and not sample:
            self._complete.append(sequence)
        end = start + count
        # Copied: storing the chunk may replace written blocks with the tree's.
        table = sequence.table[: -(-end // size)].copy()
        self.chunks.append(
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
        self.chunks.append(
            _Chunk(
                *(sequence, start, count, self._flat, table, False),
                score_start=0,
                score_stop=0,
                draft=constraints,
            )
        )
        self._flat += count

    def share_rows(self, source: int, target: int, count: int) -> None:
        """Fill the first `count` rows of block `target` from `source` before attention runs."""
        size = self._block_size
        # Computed on demand: few steps share blocks that they write to.
        for chunk in self.chunks[self._noted :]:
            self._writers.update(dict.fromkeys(chunk.table[chunk.start // size :].tolist(), chunk))
        self._noted = len(self.chunks)
        # The first row that this step writes, and the flat token of row 0 as if written.
        first_written, flat, writer = count, 0, self._writers.get(source)
        if writer is not None:
            first = int((writer.table == source).argmax()) * size
            first_written = min(max(writer.start - first, 0), count)
            flat = writer.flat + first - writer.start
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
            slots = target * size + np.arange(copied, count)
            self._duplicates.append((duplicates, slots))
        self._origins[target] = _Origin(base, copied, duplicates)

    def drop_later(self, blocks: np.ndarray) -> None:
        """Free `blocks`, which this step writes to, when the plan is complete."""
        self._guards.append(blocks)

    # ------------------------------------------------------------ layout

    def build(
        self, step: int, order: list[RequestState], version: int, *, feeding: bool
    ) -> InFlightStep:
        """Lay the rows out in `order`, which has every row's sequence, and begin another step.

        `version`: see `DecodeRows.lay_out`. `feeding`: a step in flight may supply tokens.
        """
        decode = self._decode_rows.lay_out(self.decoding, order, version)
        if self.chunks:
            flight = self._mixed(step, order, decode, feeding)
        else:
            sequences = decode.sequences
            rows = list(enumerate(sequences))
            samples, wait_for_masks = plain_samples(rows, self._sample_rows)
            plan = StepPlan(
                step=step,
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
                feeds=_feeds(sequences, range(len(sequences))) if feeding else _NO_FEEDS,
                adapters=self._adapters(sequences) if self._have_adapters else _NO_TOKENS,
                rids=decode.rids,
            )
            sampled = list(zip(sequences, map(_EPOCH, sequences), strict=True))
            flight = InFlightStep(plan, sequences, sampled, [], [])
        for at, (sequence, _) in enumerate(flight.sampled):
            sequence.pending += 1
            sequence.sampled_at = at
        return flight

    def _mixed(
        self, step: int, order: list[RequestState], decode: DecodeLayout, feeding: bool
    ) -> InFlightStep:
        size, chunks = self._block_size, self.chunks
        members = set(decode.sequences)
        width = int(decode.positions.max(initial=-1)) // size + 1
        for chunk in chunks:
            members.add(chunk.sequence)
            width = max(width, len(chunk.table))
        sequences = order
        if len(members) < len(order):
            sequences = [sequence for sequence in order if sequence in members]
        row_of = dict(zip(sequences, range(len(sequences)), strict=True))
        decoding = np.fromiter(map(row_of.__getitem__, decode.sequences), np.int64)
        counts = np.ones(len(sequences), np.int32)
        for chunk in chunks:
            chunk.row = row_of[chunk.sequence]
            counts[chunk.row] = chunk.count
        chunks.sort(key=_ROW)
        row_start = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=row_start[1:])
        total = int(row_start[-1])
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
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            row = chunk.row
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
        rows, sample_rows = sorted(sampling), self._sample_rows
        sampled = list(map(sequences.__getitem__, rows))
        pairs = list(zip(rows, sampled, strict=True))
        samples, wait_for_masks = plain_samples(pairs, sample_rows)
        for chunk in chunks:
            if chunk.draft is not None:
                samples += sample_rows.drafted(chunk.row, chunk.sequence, chunk.draft)
                sampled += [chunk.sequence] * chunk.count
        masks = sample_rows.masks
        if masks.drafts or masks.drafts_handed:
            wait_for_masks = masks.start_drafts(wait_for_masks)
        duplicate_tokens, duplicate_slots = _NO_TOKENS, _NONE
        if self._duplicates:
            written, targets = zip(*self._duplicates, strict=True)
            duplicate_tokens = remap[np.concatenate(written)].astype(np.int32)
            duplicate_slots = np.concatenate(targets)
        plan = StepPlan(
            step=step,
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
            feeds=_feeds(decode.sequences, flats.tolist()) if feeding else _NO_FEEDS,
            adapters=self._adapters(sequences) if self._have_adapters else _NO_TOKENS,
            rids=np.fromiter(map(_RID, sequences), np.int64, len(sequences)),
        )
        flight = InFlightStep(
            plan=plan,
            rows=sequences,
            sampled=list(zip(sampled, map(_EPOCH, sampled), strict=True)),
            scored=scored,
            complete=self._complete,
            pooled=pooling,
        )
        for blocks in self._guards:  # held while planning
            self._pool.drop(blocks, pinned=True)
        self._clear()
        return flight

    def _adapters(self, sequences: list[RequestState]) -> np.ndarray:
        """Return the adapter index of each row."""
        adapters = [sequence.adapter for sequence in sequences]
        return np.array(adapters, np.int32) if max(adapters, default=-1) >= 0 else _NO_TOKENS


def _feeds(sequences: list[RequestState], flats: Iterable[int]) -> np.ndarray:
    """Return the `feeds` of decode rows at the flat tokens `flats`."""
    feeds = [
        (flat, sequence.sampled_at)
        for flat, sequence in zip(flats, sequences, strict=True)
        if sequence.computed > sequence.length
    ]
    return np.array(feeds, np.int32) if feeds else _NO_FEEDS


def plain_samples(
    rows: list[tuple[int, RequestState]], sample_rows: SampleRows
) -> tuple[list[SampleRow], Callable[[], None] | None]:
    """Return `SampleRows.start`; the rows of most steps are made here."""
    samples: list[SampleRow] = []
    for index, s in rows:
        if s.pending or s.outputs < s.params.min_tokens:
            return sample_rows.start(rows)
        mask, matcher = None, s.matcher
        if matcher is not None and (sample_rows.automata or (mask := matcher.place.mask) is None):
            return sample_rows.start(rows)
        samples.append(
            SampleRow(index, s.params, s.tokens[: s.length], s.prompt_len, mask, simple=s.simple)
        )
    return samples, None
