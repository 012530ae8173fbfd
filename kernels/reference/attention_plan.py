"""Host side of the reference attention: rows become groups that one dense attention call handles.

Rows with one new token (decode) are batched. On a CPU the tokens of rows with a few new ones (text
that a constraint forces) are batched with them, each as if it were a row: a call costs more there
than reading a context again, and long contexts are shared like any. Blocks that neighbours have in
common are read once for all of them (`shared_prefix`); what is left of each row is sorted by
length, cut into groups whose padding is small and whose gathered keys and values stay in the
processor's cache. A row with more new tokens (extend) is a group of its own, in chunks of queries,
so that a long prompt neither needs a [T, T] mask nor computes the half above the diagonal.

Padding repeats a slot of the row itself: a slot nobody has written is never read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.reference.shared_prefix import SharedRun, shared_runs

QUERY_CHUNK = 256
"""Queries per attention call of an extend row."""
GATHER_BYTES = 1 << 20
"""Keys and values that one decode group gathers, at most (unless a single row needs more)."""
PADDING = 1.25
"""Gathered slots of a decode group per slot really needed, at most."""
SMALL_GROUP = 1024
"""Slots below which a group may be padded freely: there the cost is that of the calls."""

SHORT_EXTEND = 8
"""On a CPU a row with no more new tokens, if it is not alone, counts as so many decode rows."""


@dataclass(frozen=True)
class DecodeGroup:
    """`count` rows of one token each: the (ordered) tokens `start : start + count`."""

    start: int
    count: int
    slots: torch.Tensor  # [count * S] int64
    mask: torch.Tensor | None  # [count, 1, 1, S] additive, None where no row is padded


@dataclass(frozen=True)
class SharedGroup:
    """The flat tokens `start : stop`, one per row, all see the keys in `slots`."""

    start: int
    stop: int
    slots: torch.Tensor  # [S] int64


@dataclass(frozen=True)
class ExtendChunk:
    """Queries `start : stop` (ordered tokens) over the gathered keys `first : last`."""

    start: int
    stop: int
    first: int
    last: int
    mask: torch.Tensor  # [stop - start, last - first] additive


@dataclass(frozen=True)
class ExtendRow:
    slots: torch.Tensor  # [S] int64
    chunks: list[ExtendChunk]


@dataclass(frozen=True)
class AttentionPlan:
    """`order` permutes the step's tokens so that every group is a slice; None: already so.

    What `shared` says comes on top of what `decode` says of the same tokens, to be merged.
    """

    order: torch.Tensor | None  # [T] int64: ordered token i is flat token order[i]
    restore: torch.Tensor | None  # [T] int64, the inverse
    decode: list[DecodeGroup]
    extend: list[ExtendRow]
    shared: list[SharedGroup]

    @property
    def arrays(self) -> list[np.ndarray]:
        """None: everything is where it is needed."""
        return []

    def bind(self, tensors: list[torch.Tensor]) -> AttentionPlan:
        return self


def plan_attention(
    batch: AttentionBatch, window: int | None, rows: int | None = None
) -> AttentionPlan:
    """Plan one step for layers with this sliding window (None: full attention).

    Raises ValueError for `rows`: what is launched here depends on the step.
    """
    if rows is not None:
        raise ValueError("the reference attention cannot be captured")
    row_start = batch.row_start.astype(np.int64)
    lengths = np.diff(row_start)
    if batch.device.type == "cpu" and len(lengths) > 1:
        short = (lengths > 1) & (lengths <= SHORT_EXTEND)
        if short.any():
            batch = _one_row_per_token(batch, lengths, short)
            row_start = batch.row_start
            lengths = np.diff(row_start)
    context = batch.context_len.astype(np.int64)
    # The first position any new token of the row may see; later: that the row sees by itself.
    first = np.zeros_like(context)
    if window is not None:
        first = np.maximum(context - lengths - (window - 1), 0)
    shared = []
    if batch.device.type == "cpu":  # elsewhere the reference has no log-sum-exp at little cost
        decoding = (lengths == 1) & (first == 0)
        for run in shared_runs(batch.block_tables, context, decoding, batch.block_size):
            shared.append(_shared_group(batch, run))
            first[run.begin : run.end] = run.high * batch.block_size
    span = context - first

    decode_rows = np.flatnonzero(lengths == 1)
    decode_rows = decode_rows[np.argsort(span[decode_rows], kind="stable")]
    extend_rows = np.flatnonzero(lengths > 1)
    order = np.concatenate(
        [row_start[decode_rows], *(np.arange(row_start[r], row_start[r + 1]) for r in extend_rows)]
    )
    ordered = bool((order == np.arange(len(order))).all())

    decode = []
    start = 0
    for group in _group(decode_rows, span, _gather_limit(batch)):
        decode.append(_decode_group(batch, group, start, first, span))
        start += len(group)
    extend = []
    mask = _extend_mask(batch, extend_rows, lengths, span, window)
    for row in extend_rows.tolist():
        extend.append(
            _extend_row(batch, row, start, int(lengths[row]), int(first[row]), window, mask)
        )
        start += int(lengths[row])

    if ordered:
        return AttentionPlan(None, None, decode, extend, shared)
    restore = np.empty_like(order)
    restore[order] = np.arange(len(order))
    return AttentionPlan(_upload(order, batch), _upload(restore, batch), decode, extend, shared)


def _one_row_per_token(
    batch: AttentionBatch, lengths: np.ndarray, rows: np.ndarray
) -> AttentionBatch:
    """The same tokens, where each of those of `rows` (bool [R]) is a row of its own."""
    parts = np.where(rows, lengths, 1)
    row = np.repeat(np.arange(len(parts)), parts)
    behind = np.cumsum(parts)[row] - 1 - np.arange(len(row))
    starts = np.zeros(len(row) + 1, np.int64)
    np.cumsum(np.where(rows, 1, lengths)[row], out=starts[1:])
    return replace(
        batch,
        row_start=starts,
        context_len=batch.context_len[row] - behind,
        block_tables=batch.block_tables[row],
    )


def _shared_group(batch: AttentionBatch, run: SharedRun) -> SharedGroup:
    positions = np.arange(run.low * batch.block_size, run.high * batch.block_size)
    slots = _slots(batch, np.asarray(run.begin), positions)
    start, stop = int(batch.row_start[run.begin]), int(batch.row_start[run.end])
    return SharedGroup(start, stop, _upload(slots, batch))


def _gather_limit(batch: AttentionBatch) -> int:
    """Slots a decode group may gather."""
    slot_bytes = 2 * batch.num_kv_heads * batch.head_dim * batch.dtype.itemsize
    limit = GATHER_BYTES if batch.device.type == "cpu" else 256 * GATHER_BYTES
    return max(limit // slot_bytes, 1)


def _group(rows: np.ndarray, span: np.ndarray, limit: int) -> list[np.ndarray]:
    """Cut rows, sorted by span, into runs that pad little and gather at most `limit` slots."""
    groups = []
    begin, needed = 0, 0
    for i, row in enumerate(rows):
        width = int(span[row])  # the widest so far
        padded = width * (i - begin + 1)
        too_big = padded > limit or padded > max(PADDING * (needed + width), SMALL_GROUP)
        if i > begin and too_big:
            groups.append(rows[begin:i])
            begin, needed = i, 0
        needed += width
    if begin < len(rows):
        groups.append(rows[begin:])
    return groups


def _decode_group(
    batch: AttentionBatch, rows: np.ndarray, start: int, first: np.ndarray, span: np.ndarray
) -> DecodeGroup:
    widths = span[rows]
    width = int(widths[-1])
    offsets = np.arange(width)
    positions = first[rows][:, None] + np.minimum(offsets, widths[:, None] - 1)
    slots = _slots(batch, rows[:, None], positions)
    mask = None
    if int(widths[0]) != width:
        bias = np.where(offsets < widths[:, None], np.float32(0), np.float32("-inf"))
        mask = torch.from_numpy(bias).to(batch.device, batch.dtype).view(len(rows), 1, 1, width)
    return DecodeGroup(start, len(rows), _upload(slots.reshape(-1), batch), mask)


def _extend_mask(
    batch: AttentionBatch,
    rows: np.ndarray,
    lengths: np.ndarray,
    span: np.ndarray,
    window: int | None,
) -> torch.Tensor:
    """The causal mask aligned at its lower right corner: every chunk's mask is a corner of it."""
    if not len(rows):
        return torch.empty(0, 0)
    height = min(int(lengths[rows].max()), QUERY_CHUNK)
    width = int(span[rows].max())
    query = torch.arange(height, device=batch.device).unsqueeze(1) - (height - 1)
    key = torch.arange(width, device=batch.device).unsqueeze(0) - (width - 1)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(height, width, dtype=batch.dtype, device=batch.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _extend_row(
    batch: AttentionBatch,
    row: int,
    start: int,
    length: int,
    first: int,
    window: int | None,
    mask: torch.Tensor,
) -> ExtendRow:
    context = int(batch.context_len[row])
    slots = _slots(batch, np.asarray(row), np.arange(first, context))
    chunks = []
    for begin in range(0, length, QUERY_CHUNK):
        end = min(begin + QUERY_CHUNK, length)
        last = context - length + end - first
        low = 0
        if window is not None:
            low = max(last - (end - begin) - (window - 1), 0)
        corner = mask[mask.shape[0] - (end - begin) :, mask.shape[1] - (last - low) :]
        chunks.append(ExtendChunk(start + begin, start + end, low, last, corner))
    return ExtendRow(_upload(slots, batch), chunks)


def _slots(batch: AttentionBatch, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    size = batch.block_size
    blocks = batch.block_tables[rows, positions // size].astype(np.int64)
    return blocks * size + positions % size


def _upload(values: np.ndarray, batch: AttentionBatch) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if batch.device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(batch.device, non_blocking=True)
