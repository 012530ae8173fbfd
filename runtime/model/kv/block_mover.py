"""Copies whole blocks between the KV pool and the stores below it."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version

import numpy as np
import torch

from rootlace.kernels.native import library as native
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.block_store import LOAD, SAVE, StoreMemory
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.lora_config import read_adapters
from rootlace.runtime.model.weight_cache import cache_key

# Identity -----------------------------------------------------------------------------------------
#
# What the bytes of cached blocks follow from, beside the tokens, where they outlive a process.


def kv_identity(runner: ModelRunner, executor: ExecutorConfig, cache: CacheConfig) -> bytes:
    """32 bytes: configuration, weights, code and kernels of the model, the device, and how keys and
    values lie in a block. Raises OSError for a file that cannot be read."""
    config = runner.config
    device = runner.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = cache_key(
        config,
        Checkpoint(config.path, config.allow_pickle).files,
        native.load() if runner.kernels == "native" else None,
        runner.dtype,
        *(executor.quantize, executor.product_paths, executor.kv_dtype, runner.kernels, name),
        version("transformers") if config.spec.transformers is not None else "",
        *map(str, (cache.block_size, runner.context_length, tuple(runner.kv_cache.shape[3:]))),
    )
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def adapter_contents(executor: ExecutorConfig) -> dict[str, bytes]:
    """For `kv_space`, of the adapters of an engine: one whose files change has other spaces. Raises
    OSError for a file that cannot be read."""
    contents = {}
    for adapter in read_adapters(executor.adapters):
        digest = hashlib.blake2b(digest_size=32)
        for file in sorted(adapter.folder.glob("adapter*")):
            digest.update(file.name.encode() + file.read_bytes())
        contents[adapter.name] = digest.digest()
    return contents


# Block mover --------------------------------------------------------------------------------------


class BlockMover:
    """Makes moves in their order, behind the steps that were launched before.

    Copies between a GPU and pinned memory are given to the device and not waited for; a later call
    finds out that they are done. Other copies are made at once.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        stores: Sequence[StoreMemory],
        work: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """`cache`: see `kv.pool.allocate`. `work`: that of the runner whose it is."""
        planes = cache.shape[0] * cache.shape[1]
        self._planes = cache.view(torch.uint8).view(planes, cache.shape[2], -1)
        self._stores = stores
        self._work = work
        self._filling: list[tuple[torch.cuda.Event, list[tuple[StoreMemory, int]]]] = []
        """Slots that the device fills, and what it does behind that."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers, keys and values."""
        return self._planes.shape[0] * self._planes.shape[2]

    @torch.inference_mode()
    def move(self, moves: np.ndarray) -> None:
        """`moves`: see `contracts.block_store`."""
        self._settle()
        if not len(moves):
            return
        with self._work():
            filled = self._move(moves)
            if self._planes.is_cuda and filled:
                event = torch.cuda.Event()
                event.record()
                self._filling.append((event, filled))
                return
        for store, slot in filled:
            store.filled(slot)

    def _move(self, moves: np.ndarray) -> list[tuple[StoreMemory, int]]:
        """The slots of stores that are filled when the device has done all of it."""
        filled: list[tuple[StoreMemory, int]] = []
        for kind, at, slot, other in moves.tolist():
            store = self._stores[at]
            if kind == SAVE:
                self._bytes_of(store.buffer(slot)).copy_(self._planes[:, other], non_blocking=True)
                filled.append((store, slot))
            elif kind == LOAD:
                # Of memory that is not pinned this returns when it was read.
                source = self._bytes_of(store.fetched(slot))
                self._planes[:, other].copy_(source, non_blocking=True)
                store.loaded(slot)
            else:
                below = self._stores[at + 1]
                below.buffer(other)[:] = store.fetched(slot)
                below.filled(other)
        return filled

    def _settle(self) -> None:
        while self._filling and self._filling[0][0].query():
            for store, slot in self._filling.pop(0)[1]:
                store.filled(slot)

    def finish(self) -> None:
        """Wait for what the device was given."""
        if self._planes.is_cuda:
            torch.cuda.synchronize(self._planes.device)
        self._settle()

    def load_seconds(self, buffer: np.ndarray, blocks: int) -> float:
        """How long a block takes from a buffer into the pool, of whose first block the content is
        lost."""
        begun = 0.0
        for count in (1, blocks):  # the first is a warm-up
            self.finish()
            begun = time.perf_counter()
            with torch.inference_mode(), self._work():
                for _ in range(count):
                    self._planes[:, 0].copy_(self._bytes_of(buffer), non_blocking=True)
            self.finish()
        return (time.perf_counter() - begun) / blocks

    def _bytes_of(self, buffer: np.ndarray) -> torch.Tensor:
        """The buffer as blocks lie in the pool: [planes, bytes]."""
        return torch.from_numpy(buffer).view(self._planes.shape[0], -1)
