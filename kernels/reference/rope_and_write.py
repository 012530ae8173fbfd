"""Queries normed and rotated, keys too and into the cache with values; see `rope`, `kv_cache`."""

from __future__ import annotations

import torch

from rootlace.kernels.interface import KVCodes, KVScaling
from rootlace.kernels.reference.kv_cache import write_kv
from rootlace.kernels.reference.kv_codes import quantise
from rootlace.kernels.reference.rope import rope


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: KVScaling | None = None,
) -> torch.Tensor:
    """See `interface.RopeAndWrite`."""
    kv_heads = scales.heads if isinstance(scales, KVCodes) else k_cache.shape[2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q, k = rope(q, k, cos, sin, q_norm, k_norm, eps)
    if isinstance(scales, KVCodes):
        k, v = (quantise(part, scales.bits).unsqueeze(1) for part in (k, v))
    elif scales is not None:
        k, v = _stored(k, scales.k, k_cache.dtype), _stored(v, scales.v, v_cache.dtype)
    write_kv(k_cache, v_cache, k, v, slots, tokens)
    return q


def _stored(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return (values.float() / scale.unsqueeze(1)).clamp(-most, most).to(dtype)
