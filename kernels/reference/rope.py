"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout.

With x = [x1, x2] the two halves of a head and c, s the cosine and sine of position * frequency:

    y = [x1 * c - x2 * s,  x2 * c + x1 * s]

Queries and keys may be RMS-normalised per head before (Qwen3's qk-norm).
"""

from __future__ import annotations

import torch

from rootlace.kernels.reference.rms_norm import rms_norm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, N, D] by cos and sin [T, D/2], all of one dtype -> [T, N, D]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position q [T, Nq, D] and k [T, Nk, D]; norm weights [D] are applied first where given."""
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin)
