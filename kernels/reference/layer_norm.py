"""Layer norm (Ba et al. 2016, arXiv:1607.06450).

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b

All of it is in float32 and rounded once, as torch does it.
"""

from __future__ import annotations

import torch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Normalise the last axis. x [..., H], weight and bias [H], same dtype -> [..., H]."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
