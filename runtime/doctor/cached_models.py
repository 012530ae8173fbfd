"""The models of the Hugging Face cache: what each needs here, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.hub.cache import snapshots
from rootlace.runtime.model.kv.main_memory import main_memory
from rootlace.wire.errors import UnsupportedModel

TOKENS = 4096
"""A model fits if its weights do and a cache of so many tokens in two bytes per number."""


@dataclass(frozen=True)
class CachedModel:
    """`weights` and `needs` in bytes; `refused`: why it cannot be served, and then neither its
    context nor its needs are known."""

    name: str
    path: str
    weights: int
    context: int | None = None
    needs: int | None = None
    fits: bool = False
    refused: str | None = None


def cached_models() -> tuple[list[CachedModel], int]:
    """All of them, and the bytes of main memory that are free."""
    free = main_memory().available
    found = [
        _examined(str(name), path, weights, free)
        for snapshot in snapshots()
        for name, path, weights in snapshot.models
    ]
    return found, free


def _examined(name: str, path: Path, weights: int, free: int) -> CachedModel:
    try:
        config = ModelConfig.read(path)
    except UnsupportedModel as error:
        return CachedModel(name, str(path), weights, refused=str(error))
    # float16 runs in float32.
    in_memory = 2 * weights if config.checkpoint_dtype == "float16" else weights
    needs = in_memory + _cache_bytes(config.spec)
    context = config.spec.max_context
    return CachedModel(name, str(path), weights, context, needs, needs <= free)


def _cache_bytes(spec: ModelSpec) -> int:
    attention = spec.attention
    per_token = 2 * spec.num_layers * attention.num_kv_heads * attention.head_dim * 2
    return per_token * min(TOKENS, spec.max_context)
