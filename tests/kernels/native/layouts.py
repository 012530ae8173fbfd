"""Caches in the layout of the native kernels, and single calls of the kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rootlace.kernels.interface import AttentionBatch, KVCodes, slot_bytes
from rootlace.kernels.native.attention import MAX_DIM
from rootlace.kernels.native.library import LANES, Rows, Team
from rootlace.kernels.native.linear import DTYPES, Arena, Packer, Products
from rootlace.kernels.weights import Weight


def codes_laid_out(keys: Tensor, values: Tensor, codes: KVCodes, dim: int) -> tuple[Tensor, Tensor]:
    """Lay out rows of integers [B, S, 1, W] as the native cache does (`src/kv_codes.h`)."""
    return _codes_laid_out(keys, codes, dim, True), _codes_laid_out(values, codes, dim, False)


def _codes_laid_out(rows: Tensor, codes: KVCodes, dim: int, keys: bool) -> Tensor:
    blocks, size = rows.shape[:2]
    groups = 1 if codes.bits == 8 else dim // 32
    width, words = codes.heads * dim * codes.bits // 8, 4 * codes.heads * groups
    by_head = rows[..., :width].reshape(blocks, size, codes.heads, -1).transpose(1, 2)
    if keys:
        by_head = by_head.reshape(blocks, codes.heads, -1, LANES, by_head.shape[3] // 2, 2)
        by_head = by_head.transpose(3, 4)
    else:
        by_head = by_head.reshape(blocks, codes.heads, size // 2, 2, -1).transpose(3, 4)
    scales = rows[..., width : width + words].reshape(blocks, size, -1, 4).transpose(1, 2)
    laid = torch.zeros_like(rows)
    flat = laid.view(blocks, -1)
    flat[:, : size * width] = by_head.reshape(blocks, -1)
    flat[:, size * width : size * (width + words)] = scales.reshape(blocks, -1)
    return laid


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
    given = (batch.row_start, batch.context_len, batch.block_tables)
    kept = [np.ascontiguousarray(one, np.int32) for one in given]
    found = np.array(runs, np.int32).reshape(-1, 4)
    addresses = (one.ctypes.data for one in kept)
    rows = Rows(*kept[2].shape, *addresses, len(found), found.ctypes.data)
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


class PackedLinear(Products):
    """Products with one weight."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        weight: Weight,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        factor: float = 1.0,
        arena: Arena | None = None,
    ) -> None:
        packer = Packer(library, team, dtype, arena or Arena())
        super().__init__(packer, [weight], gated=gated)
        self.dtype = dtype
        [packed] = self._held
        self.packed, self.outputs = packed.memory, packed.outputs
        self.structure = packed.structure(factor)
        self._structures[0] = self.structure
