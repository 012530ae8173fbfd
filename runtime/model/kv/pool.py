"""The KV cache's memory: how much, and one tensor for all of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rootlace.kernels.native.memory import mapped
from rootlace.runtime.config import CacheConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.kv.main_memory import main_memory
from rootlace.wire.errors import UnsupportedModel

GIB = 1 << 30
CPU_SHARE = 0.25
"""Share of the available main memory that the cache takes at most, unless told."""
CPU_LIMIT = 4 * GIB
FULL_CONTEXTS = 64
"""A CPU pool that holds this many full contexts is big enough."""


def storage_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """How keys and values of a model of `dtype` are stored."""
    return torch.float8_e4m3fn if kv_dtype == "fp8_e4m3" else dtype


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, keys and values."""
    attention = config.spec.attention
    row = attention.num_kv_heads * attention.head_dim * dtype.itemsize
    return attention.cached * config.spec.num_layers * block_size * row


def choose_num_blocks(
    config: ModelConfig,
    cache: CacheConfig,
    kv_memory_bytes: int | None,
    context_length: int,
    dtype: torch.dtype,
    measured: Callable[[], int] | None = None,
    available: int | None = None,
) -> int:
    """Blocks of the pool: as configured, else what `kv_memory_bytes` or the free memory holds.

    `measured` finds out how much of a device's memory the cache may take; None: it is in main
    memory, of which `available` bytes are free (None: as many as there are now).
    Raises `UnsupportedModel` if there is no memory for even one full block.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    size = block_bytes(config, cache.block_size, dtype)
    if kv_memory_bytes is not None:
        memory = kv_memory_bytes
    elif measured is not None:
        memory = max(measured(), 0)
    else:
        available = main_memory().available if available is None else available
        contexts = FULL_CONTEXTS * -(-context_length // cache.block_size) * size
        memory = min(int(available * CPU_SHARE), CPU_LIMIT, contexts)
    blocks = memory // size
    if blocks < 1:
        raise UnsupportedModel(
            f"{config.path}: no memory for the KV cache: {memory} bytes are available, "
            f"one block of {cache.block_size} tokens takes {size}"
        )
    return int(blocks)


def allocate(
    config: ModelConfig, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The cache [layers, 2, num_blocks, block_size, kv_heads, head_dim], uninitialised; without
    room for values, where these are a part of the keys: [layers, 1, ...].

    Not cleared on purpose: slots are read only after they were written, and on the CPU pages that
    are never written cost no memory. Its pages are huge where the system has such: blocks lie all
    over the cache, and attention would otherwise look up a page for each. Raises OSError (on the
    CPU) if the system has no room for it.
    """
    attention = config.spec.attention
    heads, dim = attention.num_kv_heads, attention.head_dim
    shape = (config.spec.num_layers, attention.cached, num_blocks, block_size, heads, dim)
    if device.type == "cpu":
        return mapped(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, device=device, dtype=dtype)
