"""The models that have been downloaded: what each needs here, and whether it fits; and what weights
are kept packed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.executor.cpu_setup import why_not_native
from rootlace.runtime.model.executor.runner import chosen_dtype
from rootlace.runtime.model.hub.download import snapshots
from rootlace.runtime.model.hub.local import PackagedFile, packaged_models
from rootlace.runtime.model.kv.pool import block_bytes, main_memory
from rootlace.runtime.model.weight_cache import DamagedEntry, Entry, WeightCache
from rootlace.wire.errors import UnsupportedModel

TOKENS = 4096
"""A model fits if its weights do and a cache of so many tokens, as `rootlace serve` has them."""


@dataclass(frozen=True)
class CachedModel:
    """`weights` (of the files) and `needs` (in memory, on a CPU) in bytes; `refused`: why it cannot
    be served, and then neither its context nor its needs are known."""

    name: str
    path: str
    weights: int
    context: int | None = None
    needs: int | None = None
    fits: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class PackedModel:
    """Packed weights that a start has kept (`--weight-cache`) in a file of so many bytes."""

    model: str
    path: str
    size: int


def cached_models() -> tuple[list[CachedModel], int]:
    """All of them, and the bytes of main memory that are free."""
    free = main_memory().available
    there = [
        (str(name), path, weights)
        for snapshot in snapshots()
        for name, path, weights in snapshot.models
    ]
    for called, model in packaged_models().items():
        file = PackagedFile(called, model).find()
        if file is not None:
            there.append((called, file, model.size))
    return [_examined(*one, free) for one in there], free


def packed_models(folder: str) -> list[PackedModel]:
    """What packed weights are kept there, the ones used last at the end. `folder` is as starts
    have it."""
    found = []
    cache = WeightCache.chosen(folder)
    for one in cache.kept() if cache else ():
        with suppress(OSError, DamagedEntry):  # deleted meanwhile, or by the next start
            found.append(PackedModel(Entry.read(one.path).table.model, str(one.path), one.size))
    return found


def delete_packed_models(folder: str) -> int:
    """Delete them; how many bytes that were."""
    cache = WeightCache.chosen(folder)
    return cache.clear() if cache else 0


def _examined(name: str, path: Path, weights: int, free: int) -> CachedModel:
    try:
        config = ModelConfig.read(path)
        dtype = chosen_dtype(ExecutorConfig(), config)
        native = why_not_native(config, dtype, CacheConfig().block_size) is None
        needs = weight_bytes(config, dtype, "none", head_apart=native)
    except UnsupportedModel as error:
        return CachedModel(name, str(path), weights, refused=str(error))
    context = config.spec.max_context
    needs += block_bytes(config, min(TOKENS, context), dtype)
    return CachedModel(name, str(path), weights, context, needs, needs <= free)
