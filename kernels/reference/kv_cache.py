"""Writing and copying rows of the paged KV cache.

A cache tensor has the axes [..., num_blocks, block_size, kv_heads, head_dim]; slot
`block * block_size + offset` is one token's place.
"""

from __future__ import annotations

import torch


def write_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> None:
    """cache[slots[i]] = new[tokens[i]], for keys and values of one layer, in place.

    k_cache, v_cache [B, S, N, D]; k, v [T, N, D]; slots int64 [M]. `tokens` int64 [M] says which
    token goes to each slot, None that they go in order (M = T). No slot may appear twice.
    """
    if tokens is not None:
        k, v = k.index_select(0, tokens), v.index_select(0, tokens)
    shape = (-1, *k_cache.shape[2:])
    _bits(k_cache).view(shape).index_copy_(0, slots, _bits(k))
    _bits(v_cache).view(shape).index_copy_(0, slots, _bits(v))


def copy_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """cache[target[i]] = cache[source[i]] in every layer at once, in place.

    cache [L, B, S, N, D] (layers, keys and values, are one axis L); source, target int64 [M] slots.
    No target may also be a source, or appear twice.
    """
    flat = _bits(cache).view(cache.shape[0], -1, *cache.shape[3:])
    flat.index_copy_(1, target, flat.index_select(1, source))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes, which torch can copy by index everywhere; anything else as it is."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values
