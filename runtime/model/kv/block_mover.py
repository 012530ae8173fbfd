"""Copies whole blocks between the KV pool and the stores below it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from rootlace.runtime.contracts.block_store import LOAD, SAVE, StoreMemory


class BlockMover:
    """Makes moves in their order, behind the steps that were launched before."""

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

    @property
    def block_bytes(self) -> int:
        """Of a block over all layers, keys and values."""
        return self._planes.shape[0] * self._planes.shape[2]

    @torch.inference_mode()
    def move(self, moves: np.ndarray) -> None:
        """`moves`: see `contracts.block_store`."""
        with self._work():
            self._move(moves)

    def _move(self, moves: np.ndarray) -> None:
        for kind, at, slot, other in moves.tolist():
            store = self._stores[at]
            if kind == SAVE:
                self._bytes_of(store.buffer(slot)).copy_(self._planes[:, other])
                store.filled(slot)
            elif kind == LOAD:
                self._planes[:, other].copy_(self._bytes_of(store.fetched(slot)))
                store.loaded(slot)
            else:
                below = self._stores[at + 1]
                below.buffer(other)[:] = store.fetched(slot)
                below.filled(other)

    def _bytes_of(self, buffer: np.ndarray) -> torch.Tensor:
        """The buffer as blocks lie in the pool: [planes, bytes]."""
        return torch.from_numpy(buffer).view(self._planes.shape[0], -1)
