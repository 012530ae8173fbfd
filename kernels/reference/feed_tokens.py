"""A step's tokens, some of which the step before found: y[i] = found[f[i]] if f[i] >= 0 else x[i].

What was not found (-1) becomes token 0: its row has failed, and any token will do.
"""

from __future__ import annotations

import torch


def feed_tokens(token_ids: torch.Tensor, feeds: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """token_ids, feeds int64 [T], found int32 [S] -> int64 [T]."""
    fed = found.index_select(0, feeds.clamp(min=0)).clamp(min=0)
    return torch.where(feeds >= 0, fed.to(torch.int64), token_ids)
