"""Caches of integers as the native kernels lay them out."""

from __future__ import annotations

import torch
from torch import Tensor

from rootlace.kernels.interface import KVCodes
from rootlace.kernels.native.attention import LANES


def codes_laid_out(keys: Tensor, values: Tensor, codes: KVCodes, dim: int) -> tuple[Tensor, Tensor]:
    """Rows of integers [B, S, 1, W] as the native cache has them (`src/kv_codes.h`)."""
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
