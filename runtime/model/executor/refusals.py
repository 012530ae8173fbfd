"""Refuse configurations that do not fit the model or the machine; divide a machine's cores."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from rootlace.kernels.native.machine import Core, read_cores
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.decoder import interface
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.wire.errors import InvalidRequest, UnsupportedModel

# Share --------------------------------------------------------------------------------------------
#
# Divide a machine among several engines.


log = logging.getLogger(__name__)


def take_share(executor: ExecutorConfig, replica: int, replicas: int) -> ExecutorConfig:
    """Return the configuration of engine `replica` of `replicas` engines of one model, and bind
    this process to its cores. Call before threads are started. Each engine has its own GPU, or its
    part of the cores and of the free memory.

    Raises InvalidRequest if there are fewer GPUs than engines.
    """
    found = read_cores()
    cores = cores_of(found.all, replica, replicas)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {thread for core in cores for thread in core.threads})
        nodes = sorted({core.node for core in cores})
        log.info("replica %d runs on %d cores of NUMA nodes %s", replica, len(cores), nodes)
    share = max(min(len(cores), found.usable // replicas), 1)
    return dataclasses.replace(
        executor,
        threads=executor.threads or share,
        memory_share=1 / replicas,
        device=_device(executor, replica, replicas),
    )


def cores_of(cores: Sequence[Core], replica: int, replicas: int) -> list[Core]:
    """Return an engine's cores, as many for each, on one node if possible; empty if too few.

    No engine has cores of two nodes if nodes are equally large, and if the number of engines
    divides the number of nodes or is a multiple of it.
    """
    if len(cores) < replicas:
        return []
    sorted_by_node = sorted(cores, key=lambda core: core.node)
    first, end = (len(cores) * number // replicas for number in (replica, replica + 1))
    return sorted_by_node[first:end]


def _device(executor: ExecutorConfig, replica: int, replicas: int) -> str:
    device, each = executor.device, executor.tensor_parallel
    if device not in ("auto", "cuda"):
        return device
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return device
    if count < replicas * each:
        ranks = f" of {each} ranks" if each > 1 else ""
        raise InvalidRequest(f"{replicas} replicas{ranks} need as many GPUs; there are {count}")
    return f"cuda:{replica * each}"


# Refusals -----------------------------------------------------------------------------------------


def check_computable(config: ModelConfig) -> None:
    """Raise `UnsupportedModel` for a model that no decoder runs."""
    reason = interface.why_not(config.spec)
    if config.spec.transformers is None and reason is not None:
        raise UnsupportedModel(f"{config.file}: {reason}")


def check_gpus(
    config: ModelConfig, executor: ExecutorConfig, cache: CacheConfig, device: str
) -> None:
    """Raise `InvalidRequest` if GPUs cannot be the requested ranks."""
    count = executor.tensor_parallel
    if count > 1 and device != "cpu":
        reason = _why_not_on_gpus(count, executor, cache, device)
        if reason is not None:
            raise InvalidRequest(f"{config.file}: tensor_parallel {count}: {reason}")


def _why_not_on_gpus(
    count: int, executor: ExecutorConfig, cache: CacheConfig, device: str
) -> str | None:
    import torch

    there = torch.cuda.device_count()
    if torch.device(device).index + count > there:
        return f"there are {there} GPUs, and each rank from {device} on needs one"
    if not torch.distributed.is_nccl_available():
        return "this torch build has no NCCL, which adds up what GPUs find"
    if cache.num_blocks is None and executor.kv_memory_bytes is None:
        return "what a step takes on several GPUs is not measured: give kv_memory or kv_blocks"
    return None


def check_without_native(option: str, reason: str) -> None:
    """Raise `InvalidRequest` if the requested kernels are the native ones, unavailable for this
    `reason`."""
    if option == "native":
        raise InvalidRequest(f"kernels 'native': {reason}")


def check_gpu_kernels(option: str, device: object) -> None:
    """Raise `InvalidRequest` if the requested kernels are not a GPU's."""
    if option == "native":
        raise InvalidRequest(f"kernels 'native' are a CPU's, the device is {device}")


def check_memory(setup: ModelSetup, available: int, *, head_apart: bool) -> None:
    """Raise `InvalidRequest` if `available` bytes are too few for the weights and the requested
    cache (by default one block). The message has choices that would fit. `head_apart`: see
    `weight_bytes`."""
    weights, cache = _weight_bytes(setup, head_apart), _cache_bytes(setup)
    if weights + cache <= available:
        return
    ways = [way for way, needed in _smaller(setup, head_apart) if needed <= available]
    raise InvalidRequest(
        f"{setup.config.path}: {_gib(available)} of memory are free, and its weights take "
        f"{_gib(weights)}, its KV cache at least {_gib(cache)}; "
        + (f"what would fit: {', '.join(ways)}" if ways else "nothing that can be chosen would fit")
    )


def _smaller(setup: ModelSetup, head_apart: bool) -> Iterator[tuple[str, int]]:
    """List choices that need less memory, with their bytes: first choices that change no number."""

    def needed(cache: CacheConfig = setup.cache, **options: Any) -> int:
        other = replace(setup, cache=cache, executor=dataclasses.replace(setup.executor, **options))
        return _weight_bytes(other, head_apart) + _cache_bytes(other)

    config, executor, blocks = setup.config, setup.executor, setup.cache.num_blocks
    if executor.kv_memory_bytes is not None or blocks is not None:
        cache = dataclasses.replace(setup.cache, num_blocks=None)
        yield "a smaller KV cache", needed(cache, kv_memory_bytes=None)
    if blocks is not None and config.spec.attention.latent is None:
        if executor.kv_dtype == "auto":
            yield "kv_dtype int8", needed(kv_dtype="int8")
        if executor.kv_dtype != "int4" and not config.spec.attention.qkv_bias:
            yield "kv_dtype int4", needed(kv_dtype="int4")
    if setup.dtype == FLOAT32:
        other = replace(setup, dtype=BFLOAT16)
        yield "dtype bfloat16", _weight_bytes(other, head_apart) + _cache_bytes(other)
    ours = config.spec.transformers is None
    if ours and config.quantisation is None and executor.quantize != "int4":
        if executor.quantize == "none":
            yield "quantize int8", needed(quantize="int8")
        yield "quantize int4", needed(quantize="int4")


def _weight_bytes(setup: ModelSetup, head_apart: bool) -> int:
    return weight_bytes(setup.config, setup.dtype, setup.executor.quantize, head_apart=head_apart)


def _cache_bytes(setup: ModelSetup) -> int:
    block = kv_pool.block_bytes(setup.config, setup.cache.block_size, setup.kv_dtype)
    if setup.cache.num_blocks is not None:
        return setup.cache.num_blocks * block
    return setup.executor.kv_memory_bytes or block


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GiB"
