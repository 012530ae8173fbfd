"""What runs a runner's steps: on a CPU `plain_steps`, on a GPU `device_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, Progress
from rootlace.runtime.model.decoder.interface import Ranks, StepDecoder
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.kv.scales import kv_scaling
from rootlace.runtime.model.lora import Adapter

# Decoders -----------------------------------------------------------------------------------------
#
# The decoder in torch that runs a model: ours, or one of transformers' modules.


def load_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rotary: RotaryEmbedding,
    kernels: KernelSet,
    kv_dtype: torch.dtype,
    weights_of: LoadWeights,
    progress: Progress | None,
    adapters: Sequence[Adapter] = (),
    ranks: Ranks | None = None,
) -> StepDecoder:
    """Read the weights of a model and put them on `device`. `ranks`: see `Decoder`."""
    if config.spec.foreign is not None:
        # Only here: no other model should wait for transformers to be imported.
        from rootlace.runtime.model.transformers_backend.loading import load_foreign

        return load_foreign(
            config, config.spec.foreign, dtype, device, rotary, kernels, kv_dtype, progress
        )
    weights = weights_of(config, dtype, device, progress).resident()
    scales = kv_scaling(config, weights, rotary, dtype, device, kv_dtype)
    return Decoder(config.spec, weights, kernels, scales, adapters, ranks)


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
