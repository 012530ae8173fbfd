"""A total order on logits: larger value first, smaller token id among equal values.

Model outputs in bfloat16 tie often; whatever is kept, reported or sampled must not depend on how a
sorting routine happens to break ties.
"""

from __future__ import annotations

import torch


def best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of each row's `count` best, best first. values float32 [R, V] -> int64 [R, count]."""
    keys = rank_keys(values)
    count = min(count, values.shape[1])
    return values.shape[1] - 1 - (torch.topk(keys, count, dim=1).values & 0xFFFF_FFFF)


def rank_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different within a row, that sort as (value, -id).

    The float's bits, made monotonic, are the upper half, the reversed id the lower.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, which it equals
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).to(torch.int64)
    ids = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (ordered << 32) + ids
