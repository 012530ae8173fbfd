"""Attention over a paged KV cache, decode and extend rows mixed (grouped-query attention).

For query head h of a token at position p, with key head g = h // (Nq / Nk):

    s_j = scale * q . k[j, g],   with a soft cap c: s_j = c * tanh(scale * q . k[j, g] / c)
    out = sum_j softmax_j(s_j) * v[j, g],   max(0, p - window + 1) <= j <= p
    lse = log sum_j exp(s_j)

where scale is 1 / sqrt(D) unless told. Keys and values of an fp8 cache are what is stored times
their head's scale; those of a cache of integers are what `kv_codes` reads, in the queries' type.
Scores and softmax are in float32; over an fp8 cache everything is. Grouped
queries share the gathered keys: they are laid out as further queries of the same key head, nothing
is repeated. Rows that share a prefix share its gathered keys in the same way; the parts are merged
by their log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import AttentionBatch, HostPlan, KVCodes, KVScales, KVScaling
from rootlace.kernels.reference.kv_cache import dequantise

# Fp8 ----------------------------------------------------------------------------------------------
#
# 8-bit floats of a KV cache: e4m3 (4 bits of exponent with bias 7, 3 of mantissa), read back.


def from_e4m3(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [..., N, D] times scale float32 [N] -> float32 [..., N, D].

    The bits are moved to where float16 has sign, exponent and mantissa, which is the same number
    2^8 times too small (its bias is 15), subnormal ones too; on a CPU that takes a tenth of torch's
    own conversion. What is not a number would read as 480, but no finite or infinite value is
    stored as that.
    """
    bits = stored.view(torch.int8).to(torch.int16)  # the sign bit goes to the upper byte
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16).float().mul_(scale.unsqueeze(-1) * 256.0)


# Shared prefix ------------------------------------------------------------------------------------
#
# Which decode rows have leading blocks in common, so that these are read once for all of them.
#
# A step's rows are in depth-first order of the prefix tree: rows that share blocks are neighbours,
# at every depth. The runs found here are nested as the tree is; attention over a row's context is
# then attention over the parts that its runs cover and over the rest, merged by their log-sum-exps
# (cascade attention; Ye et al. 2024, "Cascade Inference"; Juravsky et al. 2024, arXiv:2402.05099).


MIN_SAVED = 1024
"""Slots that sharing must save a run: below, another call costs more than reading them again."""

FIRST_LOOK = 32
"""Blocks of neighbouring tables that are compared at first; then twice as many, and so on."""


class SharedRun(msgspec.Struct, frozen=True):
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
    return chosen_runs(
        tables,
        whole_blocks(context, decoding, block_size),
        lambda run: (run.end - run.begin - 1) * (run.high - run.low) * block_size >= MIN_SAVED,
    )


def whole_blocks(context: np.ndarray, decoding: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks a row may share: full ones, and not with its last position in them. [R]."""
    return np.where(decoding, (context - 1) // block_size, 0)


def chosen_runs(
    tables: np.ndarray, whole: np.ndarray, worth: Callable[[SharedRun], bool]
) -> list[SharedRun]:
    """The runs that are `worth` it, outer before inner; what a refused run has in common is left to
    the runs inside it. At most `whole[r]` blocks of row r count."""
    runs: list[SharedRun] = []
    around: list[tuple[int, int]] = []  # (end, blocks covered) of the runs that hold this one
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
    """Leading blocks that row r and row r + 1 have in common, at most `whole` of each, [R-1].

    Most neighbours differ early, so little of the tables is read unless much is in common.
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
    """Maximal runs of rows with common blocks: (begin, end, how many), depth first.

    The intervals of the longest-common-prefix array, found with one stack in linear time.
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


# Attention plan -----------------------------------------------------------------------------------
#
# Host side of the reference attention: rows become groups that one dense attention call handles.
#
# Rows with one new token (decode) are batched. On a CPU the tokens of rows with a few new ones
# (text that a constraint forces) are batched with them, each as if it were a row: a call costs more
# there than reading a context again, and long contexts are shared like any. Blocks that neighbours
# have in common are read once for all of them (`shared_prefix`); what is left of each row is sorted
# by length, cut into groups whose padding is small and whose gathered keys and values stay in the
# processor's cache. A row with more new tokens (extend) is a group of its own, in chunks of
# queries, so that a long prompt neither needs a [T, T] mask nor computes the half above the
# diagonal.
#
# Padding repeats a slot of the row itself: a slot nobody has written is never read.


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


class DecodeGroup(msgspec.Struct, frozen=True):
    """`count` rows of one token each: the (ordered) tokens `start : start + count`."""

    start: int
    count: int
    slots: torch.Tensor  # [count * S] int64
    mask: torch.Tensor | None  # [count, 1, 1, S] additive, None where no row is padded


class SharedGroup(msgspec.Struct, frozen=True):
    """The flat tokens `start : stop`, one per row, all see the keys in `slots`."""

    start: int
    stop: int
    slots: torch.Tensor  # [S] int64


class ExtendChunk(msgspec.Struct, frozen=True):
    """Queries `start : stop` (ordered tokens) over the gathered keys `first : last`."""

    start: int
    stop: int
    first: int
    last: int
    mask: torch.Tensor  # [stop - start, last - first] additive


class ExtendRow(msgspec.Struct, frozen=True):
    slots: torch.Tensor  # [S] int64
    chunks: list[ExtendChunk]


@dataclass(frozen=True)
class AttentionPlan(HostPlan):
    """`order` permutes the step's tokens so that every group is a slice; None: already so. The
    tensors are on their device already.

    What `shared` says comes on top of what `decode` says of the same tokens, to be merged.
    """

    order: torch.Tensor | None  # [T] int64: ordered token i is flat token order[i]
    restore: torch.Tensor | None  # [T] int64, the inverse
    decode: list[DecodeGroup]
    extend: list[ExtendRow]
    shared: list[SharedGroup]


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


# Attention ----------------------------------------------------------------------------------------


class _Scoring(NamedTuple):
    """How scores are made of products: as in `interface.PagedAttention`."""

    scale: float | None
    soft_cap: float


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    scales: KVScaling | None = None,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.PagedAttention`. q [T, Nq, D] -> ([T, Nq, D], float32 [T, Nq] or None)."""
    heads, dim = q.shape[1:]
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    scoring = _Scoring(scale, soft_cap)
    of_keys, of_values = (scales.k, scales.v) if isinstance(scales, KVScales) else (None, None)
    keys = _reader(q, k_cache, scales, of_keys)
    values = _reader(q, v_cache, scales, of_values)
    dtype = q.dtype
    if isinstance(scales, KVScales):
        q = q.float()
    flat = q
    if plan.order is not None:
        q = q.index_select(0, plan.order)
    keep_lse = want_lse or bool(plan.shared)
    outs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []

    for group in plan.decode:
        shape = (group.count, -1, kv_heads, dim)
        k = keys(group.slots).view(shape).transpose(1, 2)
        v = values(group.slots).view(shape).transpose(1, 2)
        query = q[group.start : group.start + group.count]
        query = query.reshape(group.count, kv_heads, heads // kv_heads, dim)
        out, lse = _attend(query, k, v, group.mask, scoring, keep_lse)
        outs.append(out.reshape(group.count, heads, dim))
        if lse is not None:
            sums.append(lse.reshape(group.count, heads))

    for row in plan.extend:
        k = keys(row.slots).transpose(0, 1).unsqueeze(0)
        v = values(row.slots).transpose(0, 1).unsqueeze(0)
        for chunk in row.chunks:
            query = q[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
            part = slice(chunk.first, chunk.last)
            out, lse = _attend(query, k[:, :, part], v[:, :, part], chunk.mask, scoring, keep_lse)
            outs.append(out[0].transpose(0, 1))
            if lse is not None:
                sums.append(lse[0].transpose(0, 1))

    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    total = torch.cat(sums) if keep_lse else None
    if plan.restore is not None:
        out = out.index_select(0, plan.restore)
        total = total.index_select(0, plan.restore) if total is not None else None
    if total is not None and plan.shared:
        out = out.float()  # merged several times, rounded once
        for run in plan.shared:
            rows = slice(run.start, run.stop)
            found = _attend_shared(flat[rows], keys, values, run, scoring)
            _merge(out[rows], total[rows], *found)
    if out.dtype != dtype:
        out = out.to(dtype)
    return out, total if want_lse else None


Read = Callable[[torch.Tensor], torch.Tensor]
"""Keys or values of one layer at slots [M] -> [M, Nk, D]: in float32 of an fp8 cache."""


def _reader(
    q: torch.Tensor, cache: torch.Tensor, scales: KVScaling | None, scale: torch.Tensor | None
) -> Read:
    """Reads keys or values [B, S, Nk, D], or rows of bytes [B, S, 1, W], for queries `q`. `scale`:
    those of fp8 heads [Nk]."""
    slots = cache.flatten(0, 1)
    if scales is None:
        return partial(slots.index_select, 0)

    def read(index: torch.Tensor) -> torch.Tensor:
        # torch does not gather float8 on every device.
        found = slots.view(torch.uint8).index_select(0, index)
        if isinstance(scales, KVCodes):
            return dequantise(found.flatten(1), scales.bits, scales.heads, q.shape[2], q.dtype)
        assert scale is not None
        return from_e4m3(found.view(slots.dtype), scale)

    return read


def _attend_shared(
    q: torch.Tensor, keys: Read, values: Read, run: SharedGroup, scoring: _Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a run are queries of one attention call. q [M, Nq, D] -> [M, Nq, D], [M, Nq]."""
    count, heads, dim = q.shape
    k = keys(run.slots).transpose(0, 1).unsqueeze(0)
    v = values(run.slots).transpose(0, 1).unsqueeze(0)
    kv_heads = k.shape[1]
    query = q.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out, lse = _attend(query, k, v, None, scoring, True)
    assert lse is not None
    out = out.view(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)
    return out, lse.view(kv_heads, count, -1).transpose(0, 1).reshape(count, heads)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add attention over further keys to `out` float32 [M, Nq, D], `lse` [M, Nq], in place."""
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)  # exp(b) / (exp(a) + exp(b))
    out.lerp_(part.float(), weight)
    torch.logaddexp(lse, part_lse, out=lse)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: _Scoring,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [B, Nq, M, D]; k, v [B, Nk, S, D]; mask like [B, 1, M, S] -> [B, Nq, M, D], [B, Nq, M]."""
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    if scoring.soft_cap > 0.0:
        return _attend_capped(q, k, v, mask, scoring)
    if q.device.type == "cpu":
        # The fused kernel itself rather than scaled_dot_product_attention: that one takes the
        # unfused path for bfloat16 with grouped queries, and does not return the log-sum-exp.
        if mask is not None and mask.dim() == 2:
            mask = mask.view(1, 1, *mask.shape) if mask.is_contiguous() else mask[None, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scoring.scale
        )
        return out, lse if want_lse else None
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if not want_lse:
        return out, None
    return out, torch.logsumexp(_scores(q, k, mask, scoring), dim=-1).flatten(1, 2)


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: _Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend`, by the formula: no fused kernel has a soft cap."""
    scores = _scores(q, k, mask, scoring)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp_(scores - lse.unsqueeze(-1))
    out = (weights @ v.float().unsqueeze(2)).flatten(1, 2)
    return out.to(q.dtype), lse.flatten(1, 2)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> torch.Tensor:
    """q [B, Nq, M, D]; k [B, Nk, S, D]; mask -> float32 [B, Nk, Nq / Nk, M, S]."""
    kv_heads, dim = k.shape[1], k.shape[3]
    grouped = q.unflatten(1, (kv_heads, -1)).float()
    scores = grouped @ k.float().transpose(-1, -2).unsqueeze(2)
    scores *= 1.0 / math.sqrt(dim) if scoring.scale is None else scoring.scale
    if scoring.soft_cap > 0.0:
        scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if mask is not None:
        scores += mask.unsqueeze(2) if mask.dim() == 4 else mask
    return scores
