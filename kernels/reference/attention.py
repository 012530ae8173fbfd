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
from typing import NamedTuple

import torch

from rootlace.kernels.interface import KVCodes, KVScales, KVScaling
from rootlace.kernels.reference.attention_plan import AttentionPlan, SharedGroup
from rootlace.kernels.reference.fp8 import from_e4m3
from rootlace.kernels.reference.kv_codes import dequantise


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
    keys, values = _stored(q, k_cache, v_cache, scales)
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
        k = keys.read(group.slots).view(shape).transpose(1, 2)
        v = values.read(group.slots).view(shape).transpose(1, 2)
        query = q[group.start : group.start + group.count]
        query = query.reshape(group.count, kv_heads, heads // kv_heads, dim)
        out, lse = _attend(query, k, v, group.mask, scoring, keep_lse)
        outs.append(out.reshape(group.count, heads, dim))
        if lse is not None:
            sums.append(lse.reshape(group.count, heads))

    for row in plan.extend:
        k = keys.read(row.slots).transpose(0, 1).unsqueeze(0)
        v = values.read(row.slots).transpose(0, 1).unsqueeze(0)
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


class _Plain(NamedTuple):
    """Keys or values of one layer: slots [B * S, Nk, D]."""

    slots: torch.Tensor

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """[M] -> [M, Nk, D]."""
        return self.slots.index_select(0, index)


class _EightBits(NamedTuple):
    """The same in e4m3, with scales float32 [Nk]."""

    slots: torch.Tensor
    scale: torch.Tensor

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """[M] -> float32 [M, Nk, D]."""
        # torch does not gather float8 on every device.
        bits = self.slots.view(torch.uint8).index_select(0, index)
        return from_e4m3(bits.view(self.slots.dtype), self.scale)


class _Integers(NamedTuple):
    """The same as integers: slots uint8 [B * S, W]."""

    slots: torch.Tensor
    codes: KVCodes
    dim: int
    dtype: torch.dtype

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """[M] -> [M, Nk, D] in `dtype`."""
        rows = self.slots.index_select(0, index)
        return dequantise(rows, self.codes.bits, self.codes.heads, self.dim, self.dtype)


_Stored = _Plain | _EightBits | _Integers


def _stored(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScaling | None
) -> tuple[_Stored, _Stored]:
    """Keys and values [B, S, Nk, D], or rows of bytes [B, S, 1, W], of one layer."""
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if scales is None:
        return _Plain(k), _Plain(v)
    if isinstance(scales, KVCodes):
        dim, dtype = q.shape[2], q.dtype
        return (
            _Integers(k.flatten(1), scales, dim, dtype),
            _Integers(v.flatten(1), scales, dim, dtype),
        )
    return _EightBits(k, scales.k), _EightBits(v, scales.v)


def _attend_shared(
    q: torch.Tensor, keys: _Stored, values: _Stored, run: SharedGroup, scoring: _Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a run are queries of one attention call. q [M, Nq, D] -> [M, Nq, D], [M, Nq]."""
    count, heads, dim = q.shape
    k = keys.read(run.slots).transpose(0, 1).unsqueeze(0)
    v = values.read(run.slots).transpose(0, 1).unsqueeze(0)
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
