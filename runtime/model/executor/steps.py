"""Define a model's setup, and the interface of `plain_steps` and `device_steps`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Progress
from rootlace.runtime.model.decoder.rotations import chosen_context
from rootlace.wire.errors import UnsupportedModel

if TYPE_CHECKING:
    from rootlace.runtime.model.checkpoint.loader import LoadWeights
    from rootlace.runtime.model.checkpoint.weights import ModelWeights
    from rootlace.runtime.model.decoder.rope import RotaryEmbedding
    from rootlace.runtime.model.lora import Adapter
    from rootlace.runtime.model.parallel.group import Group

# Setup --------------------------------------------------------------------------------------------


class Beside(msgspec.Struct, frozen=True):
    """Memory in bytes that a draft model or a head takes beside the model: its `weights`, and its
    own `block` for each block of the pool."""

    weights: int
    block: int


NOTHING = Beside(0, 0)


class ModelSetup(msgspec.Struct, frozen=True, dict=True):
    """Model and the options of its run. `device`: torch's name. `weights_of`: returns the weights
    before they are rounded as `executor` says; None: read the checkpoint. `ranks`: the group of all
    ranks, if this setup is one rank's. `beside`: memory of a draft model."""

    config: ModelConfig
    executor: ExecutorConfig
    cache: CacheConfig
    dtype: np.dtype[Any]
    device: str = "cpu"
    weights_of: LoadWeights | None = None
    progress: Progress | None = None
    adapters: Sequence[Adapter] = ()
    ranks: Group | None = None
    beside: Beside = NOTHING

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        """Dtype in which keys and values are stored."""
        return kv_pool.storage_dtype(self.executor.kv_dtype, self.dtype)

    @cached_property
    def context_length(self) -> int:
        """Context length in tokens: see `chosen_context`."""
        return chosen_context(self.config, self.executor.context_length)

    def choose_num_blocks(
        self, measured: Callable[[], int] | None = None, available: int | None = None
    ) -> int:
        """Return the number of blocks of the pool: as configured, else as many as `kv_memory_bytes`
        or the free memory holds, with a draft model's blocks.

        `measured`: returns the bytes of a device's memory that the cache may take; None: the cache
        is in main memory, with `available` bytes free (None: as many as now). Raises
        `UnsupportedModel` if there is no memory for even one full block.
        """
        size, chosen = self.cache.block_size, self.executor.kv_memory_bytes
        if self.cache.num_blocks is not None:
            return self.cache.num_blocks
        block = kv_pool.block_bytes(self.config, size, self.kv_dtype) + self.beside.block
        if chosen is not None:
            memory = chosen
        elif measured is not None:
            memory = max(measured(), 0)
        else:
            available = kv_pool.main_memory().available if available is None else available
            contexts = kv_pool.FULL_CONTEXTS * -(-self.context_length // size) * block
            memory = min(int(available * kv_pool.CPU_SHARE), kv_pool.CPU_LIMIT, contexts)
        blocks = memory // block
        if blocks < 1:
            raise UnsupportedModel(
                f"{self.config.path}: no memory for the KV cache: {memory} bytes are available, "
                f"one block of {size} tokens takes {block}"
            )
        return int(blocks)

    # The methods below need torch: a start from the weight cache calls none of them.

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
        from rootlace.runtime.model.checkpoint.loader import balanced, load_weights, rounded

        source = self.weights_of or load_weights

        def read(config: ModelConfig, *given: Any) -> ModelWeights:
            weights = source(config, *given)
            if kv_pool.balances_keys(self.executor):
                weights = balanced(weights, config.spec.attention)
            return weights

        weights_of: LoadWeights = read
        if self.executor.quantize != "none":
            weights_of = rounded(read, self.executor.quantize)
        dtype, device = torch_dtype(self.dtype), torch.device(self.device)
        return weights_of(self.config, dtype, device, self.progress)


# Steps --------------------------------------------------------------------------------------------


class Steps(Protocol):
    """Interface to run steps: `launch`, `sample`, `collect` and `overlaps` are those of `Executor`.
    By the defaults of the other methods, each step is computed at its launch."""

    overlaps: bool = False

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, step: Any, samples: Sequence[SampleRow]) -> None: ...

    def collect(self, step: Any) -> StepResult: ...

    def work(self) -> AbstractContextManager[object]:
        """Return a context in which operations on tensors run behind the steps launched before, and
        before the next one."""
        return nullcontext()

    def prepare(self) -> bool:
        """Spend a little idle time to make later steps faster; False: nothing is left to do.
        Afterwards no plan may be fed from the step before."""
        return False

    def stats(self) -> dict[str, int | float]:
        """Return counters of how steps were launched; empty if there is only one way."""
        return {}
