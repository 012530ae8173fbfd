"""Attention and its cache in C++, for decoders whose other operations are torch's. The cache shares
only its shape with the reference's: `src/kv_layout.h` defines the layout in a block."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from rootlace.kernels.interface import AttentionBatch, HostPlan, KernelSet, KVScaling
from rootlace.kernels.native.library import SEEK_RUNS, Rows, Team
from rootlace.kernels.native.linear import DTYPES
from rootlace.kernels.reference import REFERENCE

MAX_DIM = 1024
"""Maximum number of elements of a head."""


FEW_TOKENS = 64
"""Maximum number of a step's tokens that the calling thread attends alone. Torch's threads still
spin on their cores for the next product, so other threads would start too late."""


@dataclass(frozen=True)
class NativePlan(HostPlan):
    """Plan for C++, which divides the work (`interface.HostPlan`). `memory` keeps the arrays of
    `rows` alive."""

    rows: Rows
    memory: object
    team: Team
    window: int  # 0: none


class NativeAttention:
    """Attention and writes of the cache (`interface.PagedAttention` and related operations).

    Caches have q's dtype, float32 or bfloat16. Nothing is checked: the decoder guarantees shapes
    that fit its cache.
    """

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team
        self._alone = Team(library, 1)

    def _chosen(self, tokens: int) -> Team:
        return self._alone if tokens <= FEW_TOKENS else self._team

    def plan(
        self, batch: AttentionBatch, window: int | None, rows: int | None = None
    ) -> NativePlan:
        """Plan a step (`interface.PlanAttention`), ignoring `rows`, as no graph is replayed."""
        arrays = (batch.row_start, batch.context_len, batch.block_tables)
        memory = [one.astype("int32", order="C", copy=False) for one in arrays]
        starts, lengths, tables = (one.ctypes.data for one in memory)
        rows_at = Rows(*memory[2].shape, starts, lengths, tables, SEEK_RUNS)
        return NativePlan(rows_at, memory, self._chosen(int(batch.row_start[-1])), window or 0)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Any,
        *,
        scale: float | None = None,
        soft_cap: float = 0.0,
        scales: KVScaling | None = None,
        want_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert scales is None, "stored numbers are the model's own"
        _, size, kv_heads, dim = k_cache.shape
        q = q.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2]) if want_lse else None
        self._library.rl_attention(
            *(plan.team.handle, DTYPES[q.dtype], q.shape[1], kv_heads, dim, size, 0),
            *(ctypes.addressof(plan.rows), q.data_ptr(), q.stride(0)),
            *(k_cache.data_ptr(), v_cache.data_ptr(), 1, 0, plan.window),
            *(dim**-0.5 if scale is None else scale, soft_cap, out.data_ptr()),
            None if lse is None else lse.data_ptr(),
        )
        return out, lse

    def write(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """Write keys and values (`interface.WriteKV`)."""
        _, size, heads, dim = k_cache.shape
        k, v = (one if one.stride()[1:] == (dim, 1) else one.contiguous() for one in (k, v))
        self._library.rl_write_kv(
            self._chosen(len(slots)).handle,
            *(DTYPES[k_cache.dtype], heads, dim, size, len(slots)),
            *(slots.data_ptr(), None if tokens is None else tokens.data_ptr()),
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(k_cache.data_ptr(), v_cache.data_ptr()),
        )

    def copy(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots (`KernelSet.copy_slots`)."""
        parts, _, size, heads, dim = cache.shape
        self._library.rl_copy_kv(
            *(self._team.handle, DTYPES[cache.dtype], heads, dim, size, len(source)),
            *(source.data_ptr(), target.data_ptr(), parts, cache[0].nbytes, cache.data_ptr()),
        )


def attending_kernels(library: ctypes.CDLL, team: Team) -> KernelSet:
    """Return the reference's kernels, with attention in C++."""
    attention = NativeAttention(library, team)
    return replace(
        REFERENCE,
        plan_attention=attention.plan,
        paged_attention=attention,
        write_kv=attention.write,
        copy_slots=attention.copy,
    )
