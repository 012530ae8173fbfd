"""Whether options fit a model, by what its files say.

Imports no torch, so that an option that does not fit is refused at once.
"""

from __future__ import annotations

from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.parallel.shard import why_not
from rootlace.wire.errors import InvalidRequest, UnsupportedModel


def check_options(config: ModelConfig, executor: ExecutorConfig, cache: CacheConfig) -> None:
    """Raises `InvalidRequest`, or `UnsupportedModel` for a cache of few bits, where an option does
    not fit the model."""
    spec, modules = config.spec, config.spec.transformers
    if modules is not None:
        asked = {
            "quantize": executor.quantize != "none",
            "kv_dtype fp8_e4m3": executor.kv_dtype == "fp8_e4m3",
            "adapters": bool(executor.adapters),
        }
        for name in (name for name, given in asked.items() if given):
            raise InvalidRequest(
                f"{name} is not supported for {modules.architecture}, which transformers' modules"
                " run"
            )
    if executor.quantize != "none" and config.quantisation is not None:
        how = config.quantisation.method
        raise InvalidRequest(f"quantize: the model's weights are quantised already ({how})")
    ranks = executor.tensor_parallel
    reason = None if ranks == 1 else why_not(spec, ranks)
    if reason is None and ranks > 1 and executor.kv_dtype == "fp8_e4m3":
        reason = "the scales of kv_dtype fp8_e4m3 are found by running a whole model"
    if reason is None and ranks > 1 and (cache.disk or cache.host_gb):
        reason = "cache_disk and cache_host_gb keep the blocks of a whole model"
    if reason is not None:
        raise InvalidRequest(f"{config.file}: tensor_parallel {ranks}: {reason}")
    length, most = executor.context_length, spec.max_context
    if length is not None and not 0 < length <= most:
        raise InvalidRequest(
            f"context_length {length} is not between 1 and the model's {most} "
            f"({config.file}: max_position_embeddings, and what extends it)"
        )
    check_kv_dtype(executor.kv_dtype, config)


def check_kv_dtype(asked: KVDtype, config: ModelConfig) -> None:
    """Raises `UnsupportedModel` for a cache that this model's keys and values cannot be kept in."""
    attention = config.spec.attention
    if asked != "auto" and attention.latent is not None:
        raise UnsupportedModel(
            f"{config.file}: kv_lora_rank: its cache is not stored in few bits, as kv_dtype "
            f"{asked!r} asks"
        )
    if asked == "int4" and attention.head_dim % 2:
        raise UnsupportedModel(
            f"{config.file}: head_dim {attention.head_dim}: numbers of kv_dtype 'int4' are stored "
            "in pairs"
        )
