"""Attention over a paged KV cache, decode and extend rows mixed (grouped-query attention).

For query head h of a token at position p, with key head g = h // (Nq / Nk):

    out = sum_j softmax_j(q . k[j, g] / sqrt(D)) * v[j, g],   max(0, p - window + 1) <= j <= p
    lse = log sum_j exp(q . k[j, g] / sqrt(D))

Scores and softmax are in float32. Grouped queries share the gathered keys: they are laid out as
further queries of the same key head, nothing is repeated. Rows that share a prefix share its
gathered keys in the same way; the parts are merged by their log-sum-exps.
"""

from __future__ import annotations

import math

import torch

from rootlace.kernels.reference.attention_plan import AttentionPlan, SharedGroup


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.PagedAttention`. q [T, Nq, D] -> ([T, Nq, D], float32 [T, Nq] or None)."""
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    keys, values = k_cache.view(-1, kv_heads, dim), v_cache.view(-1, kv_heads, dim)
    flat = q
    if plan.order is not None:
        q = q.index_select(0, plan.order)
    keep_lse = want_lse or bool(plan.shared)
    outs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []

    for group in plan.decode:
        shape = (group.count, -1, kv_heads, dim)
        k = keys.index_select(0, group.slots).view(shape).transpose(1, 2)
        v = values.index_select(0, group.slots).view(shape).transpose(1, 2)
        query = q[group.start : group.start + group.count]
        query = query.reshape(group.count, kv_heads, heads // kv_heads, dim)
        out, lse = _attend(query, k, v, group.mask, keep_lse)
        outs.append(out.reshape(group.count, heads, dim))
        if lse is not None:
            sums.append(lse.reshape(group.count, heads))

    for row in plan.extend:
        k = keys.index_select(0, row.slots).transpose(0, 1).unsqueeze(0)
        v = values.index_select(0, row.slots).transpose(0, 1).unsqueeze(0)
        for chunk in row.chunks:
            query = q[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
            part = slice(chunk.first, chunk.last)
            out, lse = _attend(query, k[:, :, part], v[:, :, part], chunk.mask, keep_lse)
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
            _merge(out[rows], total[rows], *_attend_shared(flat[rows], keys, values, run))
        out = out.to(q.dtype)
    return out, total if want_lse else None


def _attend_shared(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: SharedGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a run are queries of one attention call. q [M, Nq, D] -> [M, Nq, D], [M, Nq]."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    k = keys.index_select(0, run.slots).transpose(0, 1).unsqueeze(0)
    v = values.index_select(0, run.slots).transpose(0, 1).unsqueeze(0)
    query = q.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out, lse = _attend(query, k, v, None, True)
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
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [B, Nq, M, D]; k, v [B, Nk, S, D]; mask like [B, 1, M, S] -> [B, Nq, M, D], [B, Nq, M]."""
    if q.device.type == "cpu":
        # The fused kernel itself rather than scaled_dot_product_attention: that one takes the
        # unfused path for bfloat16 with grouped queries, and does not return the log-sum-exp.
        if mask is not None and mask.dim() == 2:
            mask = mask.view(1, 1, *mask.shape) if mask.is_contiguous() else mask[None, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask
        )
        return out, lse if want_lse else None
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    if not want_lse:
        return out, None
    groups = q.shape[1] // k.shape[1]
    wide = k.repeat_interleave(groups, dim=1).float()
    scores = q.float() @ wide.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return out, torch.logsumexp(scores, dim=-1)
