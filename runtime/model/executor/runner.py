"""Run a model as the engine's executor, and copy blocks of its pool to the stores."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from rootlace.kernels.native import library as native
from rootlace.kernels.native.build import NativeUnavailable, Processor, read_processor
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.block_store import LOAD, SAVE, StoreMemory
from rootlace.runtime.contracts.plan import Launched, StepPlan, StepResult
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.eagle_head import HeadConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint, Progress, checkpoint_dtype
from rootlace.runtime.model.executor.cpu_setup import LoadedModel, on_cpu, why_not_native
from rootlace.runtime.model.executor.draft_head import head_beside, load_head
from rootlace.runtime.model.executor.draft_model import (
    DraftDecoder,
    check_drafted_for,
    load_draft,
    taken_beside,
)
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.refusals import check_computable, check_gpus, check_memory
from rootlace.runtime.model.executor.steps import Beside, ModelSetup, Steps
from rootlace.runtime.model.kv_pool import free_memory, main_memory
from rootlace.runtime.model.options import (
    check_options,
    check_same_tokens,
    draft_executor,
    read_adapters,
    read_draft,
)
from rootlace.runtime.model.weight_cache import WeightCache, cache_key
from rootlace.wire.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from rootlace.runtime.model.checkpoint.loader import LoadWeights


class ModelRunner:
    """Executor that runs step plans on a decoder (`rootlace.runtime.contracts.plan.Executor`).

    Between steps the runner keeps the KV memory, the last tokens, and a device's masks and
    automata. Not thread-safe.
    """

    def __init__(
        self,
        setup: ModelSetup,
        steps: Steps,
        pool: Any,
        kernels: str,
        adapters: tuple[str, ...] = (),
        draft: DraftDecoder | None = None,
    ) -> None:
        """`pool`: the blocks that plans may use, a NumPy array or a GPU's tensor. `kernels`: the
        kernels' name. `adapters`: the names of the adapters that plans number. `draft`: the draft
        model, if any."""
        self.config = setup.config
        self.device = setup.device
        self.dtype = setup.dtype
        self.context_length = setup.context_length
        self.kernels = kernels
        self.adapters = adapters
        self.pool = pool
        self.draft = draft
        self._steps = steps
        # See `Steps`.
        self.launch, self.sample, self.collect = steps.launch, steps.sample, steps.collect
        self.prepare, self.stats = steps.prepare, steps.stats
        if draft is not None:
            self.launch = self._launch_noted

    @classmethod
    def load(
        cls,
        executor: ExecutorConfig,
        cache: CacheConfig,
        max_step_tokens: int,
        max_running: int,
        progress: Progress | None = None,
        weights_of: LoadWeights | None = None,
        config: ModelConfig | None = None,
    ) -> ModelRunner:
        """Read the model folder and allocate the KV pool.

        `progress(part, fraction)` is called while weights are read. `weights_of` returns the
        weights; measurements may make weights up, with a folder of `config.json` alone. `config`:
        the model's configuration, if already read. Raises `UnsupportedModel` for the folder's
        faults, `InvalidRequest` for a configuration that does not fit the model or the machine.
        """
        device = chosen_device(executor.device)
        on_gpu = device != "cpu"
        if config is None:
            config = ModelConfig.read(executor.model, ignored=executor.ignore_config_keys)
        config = replace(config, allow_pickle=executor.allow_pickle)
        check_computable(config)
        check_options(config, executor, cache)
        check_gpus(config, executor, cache, device)
        dtype = chosen_dtype(executor, config, cache, loads=True)
        setup = ModelSetup(config, executor, cache, dtype, device, weights_of, progress)
        available = free_memory(device)[0] if on_gpu else main_memory().available
        ranks = executor.tensor_parallel
        packs = not on_gpu and executor.kernels != "reference"
        packs = packs and why_not_native(config, setup.kv_dtype, cache.block_size, ranks) is None
        draft = None
        if executor.draft_model:
            draft = draft_setup(setup, device, native=packs)
            check_same_tokens(config, draft.config)
            setup = replace(setup, beside=draft_beside(draft))
            available -= setup.beside.weights + setup.beside.block * (cache.num_blocks or 1)
        if ranks == 1 or not on_gpu:  # each GPU has its own memory
            check_memory(setup, available, head_apart=packs)
        adapters = read_adapters(executor.adapters)
        names = tuple(one.name for one in adapters)
        if ranks > 1:
            # Only here: other models should not wait for the ranks' imports.
            from rootlace.runtime.model.parallel.ranks import lead

            if weights_of is not None:
                raise InvalidRequest("tensor_parallel: other ranks read their own weights")
            leading, local = lead(setup)
            return cls(setup, leading, local.pool, local.kernels, names)
        if adapters:
            from rootlace.runtime.model.lora import load_adapters

            published = config.published or config.spec
            setup = replace(setup, adapters=load_adapters(adapters, published, dtype, device))
        if on_gpu:
            from rootlace.runtime.model.executor import device_steps

            return cls(setup, *device_steps.load_on_gpu(setup, max_step_tokens, max_running), names)
        weight_cache = None
        if weights_of is None:  # the key does not cover other weights
            weight_cache = WeightCache.chosen(executor.weight_cache, executor.weight_cache_bytes)
        found = on_cpu(setup, weight_cache)
        plain = PlainSteps(found.forward, found.sampling, found.damage)
        drafting = None if draft is None else load_drafting(draft, found, weight_cache)
        return cls(setup, plain, found.pool, found.kernels, names, drafting)

    @property
    def num_blocks(self) -> int:
        blocks: int = self.pool.shape[2]
        return blocks

    @property
    def block_size(self) -> int:
        slots: int = self.pool.shape[3]
        return slots

    @property
    def vocab_size(self) -> int:
        return self.config.spec.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def kv_cache(self) -> torch.Tensor:
        """Pool as a tensor, for tests and tools."""
        if not isinstance(self.pool, np.ndarray):
            return self.pool
        from rootlace.kernels.arrays import as_tensor

        return as_tensor(self.pool)

    def work(self) -> AbstractContextManager[object]:
        """Return a context in which operations on `pool` run behind the steps launched before, and
        before the next one."""
        return self._steps.work()

    # ------------------------------------------------------------ steps

    @property
    def overlaps(self) -> bool:
        return self._steps.overlaps

    def _launch_noted(self, plan: StepPlan) -> Launched:
        assert self.draft is not None
        step = self._steps.launch(plan)
        self.draft.launched(plan)
        return step

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a whole step. Raises RuntimeError for a late plan."""
        return self.collect(self.launch(plan))


def chosen_device(name: str) -> str:
    """Return the device that `ExecutorConfig.device` names: "cpu", or "cuda:" and a number. Torch
    is not imported on a machine without a GPU driver. Raises `InvalidRequest`."""
    if name == "auto":
        name = "cuda" if _has_gpu() else "cpu"
    if name == "cpu":
        return name
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device {name!r} is not supported, only cpu and cuda")
    if device.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise InvalidRequest(f"device {name!r}: this torch build or machine has no CUDA")
    index = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= index < torch.cuda.device_count():
        raise InvalidRequest(f"device {name!r}: there are {torch.cuda.device_count()} GPUs")
    return f"cuda:{index}"


def _has_gpu() -> bool:
    """Tell whether torch would compute on a GPU."""
    if not has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Tell whether there is a driver that torch could use: NVIDIA's, or AMD's (/dev/kfd), whose
    GPUs torch calls "cuda", too."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()


def chosen_dtype(
    executor: ExecutorConfig,
    config: ModelConfig,
    cache: CacheConfig | None = None,
    processor: Processor | None = None,
    *,
    loads: bool = False,
) -> np.dtype[Any]:
    """Return the activations' dtype. `auto`: the checkpoint's dtype; float16 and float64 become
    float32. Quantised weights of these dtypes use bfloat16 if native kernels are faster with it on
    `processor` (None: this machine's). `loads`: try to load the kernels, which may compile them."""
    if executor.dtype != "auto":
        return {"float32": FLOAT32, "bfloat16": BFLOAT16}[executor.dtype]
    if checkpoint_dtype(config) == BFLOAT16:
        return BFLOAT16
    quantised = config.quantisation is not None or executor.quantize != "none"
    gpu = executor.device.startswith("cuda") or (executor.device == "auto" and _has_gpu())
    if not quantised or gpu or executor.kernels == "reference":
        return FLOAT32
    kv_dtype = kv_pool.storage_dtype(executor.kv_dtype, BFLOAT16)
    block_size, ranks = (cache or CacheConfig()).block_size, executor.tensor_parallel
    sets = (processor or read_processor()).has
    fast = bool(sets) and sets[0].name not in ("generic", "neon")
    if not fast or why_not_native(config, kv_dtype, block_size, ranks) is not None:
        return FLOAT32
    if loads:
        try:
            native.load()
        except NativeUnavailable:  # the load of the model reports the reason
            return FLOAT32
    return BFLOAT16


def draft_setup(setup: ModelSetup, device: str, *, native: bool) -> ModelSetup:
    """Return the setup of a draft model or head for a model on `device`. Raises as `read_draft` and
    `check_drafted_for` do."""
    read = read_draft(setup.config, setup.executor, setup.cache)
    executor = draft_executor(setup.executor, read)
    if isinstance(read, HeadConfig):  # a head reads the model's states
        dtype = chosen_dtype(setup.executor, setup.config, setup.cache)
    else:
        dtype = chosen_dtype(executor, read, setup.cache)
    draft = ModelSetup(read, executor, setup.cache, dtype, progress=setup.progress)
    check_drafted_for(draft, device, native=native)
    return draft


def draft_beside(draft: ModelSetup) -> Beside:
    """Return the memory that a draft model or a head takes."""
    return head_beside(draft) if isinstance(draft.config, HeadConfig) else taken_beside(draft)


def load_drafting(
    draft: ModelSetup, model: LoadedModel, weight_cache: WeightCache | None
) -> DraftDecoder:
    """Load a draft model or a head beside `model`; see `load_draft` and `load_head`."""
    if isinstance(draft.config, HeadConfig):
        return load_head(draft, model)
    return load_draft(draft, model, weight_cache)


# Identity -----------------------------------------------------------------------------------------
#
# Identify all inputs besides tokens that decide the bytes of blocks kept across processes.


def kv_identity(runner: ModelRunner, executor: ExecutorConfig, cache: CacheConfig) -> bytes:
    """Return 32 bytes that identify the cached blocks' origin: configuration, weights, code,
    kernels, device and the layout of a block. Raises OSError for a file that cannot be read."""
    config = runner.config
    name, transformers = runner.device, ""
    if name != "cpu":
        import torch

        name = torch.cuda.get_device_name(name)
    if config.spec.transformers is not None:
        from importlib.metadata import version  # only here: it takes a megabyte

        transformers = version("transformers")
    key = cache_key(
        config,
        Checkpoint(config.path, config.allow_pickle).files,
        native.load() if runner.kernels == "native" else None,
        runner.dtype,
        *(executor.quantize, executor.kv_dtype, runner.kernels, name),
        str(kv_pool.balances_keys(executor)),
        transformers,
        *map(str, (cache.block_size, runner.context_length, tuple(runner.pool.shape[3:]))),
    )
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def adapter_contents(executor: ExecutorConfig) -> dict[str, bytes]:
    """Return a digest of each adapter's files, for `kv_space`: changed files lead to other spaces.
    Raises OSError for a file that cannot be read."""
    contents = {}
    for adapter in read_adapters(executor.adapters):
        digest = hashlib.blake2b(digest_size=32)
        for file in sorted(adapter.folder.glob("adapter*")):
            digest.update(file.name.encode() + file.read_bytes())
        contents[adapter.name] = digest.digest()
    return contents


# Block mover --------------------------------------------------------------------------------------


class BlockMover:
    """Mover of blocks: makes moves in their order, behind the steps launched before.

    Copies between a GPU and pinned memory are queued without waiting; a later call finds out that
    they are done. Other copies are made at once.
    """

    def __init__(
        self,
        pool: Any,
        stores: Sequence[StoreMemory],
        work: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        draft: DraftDecoder | None = None,
    ) -> None:
        """`pool`, `work` and `draft`: those of the runner."""
        planes = pool.shape[0] * pool.shape[1]
        self._on_gpu = bool(getattr(pool, "is_cuda", False))
        whole: Any = pool if self._on_gpu else np.asarray(pool)
        flat = whole.reshape(planes, pool.shape[2], -1)
        self._planes: Any = _tensor_bytes(flat) if self._on_gpu else flat.view(np.uint8)
        self._stores = stores
        self._work = work
        self._draft = draft
        self._filling: list[tuple[torch.cuda.Event, list[tuple[StoreMemory, int]]]] = []
        """Events behind queued copies, each with the slots that the copies fill."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers, keys and values."""
        size: int = self._planes.shape[0] * self._planes.shape[2]
        return size

    def move(self, moves: np.ndarray) -> None:
        """Make `moves`: see `contracts.block_store`."""
        self._settle()
        if not len(moves):
            return
        if self._draft is not None:
            self._draft.moved(moves)
        with self._work():
            filled = self._move(moves)
            if self._on_gpu and filled:
                import torch

                event = torch.cuda.Event()
                event.record()
                self._filling.append((event, filled))
                return
        for store, slot in filled:
            store.filled(slot)

    def _move(self, moves: np.ndarray) -> list[tuple[StoreMemory, int]]:
        """Make the moves; return the stores' slots that are filled once the device is done."""
        filled: list[tuple[StoreMemory, int]] = []
        for kind, at, slot, other in moves.tolist():
            store = self._stores[at]
            if kind == SAVE:
                self._save(other, store.buffer(slot))
                filled.append((store, slot))
            elif kind == LOAD:
                self._load(other, store.fetched(slot))
                store.loaded(slot)
            else:
                below = self._stores[at + 1]
                below.buffer(other)[:] = store.fetched(slot)
                below.filled(other)
        return filled

    def _save(self, block: int, buffer: np.ndarray) -> None:
        """Copy a block to a buffer: [planes, bytes], as blocks lie in the pool."""
        there = buffer.reshape(len(self._planes), -1)
        if self._on_gpu:
            _tensor(there).copy_(self._planes[:, block], non_blocking=True)
        else:
            there[:] = self._planes[:, block]

    def _load(self, block: int, buffer: np.ndarray) -> None:
        """Copy a buffer to a block; returns once memory that is not pinned was read."""
        there = buffer.reshape(len(self._planes), -1)
        if self._on_gpu:
            self._planes[:, block].copy_(_tensor(there), non_blocking=True)
        else:
            self._planes[:, block] = there

    def _settle(self) -> None:
        while self._filling and self._filling[0][0].query():
            for store, slot in self._filling.pop(0)[1]:
                store.filled(slot)

    def finish(self) -> None:
        """Wait for all work queued on the device."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize(self._planes.device)
        self._settle()

    def load_seconds(self, buffer: np.ndarray, blocks: int) -> float:
        """Measure the seconds to load a block from a buffer; overwrites the pool's first block."""
        begun = 0.0
        for count in (1, blocks):  # the first is a warm-up
            self.finish()
            begun = time.perf_counter()
            with self._work():
                for _ in range(count):
                    self._load(0, buffer)
            self.finish()
        return (time.perf_counter() - begun) / blocks


def _tensor(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)


def _tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.uint8)
