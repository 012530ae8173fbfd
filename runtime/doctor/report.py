"""All that `rootlace doctor` says, as data."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rootlace.runtime.config import CacheConfig, ExecutorConfig, SchedulerConfig
from rootlace.runtime.doctor.attempts import Attempts
from rootlace.runtime.doctor.ceilings import (
    READ_BYTES,
    Ceilings,
    Heads,
    attention_rate,
    gpu_copy_bandwidth,
    gpu_product_rate,
    product_rates,
    read_bandwidth,
)
from rootlace.runtime.doctor.forecast import Forecast, Room, forecast
from rootlace.runtime.doctor.foreign_load import ForeignLoad
from rootlace.runtime.doctor.kernel_choice import KernelChoice, choose_on_cpu, choose_on_gpu
from rootlace.runtime.doctor.machine import Machine, read_machine
from rootlace.runtime.doctor.work import Elements
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.executor.cpu_setup import why_not_native
from rootlace.runtime.model.executor.refusals import (
    check_computable,
    check_context_length,
    check_kv_dtype,
    check_options,
    check_without_native,
)
from rootlace.runtime.model.executor.runner import chosen_device, chosen_dtype
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.kv.device_memory import free_memory, kv_bytes
from rootlace.wire.errors import InvalidRequest, UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECONDS = 0.3
"""How long each ceiling is measured, at least."""

Progress = Callable[[str, float], None]
"""Called with what is done now, and with the share of the whole that is done."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_total: int
    memory_available: int


@dataclass(frozen=True)
class Measured:
    """FLOP/s by dtype and by what computed ("native", "torch"), and bytes/s; what could not be
    measured is left out or None. `foreign_cores`: how many cores other programs kept busy
    meanwhile; far above 0 the figures are too low."""

    threads: int
    product_rates: dict[str, dict[str, float]]
    read_bandwidth: float | None
    foreign_cores: float


@dataclass(frozen=True)
class Memory:
    """Bytes: of the weights, of the KV cache, of what is free for both. `cache_tokens`: what the
    cache holds. `fits`: there is room for the weights and for one block."""

    weights: int
    cache: int
    cache_tokens: int
    available: int
    fits: bool


@dataclass(frozen=True)
class ModelReport:
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


@dataclass(frozen=True)
class Report:
    machine: Machine
    gpu: Gpu | None
    """None where the device asked for is the CPU."""
    kernels: KernelChoice
    measured: Measured
    model: ModelReport | None
    not_measured: tuple[str, ...] = ()
    """What could not be measured, and why: a line for each."""

    def to_json(self) -> dict[str, Any]:
        kernels = dataclasses.replace(self.kernels, library=None)
        found = dataclasses.asdict(dataclasses.replace(self, kernels=kernels))
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
    """Look at this machine, and at what the model of `executor` ("": none) would be on it.

    Raises `UnsupportedModel` or `InvalidRequest` for what serving would refuse, too.
    """
    progress("machine", 0.0)
    device = chosen_device(executor.device)
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
    config = ModelConfig.read(executor.model, executor.allow_pickle)
    check_computable(config)
    check_options(config, executor)
    check_context_length(executor.context_length, config)
    check_kv_dtype(executor.kv_dtype, config)
    return config


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
    spec, dtype = config.spec, chosen_dtype(executor.dtype, config)
    kv_dtype = kv_pool.storage_dtype(executor.kv_dtype, dtype)
    name, why = kernels.name, kernels.why_not_better
    if name == "native":
        reason = why_not_native(config, kv_dtype, CacheConfig().block_size)
        if reason is not None:
            check_without_native(executor.kernels, reason)
            name, why = "reference", (f"native: {reason}",)
    element = Elements(dtype.itemsize, kv_pool.bytes_per_number(spec.attention, kv_dtype))
    rotary = RotaryEmbedding(config, executor.context_length, torch.device("cpu"), dtype)
    memory = _memory(
        config,
        executor,
        weight_bytes(config, dtype, executor.quantize, head_apart=name == "native"),
        rotary.context_length,
        kv_dtype,
        machine if gpu is None else gpu,
    )
    ceilings = found = None
    if memory.fits:
        room = Room(rotary.context_length, memory.cache_tokens, SchedulerConfig().max_step_tokens)
        library = kernels.library if name == "native" else None
        weights = None if gpu else memory.weights
        ceilings = _ceilings(measured, attempt, spec, dtype, library, weights)
        # Rates are those of dense weights.
        dense = config.quantisation is None and executor.quantize == "none"
        if ceilings is not None and dense:
            found = forecast(spec, element, ceilings, room)
    return ModelReport(
        str(config.path), _name(dtype), rotary.context_length, name, why, memory, ceilings, found
    )


def _ceilings(
    measured: Measured,
    attempt: Attempts,
    spec: ModelSpec,
    dtype: torch.dtype,
    library: ctypes.CDLL | None,
    weights: int | None,
) -> Ceilings | None:
    """The ceilings for a model that computes with `library` (None: with torch). Attention is
    measured where it is native, and counts as a product elsewhere. `weights`: their bytes, None on
    a GPU. Few weights may stay in a cache, so that reading is measured with as many bytes. None
    where one of the ceilings could not be measured."""
    rates, bandwidth = measured.product_rates.get(_name(dtype)), measured.read_bandwidth
    if weights is not None and weights < READ_BYTES:
        bandwidth = attempt(
            "reading the weights",
            partial(read_bandwidth, measured.threads, SECONDS, weights, library),
        )
    if not rates or bandwidth is None:
        return None
    if library is None:
        return Ceilings(rates["torch"], rates["torch"], bandwidth)
    attention = spec.attention
    heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)
    attended = attempt(
        "attention", partial(attention_rate, dtype, heads, measured.threads, SECONDS, library)
    )
    if attended is None:
        return None
    return Ceilings(rates["native"], attended, bandwidth)


def _memory(
    config: ModelConfig,
    executor: ExecutorConfig,
    weights: int,
    context_length: int,
    kv_dtype: torch.dtype,
    where: Machine | Gpu,
) -> Memory:
    """As the executor divides it. What a step takes on a GPU is measured there, not here, so a
    GPU's cache is smaller than this."""
    cache, available = CacheConfig(), where.memory_available
    left = max(available - weights, 0)
    measured = None
    if isinstance(where, Gpu):
        measured = partial(kv_bytes, left, where.memory_total, step_bytes=0, graphs=0)
    block = kv_pool.block_bytes(config, cache.block_size, kv_dtype)
    try:
        blocks = kv_pool.choose_num_blocks(
            config, cache, executor.kv_memory_bytes, context_length, kv_dtype, measured, left
        )
    except UnsupportedModel:  # there is no memory for a block
        blocks = 0
    fits = blocks > 0 and weights + blocks * block <= available
    return Memory(weights, blocks * block, blocks * cache.block_size, available, fits)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
