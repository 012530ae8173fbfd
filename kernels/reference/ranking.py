"""A total order on logits: the larger value first, the smaller token id among equal values.

Logits computed in bfloat16 are often equal; which tokens are kept, reported or sampled must not
depend on how a sorting routine happens to order equals.
"""

from __future__ import annotations

import torch


def best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of each row's `count` best, best first. values float32 [R, V] -> int64 [R, count].

    NaN ranks before everything. Nothing waits for a device.
    """
    if values.device.type != "cpu":
        return best_ids_by_keys(values, count)
    count = min(count, values.shape[1])
    top, ids = torch.topk(values, count, dim=1)
    # Which of several equal values came last among the `count` is up to topk. Rows in which some
    # were left out are ranked by keys, which are slower to make and to compare.
    split = ((values >= top[:, -1:]).sum(1) > count).nonzero().squeeze(1)
    if len(split):
        ids = ids.index_copy(0, split, best_ids_by_keys(values.index_select(0, split), count))
    keys = _rank_keys(values.gather(1, ids), ids).sort(dim=1, descending=True).values
    return _KEY_IDS - (keys & _KEY_IDS)


def best_ids_by_keys(values: torch.Tensor, count: int) -> torch.Tensor:
    """As `best_ids`, whatever the values are."""
    every = torch.arange(values.shape[1], device=values.device)
    keys = torch.topk(_rank_keys(values, every), min(count, values.shape[1]), dim=1).values
    return _KEY_IDS - (keys & _KEY_IDS)


_KEY_IDS = 0xFFFF_FFFF


def _rank_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different within a row, that sort as (value, -id).

    The upper half is the float's bits, made to sort as its value does; the lower the reversed id.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, which it equals
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).to(torch.int64)
    return (ordered << 32) + (_KEY_IDS - ids)
