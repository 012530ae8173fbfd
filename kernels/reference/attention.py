"""Attention over a paged KV cache, decode and extend rows mixed (grouped-query attention).

For query head h of a token at position p, with key head g = h // (Nq / Nk):

    s_j = scale * q . k[j, g],   with a soft cap c: s_j = c * tanh(scale * q . k[j, g] / c)
    out = sum_j softmax_j(s_j) * v[j, g],   max(0, p - window + 1) <= j <= p
    lse = log sum_j exp(s_j)

where scale is 1 / sqrt(D) unless given. Keys and values of an fp8 cache are the stored numbers
times their head's scale. Those of a cache of integers are the numbers that `kv_cache` reads, in the
queries' dtype. Scores and softmax are in float32; over an fp8 cache all operations are. Grouped
queries share the gathered keys: the queries of one token are laid out as queries of the same key
head, without copies of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from rootlace.kernels.interface import AttentionBatch, HostPlan, KVCodes, KVScales, KVScaling
from rootlace.kernels.reference.kv_cache import dequantise

# Fp8 ----------------------------------------------------------------------------------------------
#
# 8-bit floats of a KV cache: e4m3 (4 bits of exponent with bias 7, 3 of mantissa), read back.


def from_e4m3(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Convert float8_e4m3fn [..., N, D] times scale float32 [N] -> float32 [..., N, D].

    The bits move to float16's places of sign, exponent and mantissa. That is the same number, 2^8
    times too small (its bias is 15), also for subnormal numbers. On a CPU this takes a tenth of the
    time of torch's own conversion. NaN would read as 480, but no finite or infinite value is stored
    as NaN.
    """
    bits = stored.view(torch.int8).to(torch.int16)  # the sign bit goes to the upper byte
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16).float().mul_(scale.unsqueeze(-1) * 256.0)


# Attention plan -----------------------------------------------------------------------------------
#
# Host side of the reference attention: each group of rows is one dense attention call.
#
# Rows with one new token (decode) are sorted by length and cut into groups. A group has little
# padding, and its gathered keys and values stay in the processor's cache. A row with more new
# tokens (extend) is cut into chunks of queries, a group each. So a long prompt neither needs a
# [T, T] mask nor computes the half above the diagonal.
#
# Padding repeats a slot of the row itself, so unwritten slots are never read.


QUERY_CHUNK = 256
"""Queries per attention call of an extend row."""
GATHER_BYTES = 1 << 20
"""Maximum bytes that one decode group gathers (unless a single row needs more)."""
PADDING = 1.25
"""Maximum ratio of a decode group's gathered slots to needed slots."""
SMALL_GROUP = 1024
"""Slots below which a group may be padded freely, since calls dominate its cost."""


class Group(msgspec.Struct, frozen=True):
    """Group of `rows` rows with `count` queries each: the (ordered) tokens from `start` on. All
    rows read equally many slots."""

    start: int
    rows: int
    count: int
    slots: torch.Tensor  # [rows * S] int64
    mask: torch.Tensor | None  # additive, as [rows, 1, count, S]; None: nothing is hidden


@dataclass(frozen=True)
class AttentionPlan(HostPlan):
    """Plan of a step. `order` permutes the step's tokens so that every group is a slice; None: the
    tokens are in that order already. The tensors are on their device already."""

    order: torch.Tensor | None  # [T] int64: ordered token i is flat token order[i]
    restore: torch.Tensor | None  # [T] int64, the inverse
    groups: list[Group]


def plan_attention(
    batch: AttentionBatch, window: int | None, rows: int | None = None
) -> AttentionPlan:
    """Plan one step for layers with this sliding window (None: full attention). Raises ValueError
    for `rows`: the launches of this plan depend on the step."""
    if rows is not None:
        raise ValueError("the reference attention cannot be captured")
    row_start = batch.row_start.astype(np.int64)
    lengths = np.diff(row_start)
    context = batch.context_len.astype(np.int64)
    # First position that a row's only new token sees.
    first = np.zeros_like(context) if window is None else np.maximum(context - window, 0)
    span = context - first

    decode_rows = np.flatnonzero(lengths == 1)
    decode_rows = decode_rows[np.argsort(span[decode_rows], kind="stable")]
    extend_rows = np.flatnonzero(lengths > 1)
    order = np.concatenate(
        [row_start[decode_rows], *(np.arange(row_start[r], row_start[r + 1]) for r in extend_rows)]
    )
    groups: list[Group] = []
    start = 0
    for run in _runs(decode_rows, span, _gather_limit(batch)):
        groups.append(_decode_group(batch, run, start, first, span))
        start += len(run)
    if len(extend_rows):
        mask = _extend_mask(batch, int(lengths.max()), int(context[extend_rows].max()), window)
        for row in extend_rows.tolist():
            groups += _extend_groups(batch, row, start, window, mask)
            start += int(lengths[row])

    if (order == np.arange(len(order))).all():
        return AttentionPlan(None, None, groups)
    restore = np.empty_like(order)
    restore[order] = np.arange(len(order))
    return AttentionPlan(_upload(order, batch), _upload(restore, batch), groups)


def _gather_limit(batch: AttentionBatch) -> int:
    """Return the number of slots that a decode group may gather."""
    slot_bytes = 2 * batch.num_kv_heads * batch.head_dim * batch.dtype.itemsize
    limit = GATHER_BYTES if batch.device.type == "cpu" else 256 * GATHER_BYTES
    return max(limit // slot_bytes, 1)


def _runs(rows: np.ndarray, span: np.ndarray, limit: int) -> list[np.ndarray]:
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
) -> Group:
    widths = span[rows]
    width = int(widths[-1])
    offsets = np.arange(width)
    positions = first[rows][:, None] + np.minimum(offsets, widths[:, None] - 1)
    slots = _slots(batch, rows[:, None], positions)
    mask = None
    if int(widths[0]) != width:
        bias = np.where(offsets < widths[:, None], np.float32(0), np.float32("-inf"))
        mask = torch.from_numpy(bias).to(batch.device, batch.dtype).view(len(rows), 1, 1, width)
    return Group(start, len(rows), 1, _upload(slots.reshape(-1), batch), mask)


def _extend_mask(
    batch: AttentionBatch, length: int, context: int, window: int | None
) -> torch.Tensor:
    """Return the causal mask for rows of at most `length` new tokens and `context` tokens in all.
    It is aligned at its lower right corner: every chunk's mask is a corner of it."""
    height = min(length, QUERY_CHUNK)
    width = context if window is None else min(context, height + window - 1)
    query = torch.arange(height, device=batch.device).unsqueeze(1) - (height - 1)
    key = torch.arange(width, device=batch.device).unsqueeze(0) - (width - 1)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(height, width, dtype=batch.dtype, device=batch.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _extend_groups(
    batch: AttentionBatch, row: int, start: int, window: int | None, mask: torch.Tensor
) -> Iterator[Group]:
    """Yield the chunks of a row."""
    length = int(batch.row_start[row + 1] - batch.row_start[row])
    for begin in range(0, length, QUERY_CHUNK):
        count = min(QUERY_CHUNK, length - begin)
        stop = int(batch.context_len[row]) - length + begin + count
        first = 0 if window is None else max(stop - count - (window - 1), 0)
        slots = _slots(batch, np.asarray(row), np.arange(first, stop))
        corner = mask[mask.shape[0] - count :, mask.shape[1] - (stop - first) :]
        yield Group(start + begin, 1, count, _upload(slots, batch), corner[None, None])


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
    """Parameters of scores, as in `interface.PagedAttention`."""

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
    """Compute `interface.PagedAttention`: q [T, Nq, D] -> ([T, Nq, D], float32 [T, Nq] or None)."""
    heads, dim = q.shape[1:]
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    scoring = _Scoring(scale, soft_cap)
    of_keys, of_values = (scales.k, scales.v) if isinstance(scales, KVScales) else (None, None)
    keys = _reader(q, k_cache, scales, of_keys)
    values = _reader(q, v_cache, scales, of_values)
    dtype = q.dtype
    if isinstance(scales, KVScales):
        q = q.float()
    if plan.order is not None:
        q = q.index_select(0, plan.order)
    outs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []

    for group in plan.groups:
        shape = (group.rows, -1, kv_heads, dim)
        k = keys(group.slots).view(shape).transpose(1, 2)
        v = values(group.slots).view(shape).transpose(1, 2)
        query = q[group.start : group.start + group.rows * group.count]
        query = query.view(group.rows, group.count, heads, dim).transpose(1, 2)
        if group.count == 1:
            query = query.reshape(group.rows, kv_heads, -1, dim)
        out, lse = _attend(query, k, v, group.mask, scoring, want_lse)
        out = out.reshape(group.rows, heads, group.count, dim)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        if lse is not None:
            lse = lse.reshape(group.rows, heads, group.count)
            sums.append(lse.transpose(1, 2).flatten(0, 1))

    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    total = torch.cat(sums) if want_lse else None
    if plan.restore is not None:
        out = out.index_select(0, plan.restore)
        total = total.index_select(0, plan.restore) if total is not None else None
    return out.to(dtype), total


Read = Callable[[torch.Tensor], torch.Tensor]
"""Function from slots [M] to a layer's keys or values [M, Nk, D]; float32 for an fp8 cache."""


def _reader(
    q: torch.Tensor, cache: torch.Tensor, scales: KVScaling | None, scale: torch.Tensor | None
) -> Read:
    """Return a reader of keys or values [B, S, Nk, D], or of rows of bytes [B, S, 1, W]. `q`: the
    queries. `scale`: factors of fp8 heads [Nk]."""
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


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: _Scoring,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend: q [B, Nq, M, D]; k, v [B, Nk, S, D]; mask like [B, 1, M, S] -> [B, Nq, M, D], [B, Nq,
    M]."""
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    if scoring.soft_cap > 0.0:
        return _attend_capped(q, k, v, mask, scoring)
    if q.device.type == "cpu":
        # The fused kernel itself rather than scaled_dot_product_attention: that one takes the
        # unfused path for bfloat16 with grouped queries, and does not return the log-sum-exp.
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `_attend` does, by the formula: no fused kernel has a soft cap."""
    scores = _scores(q, k, mask, scoring)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp_(scores - lse.unsqueeze(-1))
    out = (weights @ v.float().unsqueeze(2)).flatten(1, 2)
    return out.to(q.dtype), lse.flatten(1, 2)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> torch.Tensor:
    """Return scores: q [B, Nq, M, D]; k [B, Nk, S, D]; mask -> float32 [B, Nk, Nq / Nk, M, S]."""
    kv_heads, dim = k.shape[1], k.shape[3]
    grouped = q.unflatten(1, (kv_heads, -1)).float()
    scores = grouped @ k.float().transpose(-1, -2).unsqueeze(2)
    scores *= 1.0 / math.sqrt(dim) if scoring.scale is None else scoring.scale
    if scoring.soft_cap > 0.0:
        scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if mask is not None:
        scores += mask.unsqueeze(2)
    return scores
