"""One rank's part of a model: its weights, what computes with them, and its part of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, Progress, load_weights, rounded
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.forward import Forward, ReferenceForward
from rootlace.runtime.model.decoder.interface import MeetingRanks
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.executor.cpu_setup import on_cpu
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.lora import load_adapter, share_of
from rootlace.runtime.model.lora_config import read_adapters
from rootlace.runtime.model.parallel.shard import Shard


@dataclass(frozen=True)
class RankModel:
    """`kernels`: what samples from logits in main memory."""

    forward: Forward
    pool: torch.Tensor
    kernels: KernelSet
    context_length: int
    adapters: tuple[str, ...]


@torch.inference_mode()
def load_rank(
    config: ModelConfig,
    executor: ExecutorConfig,
    cache: CacheConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    ranks: MeetingRanks,
    progress: Progress | None = None,
) -> RankModel:
    """`config` is the whole model's; threads and memory that `executor` names are the rank's.
    Raises as `load_weights` and `on_cpu` do, and `UnsupportedModel` for a quantised weight that has
    no scales of its own for the rank's part of it."""
    own = replace(config, spec=shard.own)

    def weights_of(
        _: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> ModelWeights:
        return load_weights(config, dtype, device, progress, shard)

    read: LoadWeights = weights_of
    if executor.quantize != "none":
        read = rounded(weights_of, executor.quantize)
    published = config.published or config.spec
    adapters = [
        share_of(load_adapter(one, published, dtype, device), shard)
        for one in read_adapters(executor.adapters)
    ]
    names = tuple(one.name for one in adapters)
    rotary = RotaryEmbedding(own, executor.context_length, device, dtype)
    if device.type == "cpu":
        # Of two kinds of products, all ranks take the same one.
        executor = replace(executor, product_paths="processor")
        found = on_cpu(
            *(own, dtype, rotary, cache, executor, read, progress, adapters), ranks=ranks
        )
        return RankModel(found.forward, found.pool, found.kernels, rotary.context_length, names)
    from rootlace.runtime.model.executor import gpu_setup

    model = gpu_setup.load(
        *(own, dtype, device, rotary, cache, executor, read, progress, adapters, ranks)
    )
    blocks = kv_pool.choose_num_blocks(
        *(own, cache, executor.kv_memory_bytes, model.context_length, model.kv_dtype)
    )
    blocks = ranks.agree(blocks)
    pool = kv_pool.allocate(own, blocks, cache.block_size, device, model.kv_dtype)
    forward = ReferenceForward(model.decoder, model.kernels, model.inputs, pool)
    return RankModel(forward, pool, REFERENCE, model.context_length, names)
