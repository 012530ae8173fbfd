"""Reports of `rootlace doctor` (machine and model) and `rootlace models` (models present)."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
import torch
from msgspec.structs import replace

from rootlace.kernels.arrays import torch_dtype
from rootlace.kernels.dispatch import kernels_for, why_not_triton
from rootlace.kernels.native.build import FOLDER, NativeUnavailable, Processor
from rootlace.kernels.native.library import load_best
from rootlace.runtime.config import CacheConfig, ExecutorConfig, SchedulerConfig
from rootlace.runtime.doctor.ceilings import (
    READ_BYTES,
    Ceilings,
    Elements,
    Machine,
    Row,
    attention_rate,
    gpu_copy_bandwidth,
    gpu_product_rate,
    product_rates,
    read_bandwidth,
    read_machine,
    step_work,
)
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.executor.cpu_setup import why_not_native
from rootlace.runtime.model.executor.refusals import (
    check_computable,
    check_gpu_kernels,
    check_without_native,
)
from rootlace.runtime.model.executor.runner import (
    chosen_device,
    chosen_dtype,
    draft_beside,
    draft_setup,
)
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.hub.download import snapshots
from rootlace.runtime.model.hub.local import PackagedFile, packaged_models
from rootlace.runtime.model.kv_pool import block_bytes, free_memory, kv_bytes, main_memory
from rootlace.runtime.model.options import check_options, check_same_tokens
from rootlace.runtime.model.weight_cache import DamagedEntry, Entry, WeightCache
from rootlace.wire.errors import InvalidRequest, UnsupportedModel

# Attempts -----------------------------------------------------------------------------------------
#
# Measurements that may fail for lack of memory, and the errors of failed ones.


Found = TypeVar("Found")


class Attempts:
    """`faults`: a line for each measurement that failed."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def __call__(self, what: str, measure: Callable[[], Found]) -> Found | None:
        """Return the result of `measure`; None if it fails for lack of memory: torch raises
        RuntimeError, native kernels MemoryError, the system OSError."""
        try:
            return measure()
        except (OSError, MemoryError, RuntimeError) as error:
            message = str(error).strip() or type(error).__name__
            self.faults.append(f"{what}: {message.splitlines()[0]}")
            return None


# Forecast -----------------------------------------------------------------------------------------
#
# Forecast of a model's needs and best speed on a machine, from the machine's ceilings.


PROMPTS = (256, 1024, 4096)
"""Prompt lengths in tokens for the forecast of the first token."""
REQUESTS = (1, 8, 64)
"""Numbers of requests that decode at once."""
CONTEXT = 1024
"""Context of each decoding request, in tokens."""


class Capacity(msgspec.Struct, frozen=True):
    """Tokens that fit: into the context, into the KV cache, into one step."""

    context: int
    cache: int
    step: int


class FirstToken(msgspec.Struct, frozen=True):
    prompt: int
    seconds: float


class Decoding(msgspec.Struct, frozen=True):
    """`requests` at once, each of `context` tokens, give `tokens_per_second` all together."""

    requests: int
    context: int
    tokens_per_second: float


class Forecast(msgspec.Struct, frozen=True):
    first_tokens: tuple[FirstToken, ...]
    decoding: tuple[Decoding, ...]


def forecast(
    spec: ModelSpec, element: Elements, ceilings: Ceilings, capacity: Capacity
) -> Forecast:
    """Return the forecast for all of `PROMPTS` and `REQUESTS` that there is room for. The model's
    longest prompt takes the place of longer ones.

    A step takes as long as its products and its attention at their rates, or as its reading at the
    bandwidth, whichever is longer. A real one takes longer: what lies between products and
    attention is not counted, nor what the host does, which is most of a very small model's step.
    """
    longest = min(capacity.context, capacity.cache)
    prompts = sorted({min(prompt, longest) for prompt in PROMPTS})
    context = min(CONTEXT, longest)
    requests = [count for count in REQUESTS if count * context <= capacity.cache]
    return Forecast(
        tuple(
            FirstToken(prompt, prompt_seconds(spec, element, ceilings, prompt, capacity.step))
            for prompt in prompts
        ),
        tuple(
            Decoding(
                count,
                context,
                count / step_seconds(spec, element, ceilings, [Row(1, context)] * count),
            )
            for count in requests
        ),
    )


def prompt_seconds(
    spec: ModelSpec, element: Elements, ceilings: Ceilings, prompt: int, step_tokens: int
) -> float:
    """Seconds of the steps that compute a prompt of which nothing is cached."""
    return sum(
        step_seconds(spec, element, ceilings, [Row(min(step_tokens, prompt - start), end)])
        for start in range(0, prompt, step_tokens)
        for end in [min(start + step_tokens, prompt)]
    )


def step_seconds(spec: ModelSpec, element: Elements, ceilings: Ceilings, rows: list[Row]) -> float:
    work = step_work(spec, rows, element)
    computing = work.products / ceilings.product_rate + work.attention / ceilings.attention_rate
    return max(computing, work.read / ceilings.read_bandwidth)


# Foreign load -------------------------------------------------------------------------------------
#
# Processor time of other programs during a measurement.


class ForeignLoad:
    """Cores that other programs kept busy during a measurement, which is good only near zero. "Own"
    is the process `pid` (None: this one) and its descendants."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._start = (time.monotonic(), self._machine(), self._own())

    def cores(self) -> float:
        start, machine, own = self._start
        elapsed = time.monotonic() - start
        return max(0.0, (self._machine() - machine) - (self._own() - own)) / max(elapsed, 1e-9)

    def own_seconds(self) -> float:
        """CPU seconds that the own processes took meanwhile."""
        return self._own() - self._start[2]

    @staticmethod
    def _machine() -> float:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts what guests take as user and nice, too.
        twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return sum(times) - idle - twice

    def _own(self) -> float:
        """Return CPU seconds of the own processes, with those of ended processes (on Linux)."""
        total = 0.0
        try:
            head = psutil.Process(self._pid)
            family = [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return total
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total


# Kernel choice ------------------------------------------------------------------------------------
#
# Which kernels run, and why no better ones.


@dataclass(frozen=True)
class KernelChoice:
    """`name` of the kernel set. `instructions`: what native kernels compute with, `prebuilt`:
    whether they came with the package. `why_not_better`: for each better choice why it is not
    taken, in a line."""

    name: str
    instructions: str = ""
    prebuilt: bool = False
    why_not_better: tuple[str, ...] = ()
    library: ctypes.CDLL | None = field(default=None, repr=False)


def choose_on_cpu(processor: Processor, option: str, report: Callable[[str], None]) -> KernelChoice:
    """Return the kernels that `ExecutorConfig.kernels` gives on this CPU. `report` is told that a
    compilation begins. Raises `InvalidRequest` for requested kernels that are not available."""
    if option == "reference":
        return KernelChoice("reference", why_not_better=("native: the reference is asked for",))
    try:
        library, refused = load_best(report)
    except NativeUnavailable as error:
        check_without_native(option, str(error))
        return KernelChoice("reference", why_not_better=(f"native: {error}",))
    instructions = library.rl_instructions().decode()
    prebuilt = Path(library._name).parent == FOLDER
    why = better_units(processor, instructions, refused, prebuilt)
    return KernelChoice("native", instructions, prebuilt, why, library)


def better_units(processor: Processor, used: str, refused: str, prebuilt: bool) -> tuple[str, ...]:
    """Why no instruction set is used that is better than `used`, where the system `refused` the
    tile unit ("": it did not). `prebuilt`: the library came with the package."""
    lacks = "the processor does not have it"
    if not processor.known:
        lacks = "the system does not say whether the processor has it"
    compiled = "the compiler that made the library does not know it"
    if prebuilt:
        compiled = "the library that came with the package was compiled without it"
    reasons = []
    for one in (*processor.lacks, *processor.has):
        if one.name == used:
            break
        if one in processor.lacks:
            reasons.append(f"{one.name}: {lacks}")
        elif one.name == "amx" and refused:
            reasons.append(f"{one.name}: {refused}")
        else:
            reasons.append(f"{one.name}: {compiled}")
    return tuple(reasons)


def choose_on_gpu(device: torch.device, option: str) -> KernelChoice:
    """Return the kernels that `ExecutorConfig.kernels` gives on this GPU. Raises `InvalidRequest`
    for kernels that no GPU runs."""
    check_gpu_kernels(option, device)
    if option == "reference":
        return KernelChoice("reference", why_not_better=("triton: the reference is asked for",))
    name = kernels_for(device).name
    reason = why_not_triton(device)
    if name == "reference" and reason is None:
        reason = "it cannot be imported"
    return KernelChoice(name, why_not_better=() if reason is None else (f"triton: {reason}",))


# Report -------------------------------------------------------------------------------------------


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECONDS = 0.3
"""Shortest time in which each ceiling is measured, in seconds."""

Progress = Callable[[str, float], None]
"""Callback with the current action, and the share of the whole that is done."""


class Gpu(msgspec.Struct, frozen=True):
    name: str
    capability: str
    memory_total: int
    memory_available: int


class Measured(msgspec.Struct, frozen=True):
    """FLOP/s by dtype and backend ("native", "torch"), and bytes/s; unmeasured figures are left out
    or None. `foreign_cores`: cores that other programs kept busy meanwhile; far above 0 the figures
    are too low."""

    threads: int
    product_rates: dict[str, dict[str, float]]
    read_bandwidth: float | None
    foreign_cores: float


class Memory(msgspec.Struct, frozen=True):
    """Bytes: of the weights, of the KV cache, of what is free for both. `cache_tokens`: what the
    cache holds. `fits`: there is room for the weights and for one block."""

    weights: int
    cache: int
    cache_tokens: int
    available: int
    fits: bool


class ModelReport(msgspec.Struct, frozen=True):
    """`kernels`: what this model runs on, with why not on better ones. `ceilings` are this model's,
    `forecast` follows from them; None where the model does not fit, its weights are quantised, or a
    ceiling could not be measured."""

    path: str
    dtype: str
    context_length: int
    kernels: str
    why_not_better: tuple[str, ...]
    memory: Memory
    ceilings: Ceilings | None
    forecast: Forecast | None


class Report(msgspec.Struct, frozen=True):
    machine: Machine
    gpu: Gpu | None
    """None where the device asked for is the CPU."""
    kernels: KernelChoice
    measured: Measured
    model: ModelReport | None
    not_measured: tuple[str, ...] = ()
    """Failed measurements and their reasons, a line for each."""

    def to_json(self) -> dict[str, Any]:
        kernels = dataclasses.replace(self.kernels, library=None)
        found = msgspec.to_builtins(replace(self, kernels=kernels))
        del found["kernels"]["library"]
        machine, processor = found["machine"], self.machine.processor
        machine["cores"]["usable"] = self.machine.cores.usable
        machine["processor"] = {
            "name": processor.name,
            "architecture": processor.architecture,
            "instructions": [one.name for one in processor.has],
        }
        return found


def examine(executor: ExecutorConfig, progress: Progress) -> Report:
    """Examine this machine, and the model of `executor` ("": none) on it. Raises `UnsupportedModel`
    or `InvalidRequest` for anything that serving would refuse, too."""
    progress("machine", 0.0)
    device = torch.device(chosen_device(executor.device))
    config = _read_config(executor) if executor.model else None
    machine = read_machine()
    threads = executor.threads or machine.cores.usable
    attempt = Attempts()
    rates: dict[str, dict[str, float]] = {}
    if device.type == "cuda":
        gpu, kernels = _gpu(device), choose_on_gpu(device, executor.kernels)
        load = ForeignLoad()
        for step, (name, dtype) in enumerate(DTYPES.items()):
            what = f"{name} products"
            progress(what, 0.2 + 0.3 * step)
            free = free_memory(device)[0]
            rate = attempt(what, partial(gpu_product_rate, device, dtype, SECONDS, free))
            rates[name] = {} if rate is None else {"torch": rate}
        progress("copying", 0.8)
        free = free_memory(device)[0]
        bandwidth = attempt("copying", partial(gpu_copy_bandwidth, device, SECONDS, free))
    else:
        gpu = None
        kernels = choose_on_cpu(
            machine.processor, executor.kernels, lambda what: progress(what, 0.1)
        )
        load = ForeignLoad()  # compiling is over
        for step, (name, dtype) in enumerate(DTYPES.items()):
            what = f"{name} products"
            progress(what, 0.2 + 0.3 * step)
            measure = partial(product_rates, dtype, threads, SECONDS, kernels.library)
            rates[name] = attempt(what, measure) or {}
        progress("reading memory", 0.8)
        size = min(READ_BYTES, machine.memory_available // 4)
        bandwidth = attempt(
            "reading memory", partial(read_bandwidth, threads, SECONDS, size, kernels.library)
        )
    measured = Measured(threads, rates, bandwidth, load.cores())
    model = None
    if config is not None:
        progress("model", 0.9)
        model = _on_this_machine(config, executor, machine, gpu, kernels, measured, attempt)
    progress("", 1.0)
    return Report(machine, gpu, kernels, measured, model, tuple(attempt.faults))


def _read_config(executor: ExecutorConfig) -> ModelConfig:
    config = ModelConfig.read(executor.model, executor.allow_pickle, executor.ignore_config_keys)
    check_computable(config)
    check_options(config, executor, CacheConfig())
    return config


def _has_tokens(config: ModelConfig) -> bool:
    """Return whether the tokenizer is there: the hub's description of a model may lack it."""
    try:
        config.source.tokenizer_json()
    except InvalidRequest:
        return False
    return True


def _gpu(device: torch.device) -> Gpu:
    try:
        free, total = free_memory(device)
    except RuntimeError as error:  # there is no memory even for a context of our own
        raise InvalidRequest(f"{device}: {str(error).splitlines()[0]}") from error
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(torch.cuda.get_device_name(device), f"{major}.{minor}", total, free)


def _on_this_machine(
    config: ModelConfig,
    executor: ExecutorConfig,
    machine: Machine,
    gpu: Gpu | None,
    kernels: KernelChoice,
    measured: Measured,
    attempt: Attempts,
) -> ModelReport:
    spec, dtype = config.spec, chosen_dtype(executor, config)
    setup = ModelSetup(config, executor, CacheConfig(), dtype)
    name, why = kernels.name, kernels.why_not_better
    if name == "native":
        reason = why_not_native(config, setup.kv_dtype, setup.cache.block_size)
        if reason is not None:
            check_without_native(executor.kernels, reason)
            name, why = "reference", (f"native: {reason}",)
    element = Elements(dtype.itemsize, kv_pool.bytes_per_number(spec.attention, setup.kv_dtype))
    if executor.draft_model:
        draft = draft_setup(setup, "cpu" if gpu is None else gpu.name, native=name == "native")
        if _has_tokens(config) and _has_tokens(draft.config):
            check_same_tokens(config, draft.config)
        setup = replace(setup, beside=draft_beside(draft))
    weights = weight_bytes(config, dtype, executor.quantize, head_apart=name == "native")
    memory = _memory(setup, weights, machine if gpu is None else gpu)
    ceilings = found = None
    if memory.fits:
        capacity = Capacity(
            setup.context_length, memory.cache_tokens, SchedulerConfig().max_step_tokens
        )
        library = kernels.library if name == "native" else None
        read = None if gpu else memory.weights
        ceilings = _ceilings(measured, attempt, spec, dtype, library, read)
        # Rates are those of dense weights.
        dense = config.quantisation is None and executor.quantize == "none"
        if ceilings is not None and dense:
            found = forecast(spec, element, ceilings, capacity)
    context = setup.context_length
    return ModelReport(str(config.path), dtype.name, context, name, why, memory, ceilings, found)


def _ceilings(
    measured: Measured,
    attempt: Attempts,
    spec: ModelSpec,
    dtype: np.dtype[Any],
    library: ctypes.CDLL | None,
    weights: int | None,
) -> Ceilings | None:
    """Return the ceilings for a model that computes with `library` (None: with torch). Attention is
    measured where it is native, and counts as a product elsewhere. `weights`: their bytes, None on
    a GPU. Few weights may stay in a cache, so that reading is measured with as many bytes. None
    where one of the ceilings could not be measured."""
    rates, bandwidth = measured.product_rates.get(dtype.name), measured.read_bandwidth
    if weights is not None and weights < READ_BYTES:
        bandwidth = attempt(
            "reading the weights",
            partial(read_bandwidth, measured.threads, SECONDS, weights, library),
        )
    if not rates or bandwidth is None:
        return None
    if library is None:
        return Ceilings(rates["torch"], rates["torch"], bandwidth)
    attended = attempt(
        "attention",
        partial(
            attention_rate, torch_dtype(dtype), spec.attention, measured.threads, SECONDS, library
        ),
    )
    if attended is None:
        return None
    return Ceilings(rates["native"], attended, bandwidth)


def _memory(setup: ModelSetup, weights: int, where: Machine | Gpu) -> Memory:
    """Divide memory as the executor does, weights and cache of a draft model included. The executor
    measures a step's memory on a GPU, so its cache there is smaller than this estimate."""
    size, available = setup.cache.block_size, where.memory_available
    weights += setup.beside.weights
    left = max(available - weights, 0)
    measured = None
    if isinstance(where, Gpu):
        measured = partial(kv_bytes, left, where.memory_total, step_bytes=0, graphs=0)
    block = block_bytes(setup.config, size, setup.kv_dtype) + setup.beside.block
    try:
        blocks = setup.choose_num_blocks(measured, left)
    except UnsupportedModel:  # there is no memory for a block
        blocks = 0
    fits = blocks > 0 and weights + blocks * block <= available
    return Memory(weights, blocks * block, blocks * size, available, fits)


TOKENS = 4096
"""Tokens of cache, with the settings of `rootlace serve`, that a fitting model has room for."""


class CachedModel(msgspec.Struct, frozen=True):
    """`weights` (of the files) and `needs` (in memory, on a CPU) in bytes; `refused`: why it cannot
    be served, and then neither its context nor its needs are known."""

    name: str
    path: str
    weights: int
    context: int | None = None
    needs: int | None = None
    fits: bool = False
    refused: str | None = None


class PackedModel(msgspec.Struct, frozen=True):
    """Packed weights, kept by a start (`--weight-cache`) in a file of `size` bytes."""

    model: str
    path: str
    size: int


def cached_models() -> tuple[list[CachedModel], int]:
    """Return the cached models, and the bytes of free main memory."""
    free = main_memory().available
    there = [
        (str(name), path, weights)
        for snapshot in snapshots()
        for name, path, weights in snapshot.models
    ]
    for called, model in packaged_models().items():
        file = PackagedFile(called, model).find()
        if file is not None:
            there.append((called, file, model.size))
    return [_examined(*one, free) for one in there], free


def packed_models(folder: str) -> list[PackedModel]:
    """Return the packed weights kept in `folder` (as starts have it), the last used at the end."""
    found = []
    cache = WeightCache.chosen(folder)
    for one in cache.files() if cache else ():
        with suppress(OSError, DamagedEntry):  # deleted meanwhile, or by the next start
            found.append(PackedModel(Entry.read(one.path).table.model, str(one.path), one.size))
    return found


def delete_packed_models(folder: str) -> int:
    """Delete the packed weights in `folder` and return their bytes."""
    cache = WeightCache.chosen(folder)
    return cache.clear() if cache else 0


def _examined(name: str, path: Path, weights: int, free: int) -> CachedModel:
    try:
        config = ModelConfig.read(path)
        dtype = chosen_dtype(ExecutorConfig(), config)
        native = why_not_native(config, dtype, CacheConfig().block_size) is None
        needs = weight_bytes(config, dtype, "none", head_apart=native)
    except UnsupportedModel as error:
        return CachedModel(name, str(path), weights, refused=str(error))
    context = config.spec.max_context
    needs += block_bytes(config, min(TOKENS, context), dtype)
    return CachedModel(name, str(path), weights, context, needs, needs <= free)
