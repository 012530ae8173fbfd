"""Packed weights: those of an earlier start, or made now and kept for the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rootlace.kernels.native.linear import Packer
from rootlace.runtime.config import ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.packed_weights import PackedWeights, pack_weights
from rootlace.runtime.model.weight_cache.folder import WeightCache
from rootlace.runtime.model.weight_cache.key import cache_key

log = logging.getLogger(__name__)


def packed_weights(
    packer: Packer,
    config: ModelConfig,
    executor: ExecutorConfig,
    load: Callable[[], ModelWeights],
    cache: WeightCache | None,
) -> PackedWeights:
    """The weights of the checkpoint that `config` is of, which `load` reads and rounds as
    `executor` says."""
    if cache is None:
        return pack_weights(packer, config.spec, load())
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    files = checkpoint.files
    asked = (executor.quantize, executor.product_paths)
    try:
        if sum(file.stat().st_size for file in files) < cache.least_bytes:
            return pack_weights(packer, config.spec, load())
        key = cache_key(config, files, packer.library, packer.dtype, *asked)
    except OSError as error:  # the library was compiled to a temporary file, say
        log.warning("packed weights are not kept for the next start: %s", error)
        return pack_weights(packer, config.spec, load())
    entry = cache.find(key)
    if entry is not None:
        log.info("weights were packed by an earlier start: %s", cache.folder)
        stored = entry.table.embedding
        return entry.packed(None if stored is None else checkpoint.tensor(stored))
    weights = load()
    packed = pack_weights(packer, config.spec, weights)
    cache.keep(key, packed, str(config.path), weights.embedding_stored)
    return packed
