"""The KV cache's memory: how much, and one tensor for all of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rootlace.kernels.interface import KVCodes
from rootlace.kernels.native.machine import mapped
from rootlace.kernels.reference.kv_cache import slot_bytes
from rootlace.runtime.config import CacheConfig, KVDtype
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.spec import Attention
from rootlace.runtime.model.kv.memory import main_memory
from rootlace.wire.errors import UnsupportedModel

GIB = 1 << 30
CPU_SHARE = 0.25
"""Share of the available main memory that the cache takes at most, unless told."""
CPU_LIMIT = 4 * GIB
FULL_CONTEXTS = 64
"""A CPU pool that holds this many full contexts is big enough."""


UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.uint8, "int4": UINT4}
BITS = {torch.uint8: 8, UINT4: 4}
"""Of the integers in a cache of these types."""


def storage_dtype(kv_dtype: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """How keys and values of a model of `dtype` are stored."""
    return STORED.get(kv_dtype, dtype)


def codes(attention: Attention, dtype: torch.dtype) -> KVCodes | None:
    """What integers a cache of `dtype` holds; None: it holds others than integers."""
    bits = BITS.get(dtype)
    return None if bits is None else KVCodes(bits, attention.num_kv_heads)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, keys and values."""
    attention = config.spec.attention
    slot, element = _slot(attention, dtype)
    return (
        attention.cached * config.spec.num_layers * block_size * math.prod(slot) * element.itemsize
    )


def bytes_per_number(attention: Attention, dtype: torch.dtype) -> float:
    """Of a key or value in a cache of `dtype`, with its share of the scales."""
    slot, element = _slot(attention, dtype)
    return math.prod(slot) * element.itemsize / (attention.num_kv_heads * attention.head_dim)


def _slot(attention: Attention, dtype: torch.dtype) -> tuple[tuple[int, int], torch.dtype]:
    """A slot's keys, or values, in a layer: axes and their elements' type."""
    heads, dim = attention.num_kv_heads, attention.head_dim
    if dtype in BITS:
        return (1, slot_bytes(BITS[dtype], heads, dim)), torch.uint8
    return (heads, dim), dtype


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
    room for values, where these are a part of the keys: [layers, 1, ...]. Of integers: bytes, in
    rows, [layers, 2, num_blocks, block_size, 1, row] (`kernels/reference/kv_cache.py`).

    Not cleared on purpose: slots are read only after they were written, and on the CPU pages that
    are never written cost no memory. Its pages are huge where the system has such: blocks lie all
    over the cache, and attention would otherwise look up a page for each. Raises OSError (on the
    CPU) if the system has no room for it.
    """
    attention = config.spec.attention
    slot, element = _slot(attention, dtype)
    shape = (config.spec.num_layers, attention.cached, num_blocks, block_size, *slot)
    if device.type == "cpu":
        return mapped(math.prod(shape) * element.itemsize).view(element).view(shape)
    return torch.empty(shape, device=device, dtype=element)
