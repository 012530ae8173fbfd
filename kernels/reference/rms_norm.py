"""Root mean square layer norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    y = w * (x / sqrt(mean(x^2) + eps))

The statistics and the division are in float32; the quotient is rounded to x's dtype before it is
multiplied by w, as in the models' training code (the order matters in bfloat16).
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis. x [..., H], weight [H], same dtype -> [..., H]."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`s = residual + x`; returns (rms_norm(s), s). Both inputs [T, H]; neither is changed."""
    total = residual + x
    return rms_norm(total, weight, eps), total
