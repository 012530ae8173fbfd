"""One rank's part of a model: its weights, then what computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rootlace.kernels import KernelSet, kernels_for
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.adapters.config import read_adapters
from rootlace.runtime.model.adapters.weights import Adapter, load_adapter, share_of
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, Progress, load_weights
from rootlace.runtime.model.checkpoint.rounding import rounded
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.forward import ReferenceForward
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.kv.main_memory import main_memory
from rootlace.runtime.model.kv.scales import kv_scaling
from rootlace.runtime.model.parallel.group import Group
from rootlace.runtime.model.parallel.shard import Shard
from rootlace.wire.errors import InvalidRequest


@dataclass(frozen=True)
class LoadedShard:
    """Weights in memory. `config` has the spec of the rank."""

    config: ModelConfig
    executor: ExecutorConfig
    cache: CacheConfig
    shard: Shard
    weights: ModelWeights
    rotary: RotaryEmbedding
    adapters: Sequence[Adapter]
    kernels: KernelSet
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_dtype(self) -> torch.dtype:
        return kv_pool.storage_dtype(self.executor.kv_dtype, self.dtype)

    def blocks(self) -> int:
        """Blocks of a KV pool for which this rank has room, where all ranks share the memory that
        the configuration names, or is free."""
        count, memory = self.shard.count, self.executor.kv_memory_bytes
        return kv_pool.choose_num_blocks(
            self.config,
            self.cache,
            None if memory is None else memory // count,
            self.rotary.context_length,
            self.kv_dtype,
            available=main_memory().available // count,
        )

    def forward(self, group: Group, blocks: int) -> tuple[ReferenceForward, torch.Tensor]:
        """What computes its part of a step, and its KV pool. Raises `InvalidRequest` without room
        for that."""
        spec, size = self.config.spec, self.cache.block_size
        scales = kv_scaling(
            self.config, self.weights, self.rotary, self.dtype, self.device, self.kv_dtype
        )
        decoder = Decoder(spec, self.weights, self.kernels, scales, self.adapters, group)
        inputs = StepInputBuilder(spec, self.kernels, self.rotary, size, self.dtype, self.device)
        try:
            pool = kv_pool.allocate(self.config, blocks, size, self.device, self.kv_dtype)
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise InvalidRequest(
                f"{self.device} has no room for a rank's KV cache of {blocks} blocks of {size} "
                f"tokens: {error}"
            ) from error
        return ReferenceForward(decoder, self.kernels, inputs, pool), pool


@torch.inference_mode()
def load_shard(
    config: ModelConfig,
    executor: ExecutorConfig,
    cache: CacheConfig,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> LoadedShard:
    """Read what one rank has of a model. `config` is the whole model's. Raises as `load_weights`
    does, and `UnsupportedModel` for a quantised weight that has no scales of its own for the rank's
    part of it."""
    shard = Shard(config.spec, rank, executor.tensor_parallel)
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
    kernels = REFERENCE
    if device.type == "cuda" and executor.kernels != "reference":
        kernels = kernels_for(device) if config.spec.attention.latent is None else REFERENCE
    rotary = RotaryEmbedding(own, executor.context_length, device, dtype)
    if device.type == "cuda":
        rotary.tabulate()
    weights = read(own, dtype, device, progress).resident()
    return LoadedShard(
        own, executor, cache, shard, weights, rotary, adapters, kernels, dtype, device
    )
