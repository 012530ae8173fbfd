"""The KV cache's memory: how much, and one tensor for all of it."""

from __future__ import annotations

import psutil
import torch

from rootlace.errors import UnsupportedModel
from rootlace.runtime.config import CacheConfig
from rootlace.runtime.model.config import ModelConfig

GIB = 1 << 30
CPU_SHARE = 0.25
"""Share of the available main memory that the cache takes at most, unless told."""
CPU_LIMIT = 4 * GIB
CUDA_SHARE = 0.9
"""Share of the GPU memory left after weights and the largest step."""
FULL_CONTEXTS = 64
"""A CPU pool that holds this many full contexts is big enough."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, keys and values."""
    row = config.num_kv_heads * config.head_dim * dtype.itemsize
    return 2 * config.num_layers * block_size * row


def choose_num_blocks(
    config: ModelConfig,
    cache: CacheConfig,
    kv_memory_bytes: int | None,
    context_length: int,
    device: torch.device,
    dtype: torch.dtype,
    step_bytes: int,
) -> int:
    """Blocks of the pool: as configured, else what `kv_memory_bytes` or the free memory holds.

    `step_bytes` estimates what a step needs beside the weights. Raises `UnsupportedModel` if there
    is no memory for even one full block.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    size = block_bytes(config, cache.block_size, dtype)
    if kv_memory_bytes is not None:
        memory = kv_memory_bytes
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        memory = int((free - step_bytes) * CUDA_SHARE)
    else:
        share = int(psutil.virtual_memory().available * CPU_SHARE)
        contexts = FULL_CONTEXTS * -(-context_length // cache.block_size) * size
        memory = min(share, CPU_LIMIT, contexts)
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
    """The cache [layers, 2, num_blocks, block_size, kv_heads, head_dim], uninitialised.

    Not cleared on purpose: slots are read only after they were written, and on the CPU pages that
    are never written cost no memory.
    """
    shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return torch.empty(shape, device=device, dtype=dtype)
