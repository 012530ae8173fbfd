"""Token embedding: y[t] = W[ids[t]]."""

from __future__ import annotations

import torch


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `weight` [V, H] named by `ids` [T] (int64) -> [T, H], the weight's dtype."""
    return weight.index_select(0, ids)
