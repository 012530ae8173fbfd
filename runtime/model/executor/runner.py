"""The model runner: the executor that has a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from rootlace.kernels.native import library as native
from rootlace.kernels.native.build import NativeUnavailable, Processor, read_processor
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import Launched, SampleRow, StepPlan, StepResult
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import (
    LoadWeights,
    Progress,
    checkpoint_dtype,
    load_weights,
    rounded,
)
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.executor.cpu_setup import on_cpu, why_not_native
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.refusals import (
    check_computable,
    check_gpus,
    check_memory,
)
from rootlace.runtime.model.executor.steps import ModelSetup, Steps
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.kv.pool import free_memory, main_memory
from rootlace.runtime.model.lora import load_adapter
from rootlace.runtime.model.lora_config import read_adapters
from rootlace.runtime.model.options import check_options
from rootlace.runtime.model.weight_cache import WeightCache
from rootlace.wire.errors import InvalidRequest


class ModelRunner:
    """Runs step plans on a decoder (`rootlace.runtime.contracts.plan.Executor`).

    Between steps nothing is kept but the KV memory, the tokens found last and the masks and
    automata that a device has. Not thread-safe.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        steps: Steps,
        cache: torch.Tensor,
        context_length: int,
        kernels: str,
        adapters: tuple[str, ...] = (),
    ) -> None:
        """`cache`: the blocks that plans may name; `kernels`: the name of what runs them;
        `adapters`: the names of those that plans number."""
        self.config = config
        self.device = cache.device
        self.dtype = dtype
        self.kernels = kernels
        self.adapters = adapters
        self._cache = cache
        self._context_length = context_length
        self._steps = steps

    @classmethod
    def load(
        cls,
        executor: ExecutorConfig,
        cache: CacheConfig,
        max_step_tokens: int,
        max_running: int,
        progress: Progress | None = None,
        weights_of: LoadWeights = load_weights,
    ) -> ModelRunner:
        """Read the model folder and allocate the KV pool.

        `progress(what, fraction)` is called while weights are read. `weights_of` gets the weights;
        whoever measures a shape may make them up, then the folder holds `config.json` alone. Raises
        `UnsupportedModel` for the folder's faults, `InvalidRequest` for a configuration that does
        not fit the model or the machine.
        """
        device = chosen_device(executor.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # what kernels are launched on
        config = ModelConfig.read(
            executor.model, executor.allow_pickle, executor.ignore_config_keys
        )
        check_computable(config)
        check_options(config, executor, cache)
        check_gpus(config, executor, cache, device)
        dtype = chosen_dtype(executor, config, cache, loads=True)
        on_gpu = device.type == "cuda"
        available = free_memory(device)[0] if on_gpu else main_memory().available
        kv_dtype = kv_pool.storage_dtype(executor.kv_dtype, dtype)
        divided = executor.tensor_parallel > 1
        packs = not on_gpu and executor.kernels != "reference"
        packs = packs and (
            why_not_native(config, kv_dtype, cache.block_size, executor.tensor_parallel) is None
        )
        if not (divided and on_gpu):  # whose memories are several
            check_memory(config, dtype, executor, cache, available, head_apart=packs)
        if divided:
            # Only here: other models should not wait for what ranks need.
            from rootlace.runtime.model.parallel.leader import lead

            if weights_of is not load_weights:
                raise InvalidRequest("tensor_parallel: other ranks read their own weights")
            leading, own = lead(config, executor, cache, dtype, device, progress)
            return cls(
                *(config, dtype, leading, own.pool, own.context_length, own.kernels.name),
                own.adapters,
            )
        weight_cache = None
        if weights_of is load_weights:  # of others nobody knows what they follow from
            weight_cache = WeightCache.chosen(executor.weight_cache, executor.weight_cache_bytes)
        if executor.quantize != "none":
            weights_of = rounded(weights_of, executor.quantize)
        given = read_adapters(executor.adapters)
        published = config.published or config.spec
        adapters = [load_adapter(one, published, dtype, device) for one in given]
        steps: Steps
        with torch.inference_mode():
            rotary = RotaryEmbedding(config, executor.context_length, device, dtype)
            setup = ModelSetup(
                config, executor, cache, dtype, device, rotary, weights_of, progress, adapters
            )
            if on_gpu:
                from rootlace.runtime.model.executor import gpu_setup

                limits = gpu_setup.StepLimits(max_step_tokens, max_running)
                model = gpu_setup.load(setup)
                steps, pool = gpu_setup.on_gpu(model, limits)
                kernels = model.kernels.name
            else:
                found = on_cpu(setup, weight_cache)
                steps = PlainSteps(found.forward, found.kernels, found.damage)
                pool, kernels = found.pool, found.kernels.name
        names = tuple(one.name for one in adapters)
        return cls(config, dtype, steps, pool, rotary.context_length, kernels, names)

    @property
    def num_blocks(self) -> int:
        return self._cache.shape[2]

    @property
    def block_size(self) -> int:
        return self._cache.shape[3]

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        return self.config.spec.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def kv_cache(self) -> torch.Tensor:
        """See `kv_pool.allocate`; for tests and tools."""
        return self._cache

    def work(self) -> AbstractContextManager[object]:
        """Within it operations on `kv_cache` come behind the steps launched before, and before the
        next one."""
        return self._steps.work()

    # ------------------------------------------------------------ steps

    @property
    def overlaps(self) -> bool:
        return self._steps.overlaps

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step; see `StepPlan` for the order of effects."""
        return self._steps.launch(plan)

    def sample(self, launched: Launched, samples: Sequence[SampleRow]) -> None:
        """Let a late plan's step end."""
        self._steps.sample(launched, samples)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's result. Raises what running it raised."""
        return self._steps.collect(launched)

    def prepare(self) -> bool:
        """Spend a little idle time on what makes later steps faster; False: nothing is left to do.
        Afterwards no plan may be fed from the step before."""
        return self._steps.prepare()

    def stats(self) -> dict[str, int | float]:
        """Counters of how steps were launched; none where that makes no difference."""
        return self._steps.stats()

    def run(self, plan: StepPlan) -> StepResult:
        """A step from beginning to end. Raises RuntimeError for a late plan, which cannot stand
        alone."""
        return self._steps.collect(self._steps.launch(plan))


def chosen_device(name: str) -> torch.device:
    """The device that `ExecutorConfig.device` names. Raises `InvalidRequest`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device {name!r} is not supported, only cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {name!r}: this torch build or machine has no CUDA")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if not 0 <= index < torch.cuda.device_count():
            raise InvalidRequest(f"device {name!r}: there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", index)
    return device


def chosen_dtype(
    executor: ExecutorConfig,
    config: ModelConfig,
    cache: CacheConfig | None = None,
    processor: Processor | None = None,
    *,
    loads: bool = False,
) -> torch.dtype:
    """`auto` is the checkpoint's type; float16 and float64 ones run in float32. Quantised weights
    of these are multiplied in bfloat16 where native kernels are faster at it: on `processor`, None:
    this machine's. `loads`: whether the kernels can be had is tried, which may compile them."""
    if executor.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[executor.dtype]
    if checkpoint_dtype(config) == torch.bfloat16:
        return torch.bfloat16
    quantised = config.quantisation is not None or executor.quantize != "none"
    gpu = executor.device.startswith("cuda") or (
        executor.device == "auto" and torch.cuda.is_available()
    )
    if not quantised or gpu or executor.kernels == "reference":
        return torch.float32
    kv_dtype = kv_pool.storage_dtype(executor.kv_dtype, torch.bfloat16)
    block_size, ranks = (cache or CacheConfig()).block_size, executor.tensor_parallel
    sets = (processor or read_processor()).has
    fast = bool(sets) and sets[0].name not in ("generic", "neon")
    if not fast or why_not_native(config, kv_dtype, block_size, ranks) is not None:
        return torch.float32
    if loads:
        try:
            native.load()
        except NativeUnavailable:  # which is said where they are loaded
            return torch.float32
    return torch.bfloat16
