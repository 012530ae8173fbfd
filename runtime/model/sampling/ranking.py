"""A total order on logits: larger value first, smaller token id among equal values.

Model outputs in bfloat16 tie often; whatever is kept, reported or sampled must not depend on how a
sorting routine happens to break ties.
"""

from __future__ import annotations

import torch


def best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of each row's `count` best, best first. values float32 [R, V] -> int64 [R, count].

    NaN ranks before everything.
    """
    count = min(count, values.shape[1])
    top, ids = torch.topk(values, count, dim=1)
    # Which of several equal values made it into the last places is up to topk: where some were left
    # out, the row is ranked by keys instead, which are slower to make and to compare.
    split = ((values >= top[:, -1:]).sum(1) > count).nonzero().squeeze(1)
    if len(split):
        chosen = values.index_select(0, split)
        every = torch.arange(values.shape[1], device=values.device)
        keys = torch.topk(_rank_keys(chosen, every), count, dim=1).values
        ids = ids.index_copy(0, split, _KEY_IDS - (keys & _KEY_IDS))
    keys = _rank_keys(values.gather(1, ids), ids).sort(dim=1, descending=True).values
    return _KEY_IDS - (keys & _KEY_IDS)


def best_ids_unseen(values: torch.Tensor, count: int) -> torch.Tensor:
    """As `best_ids`, without a look at the values from the host: every row is ranked by keys."""
    every = torch.arange(values.shape[1], device=values.device)
    keys = torch.topk(_rank_keys(values, every), min(count, values.shape[1]), dim=1).values
    return _KEY_IDS - (keys & _KEY_IDS)


_KEY_IDS = 0xFFFF_FFFF


def _rank_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different within a row, that sort as (value, -id).

    The float's bits, made monotonic, are the upper half, the reversed id the lower.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, which it equals
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).to(torch.int64)
    return (ordered << 32) + (_KEY_IDS - ids)
