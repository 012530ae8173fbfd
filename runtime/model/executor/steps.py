"""What a model is set up from, and what runs its steps: `plain_steps` or `device_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Progress
from rootlace.runtime.model.decoder.rotations import chosen_context

if TYPE_CHECKING:
    from rootlace.runtime.model.checkpoint.loader import LoadWeights
    from rootlace.runtime.model.checkpoint.weights import ModelWeights
    from rootlace.runtime.model.decoder.rope import RotaryEmbedding
    from rootlace.runtime.model.lora import Adapter
    from rootlace.runtime.model.parallel.group import Group

# Setup --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Bytes that a draft model or a head takes beside the model: its `weights`, and a `block` of
    its own for each block of the pool."""

    weights: int
    block: int


@dataclass(frozen=True)
class ModelSetup:
    """A model and how it is to be run. `device`: as torch names it. `weights_of`: gets the weights,
    before they are rounded as `executor` says; None: reads the checkpoint. `ranks`: where `config`
    and weights are one rank's, all. `beside`: what a draft model takes of the memory."""

    config: ModelConfig
    executor: ExecutorConfig
    cache: CacheConfig
    dtype: np.dtype[Any]
    device: str = "cpu"
    weights_of: LoadWeights | None = None
    progress: Progress | None = None
    adapters: Sequence[Adapter] = ()
    ranks: Group | None = None
    beside: Beside | None = None

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        """How keys and values are stored."""
        return kv_pool.storage_dtype(self.executor.kv_dtype, self.dtype)

    @cached_property
    def context_length(self) -> int:
        """See `chosen_context`."""
        return chosen_context(self.config, self.executor.context_length)

    # What follows needs torch: packed weights of an earlier start do not.

    @cached_property
    def rotary(self) -> RotaryEmbedding:
        """Build the rotations of this context."""
        import torch

        from rootlace.kernels.arrays import torch_dtype
        from rootlace.runtime.model.decoder.rope import RotaryEmbedding

        dtype, device = torch_dtype(self.dtype), torch.device(self.device)
        return RotaryEmbedding(self.config, self.context_length, device, dtype)

    def weights(self) -> ModelWeights:
        """Read the weights."""
        import torch

        from rootlace.kernels.arrays import torch_dtype
        from rootlace.runtime.model.checkpoint.loader import load_weights, rounded

        read = self.weights_of or load_weights
        if self.executor.quantize != "none":
            read = rounded(read, self.executor.quantize)
        dtype, device = torch_dtype(self.dtype), torch.device(self.device)
        return read(self.config, dtype, device, self.progress)


# Steps --------------------------------------------------------------------------------------------


class Steps(Protocol):
    """`run`, `launch`, `sample`, `collect` and `overlaps` are those of `Executor`."""

    @property
    def overlaps(self) -> bool: ...

    def run(self, plan: StepPlan) -> StepResult: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, step: Any, samples: Sequence[SampleRow]) -> None: ...

    def collect(self, step: Any) -> StepResult: ...

    def work(self) -> AbstractContextManager[object]:
        """Within it operations on tensors come behind the steps launched before, and before the
        next one."""

    def prepare(self) -> bool:
        """Spend a little idle time on what makes later steps faster; False: nothing is left to do.
        Afterwards no plan may be fed from the step before."""

    def stats(self) -> dict[str, int | float]:
        """Counters of how steps were launched; none where that makes no difference."""
