"""Attention of rows with several new tokens over a paged cache (prefill, in Triton)."""

from __future__ import annotations

import torch

from rootlace.kernels.interface import KVScales
from rootlace.kernels.triton.extend_plan import ExtendPlan, TileShape


def tile_shapes(
    arch: int, head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[TileShape, TileShape]:
    """The (large, small) tiles for `plan_extend`; `arch` as in `numerics.architecture`."""
    raise NotImplementedError


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: ExtendPlan,
    arrays: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    scales: KVScales | None = None,
) -> None:
    """Attention of the planned rows' tokens, written to their places in `out` and `lse` only.

    q, out [T, Nq, D] of the whole step (last axis contiguous); k_cache, v_cache [B, S, Nk, D] of
    one layer, contiguous, in q's dtype or float8_e4m3fn with `scales`; block_tables int32 [R, W]
    (rows contiguous); `arrays` are `plan.arrays` on the device (int32, contiguous; any shape); lse
    float32 [T, Nq] contiguous or None. See `interface.PagedAttention`.
    """
    raise NotImplementedError
