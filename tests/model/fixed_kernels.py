"""The reference kernels with decode attention in a form that can be captured: plain torch, on
arrays whose places do not change, as the accelerated sets have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import AttentionBatch, HostPlan, KernelSet
from rootlace.kernels.reference import REFERENCE


@dataclass(frozen=True)
class FixedPlan:
    arrays: list[np.ndarray]  # context [rows], tables [count * width]: the rest is left over
    rows: int
    width: int
    block_size: int
    window: int | None

    def bind(self, tensors: list[torch.Tensor]) -> Bound:
        context, tables = tensors
        tables = tables[: self.rows * self.width].view(self.rows, self.width)
        return Bound(context, tables, self.block_size, self.window)


@dataclass(frozen=True)
class Bound:
    context: torch.Tensor
    tables: torch.Tensor
    block_size: int
    window: int | None


class FixedAttention:
    """`width`: entries of the longest block table."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.planned: list[int | None] = []

    def plan(self, batch: AttentionBatch, window: int | None, rows: int | None = None) -> HostPlan:
        self.planned.append(rows)
        if rows is None:
            return REFERENCE.plan_attention(batch, window)
        count = len(batch.context_len)
        assert (np.diff(batch.row_start) == 1).all() and count <= rows
        context = np.zeros(rows, np.int32)
        context[:count] = batch.context_len
        tables = np.full((count, self.width), -1, np.int32)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables[:, : self.width]
        arrays = [context, tables.reshape(-1)]
        return FixedPlan(arrays, rows, self.width, batch.block_size, window)

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Any, **rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(plan, Bound):
            return REFERENCE.paged_attention(q, k_cache, v_cache, plan, **rest)
        rows, heads, dim = q.shape
        kv_heads = k_cache.shape[2]
        size = plan.tables.shape[1] * plan.block_size
        position = torch.arange(size)
        inside = position < plan.context.unsqueeze(1)
        if plan.window is not None:
            inside = inside & (position >= plan.context.unsqueeze(1) - plan.window)
        blocks = plan.tables.long().repeat_interleave(plan.block_size, dim=1)
        slots = blocks * plan.block_size + position % plan.block_size
        slots = torch.where(inside, slots, 0).view(-1)
        k = k_cache.view(-1, kv_heads, dim).index_select(0, slots).view(rows, size, kv_heads, dim)
        v = v_cache.view(-1, kv_heads, dim).index_select(0, slots).view(rows, size, kv_heads, dim)
        v = torch.where(inside[:, :, None, None], v, 0.0)
        grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("rngd,rsnd->rngs", grouped, k) * dim**-0.5
        scores = torch.where(inside[:, None, None, :], scores, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)
        return torch.einsum("rngs,rsnd->rngd", weights, v).reshape(rows, heads, dim), None


def fixed_kernels(width: int) -> tuple[KernelSet, FixedAttention]:
    attention = FixedAttention(width)
    kernels = replace(
        REFERENCE,
        name="fixed",
        plan_attention=attention.plan,
        paged_attention=attention.attend,
    )
    return kernels, attention
