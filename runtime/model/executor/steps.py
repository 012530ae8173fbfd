"""What a model is set up from, and what runs its steps: `plain_steps` or `device_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, Progress
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.interface import StepDecoder
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.kv.scales import kv_scaling
from rootlace.runtime.model.lora import Adapter
from rootlace.runtime.model.parallel.group import Group

# Setup --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSetup:
    """A model and how it is to be run. `ranks`: where `config` and weights are one rank's, all."""

    config: ModelConfig
    executor: ExecutorConfig
    cache: CacheConfig
    dtype: torch.dtype
    device: torch.device
    rotary: RotaryEmbedding
    weights_of: LoadWeights
    progress: Progress | None = None
    adapters: Sequence[Adapter] = ()
    ranks: Group | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """How keys and values are stored."""
        return kv_pool.storage_dtype(self.executor.kv_dtype, self.dtype)

    def weights(self) -> ModelWeights:
        """Read the weights."""
        return self.weights_of(self.config, self.dtype, self.device, self.progress)

    def decoder(self, kernels: KernelSet) -> StepDecoder:
        """Read the weights of a model that our torch decoder or transformers' modules run."""
        config, dtype, device, rotary = self.config, self.dtype, self.device, self.rotary
        if config.spec.transformers is not None:
            # Only here: no other model should wait for transformers to be imported.
            from rootlace.runtime.model.transformers_backend.loading import load_transformers

            return load_transformers(
                *(config, config.spec.transformers, dtype, device, rotary, kernels, self.kv_dtype),
                self.progress,
            )
        weights = self.weights().resident()
        scales = kv_scaling(config, weights, rotary, dtype, device, self.kv_dtype)
        return Decoder(config.spec, weights, kernels, scales, self.adapters, self.ranks)

    def inputs(self, kernels: KernelSet) -> StepInputBuilder:
        """Build the maker of decoder inputs."""
        block_size = self.cache.block_size
        return StepInputBuilder(
            self.config.spec, kernels, self.rotary, block_size, self.dtype, self.device
        )


# Steps --------------------------------------------------------------------------------------------


class Steps(Protocol):
    """`launch`, `sample`, `collect` and `overlaps` are those of `Executor`."""

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, step: Any, samples: Sequence[SampleRow]) -> None: ...

    def collect(self, step: Any) -> StepResult: ...

    def work(self) -> AbstractContextManager[object]:
        """Within it operations on tensors come behind the steps launched before, and before the
        next one."""

    def prepare(self) -> bool:
        """See `ModelRunner.prepare`."""

    def stats(self) -> dict[str, int | float]:
        """See `ModelRunner.stats`."""
