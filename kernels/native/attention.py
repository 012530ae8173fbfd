"""`src/attention.cpp` alone, for tests and measurements: a forward pass calls it from C++."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootlace.kernels.interface import AttentionBatch, KernelSet, KVCodes, KVScaling, slot_bytes
from rootlace.kernels.native.library import LANES, Rows, Team
from rootlace.kernels.native.linear import DTYPES
from rootlace.kernels.reference import REFERENCE

MAX_DIM = 1024
"""Numbers of a head, at most."""


def laid_out(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Plain keys and values [..., B, S, Nk, D] as the native cache has them, of the same shapes.

    See `src/kv_layout.h`: blocks of a multiple of 16 slots, of heads of a multiple of 16 numbers,
    are laid out in the order in which products read them; others stay as they are.
    """
    size, heads, dim = keys.shape[-3:]
    if size % LANES or dim % LANES:
        return keys, values
    step = 4 // keys.element_size()
    panels = keys.reshape(-1, size // LANES, LANES, heads, dim // step, step)
    pairs = values.reshape(-1, size // step, step, heads, dim)
    laid = keys.new_empty(keys.shape), values.new_empty(values.shape)
    laid[0].copy_(panels.permute(0, 3, 1, 4, 2, 5).reshape(keys.shape))
    laid[1].copy_(pairs.permute(0, 3, 1, 4, 2).reshape(keys.shape))
    return laid


def rows_of(
    batch: AttentionBatch, runs: Sequence[tuple[int, int, int, int]] | None
) -> tuple[Rows, object]:
    """A step's rows as the library reads them, and the memory that they point to. `runs` None: they
    are looked for."""
    row_start, context_len, tables, found = (
        np.ascontiguousarray(array, np.int32)
        for array in (
            batch.row_start,
            batch.context_len,
            batch.block_tables,
            np.array(runs or ()).reshape(-1, 4),
        )
    )
    rows = Rows(
        rows=len(context_len),
        width=tables.shape[1],
        row_start=row_start.ctypes.data,
        context_len=context_len.ctypes.data,
        block_tables=tables.ctypes.data,
        num_runs=-1 if runs is None else len(found),
        runs=found.ctypes.data,
    )
    return rows, (row_start, context_len, tables, found)


def attend(
    library: ctypes.CDLL,
    team: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    runs: Sequence[tuple[int, int, int, int]] = (),
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    codes: KVCodes | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of a step in one layer, or in L layers with the same queries, one after another.

    q [T, Nq, D], its tokens any distance apart; caches [B, S, Nk, D] as `laid_out` makes them,
    contiguous, or L of them a fixed distance apart [L, B, S, Nk, D]; with `codes`, rows of integers
    [B, S, 1, W] as `src/kv_codes.h` has them, or L; `runs` are (begin, end, low,
    high): rows begin : end have the blocks low : high of their tables in common (`RlRows` of
    api.h). `lse` float32 [T, Nq] receives the log-sum-exps. Returns `out` [T, Nq, D] (of the last
    layer), allocated if not given. Raises ValueError.
    """
    tokens, heads, dim = q.shape
    stored = q.dtype if codes is None else torch.uint8
    if q.dtype not in DTYPES or k_cache.dtype != stored or v_cache.dtype != stored:
        raise ValueError(f"queries {q.dtype}, keys {k_cache.dtype}, values {v_cache.dtype}")
    if dim % 2 or not 0 < dim <= MAX_DIM or heads % batch.num_kv_heads:
        raise ValueError(f"{heads} heads of {dim} over {batch.num_kv_heads} key heads")
    if scale is not None and not scale > 0:
        raise ValueError(f"scores times {scale}: must be positive")
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    if k_cache.dim() == 4:
        k_cache, v_cache = k_cache.unsqueeze(0), v_cache.unsqueeze(0)
    cache_shape = (batch.block_size, batch.num_kv_heads, dim)
    if codes is not None:
        if batch.block_size % LANES or dim % (2 * LANES):
            raise ValueError(f"integers in blocks of {batch.block_size} slots, heads of {dim}")
        cache_shape = (batch.block_size, 1, slot_bytes(codes.bits, codes.heads, dim))
    wrong = (
        q.stride()[1:] != (dim, 1)
        or k_cache.shape != v_cache.shape
        or k_cache.shape[2:] != cache_shape
        or k_cache.stride() != v_cache.stride()
        or not (k_cache[0].is_contiguous() and v_cache[0].is_contiguous())
        or out.shape != q.shape
        or out.dtype != q.dtype
        or not out.is_contiguous()
        or int(batch.row_start[-1]) != tokens
        or (
            lse is not None
            and (lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous())
        )
    )
    if wrong:
        raise ValueError("shapes, strides or dtypes of queries, caches and outputs do not fit")
    rows, _kept = rows_of(batch, runs)
    library.rl_attention(
        team,
        DTYPES[q.dtype],
        heads,
        batch.num_kv_heads,
        dim,
        batch.block_size,
        0 if codes is None else codes.bits,
        ctypes.byref(rows),
        q.data_ptr(),
        q.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        len(k_cache),
        k_cache.stride(0) * k_cache.element_size(),
        window or 0,
        1.0 / math.sqrt(dim) if scale is None else scale,
        soft_cap,
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
    )
    return out


# Paged attention ----------------------------------------------------------------------------------
#
# Attention and its cache in C++, for decoders whose other operations are torch's.
#
# The cache has its shape alone in common with the reference's: what stands where inside a block is
# the kernels' own affair (`src/kv_layout.h`).


FEW_TOKENS = 64
"""So many tokens of a step are attended by the calling thread alone. Torch's threads still wait on
their cores for the next product: another thread would come too late to be of use."""


@dataclass(frozen=True)
class NativePlan:
    """See `interface.HostPlan`. Work is divided in C++; `kept` is the memory of `rows`."""

    rows: Rows
    kept: object
    team: Team
    window: int  # 0: none

    @property
    def arrays(self) -> list[np.ndarray]:
        return []

    def bind(self, tensors: list[Tensor]) -> NativePlan:
        return self


class NativeAttention:
    """See `interface.PagedAttention`, and `interface` for what other methods do. Caches are of q's
    dtype, float32 or bfloat16. Nothing is checked: a decoder's shapes are those of its cache."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team
        self._alone = Team(library, 1)

    def _chosen(self, tokens: int) -> Team:
        return self._alone if tokens <= FEW_TOKENS else self._team

    def plan(
        self, batch: AttentionBatch, window: int | None, rows: int | None = None
    ) -> NativePlan:
        """See `interface.PlanAttention`; there are no graphs to replay, so `rows` says nothing."""
        return NativePlan(
            *rows_of(batch, None), self._chosen(int(batch.row_start[-1])), window or 0
        )

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
        """See `interface.WriteKV`."""
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
        """See `interface.CopySlots`."""
        parts, _, size, heads, dim = cache.shape
        self._library.rl_copy_kv(
            *(self._team.handle, DTYPES[cache.dtype], heads, dim, size, len(source)),
            *(source.data_ptr(), target.data_ptr(), parts, cache[0].nbytes, cache.data_ptr()),
        )


def attending_kernels(library: ctypes.CDLL, team: Team) -> KernelSet:
    """The reference's kernels, with attention in C++."""
    attention = NativeAttention(library, team)
    return replace(
        REFERENCE,
        plan_attention=attention.plan,
        paged_attention=attention,
        write_kv=attention.write,
        copy_slots=attention.copy,
    )
