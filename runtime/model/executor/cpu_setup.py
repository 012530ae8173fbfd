"""What a model on a CPU is computed with: the native kernels where they can be had."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.native import library as native
from rootlace.kernels.native.attention import MAX_DIM, attending_kernels
from rootlace.kernels.native.build import NativeUnavailable
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.linear import MeasuredPaths, Packer
from rootlace.kernels.native.machine import usable_cores
from rootlace.kernels.native.sampling import native_kernels
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.loader import LoadWeights, Progress
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder import native_decoder
from rootlace.runtime.model.decoder.forward import Forward, ReferenceForward
from rootlace.runtime.model.decoder.interface import MeetingRanks
from rootlace.runtime.model.decoder.native_weights import (
    KINDS,
    NativeWeights,
    PackedWeights,
    pack_weights,
)
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.executor.refusals import check_without_native
from rootlace.runtime.model.executor.steps import load_decoder
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.kv.pool import main_memory
from rootlace.runtime.model.lora import Adapter
from rootlace.runtime.model.weight_cache import WeightCache, cache_key
from rootlace.wire.errors import InvalidRequest

# Packed -------------------------------------------------------------------------------------------
#
# Packed weights: those of an earlier start, or made now and kept for the next one.


def packed_weights(
    packer: Packer,
    config: ModelConfig,
    executor: ExecutorConfig,
    load: Callable[[], ModelWeights],
    cache: WeightCache | None,
) -> PackedWeights:
    """The weights of the checkpoint that `config` is of, which `load` reads and rounds as
    `executor` says."""
    if cache is None:
        return pack_weights(packer, config.spec, load())
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    files = checkpoint.files
    asked = (executor.quantize, executor.product_paths)
    try:
        if sum(file.stat().st_size for file in files) < cache.least_bytes:
            return pack_weights(packer, config.spec, load())
        key = cache_key(config, files, packer.library, packer.dtype, *asked)
    except OSError as error:  # the library was compiled to a temporary file, say
        log.warning("packed weights are not kept for the next start: %s", error)
        return pack_weights(packer, config.spec, load())
    entry = cache.find(key)
    if entry is not None:
        log.info("weights were packed by an earlier start: %s", cache.folder)
        stored = entry.table.embedding
        return entry.packed(None if stored is None else checkpoint.tensor(stored))
    weights = load()
    packed = pack_weights(packer, config.spec, weights)
    cache.keep(key, packed, str(config.path), weights.embedding_stored)
    return packed


# Cpu setup ----------------------------------------------------------------------------------------


CPU = torch.device("cpu")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuModel:
    """A decoder and its KV cache."""

    forward: Forward
    pool: torch.Tensor
    kernels: KernelSet
    """What samples from the decoder's logits."""
    damage: threading.Event = field(default_factory=threading.Event)
    """See `PackedWeights`."""


def on_cpu(
    config: ModelConfig,
    dtype: torch.dtype,
    rotary: RotaryEmbedding,
    cache: CacheConfig,
    executor: ExecutorConfig,
    weights_of: LoadWeights,
    progress: Progress | None,
    adapters: Sequence[Adapter] = (),
    weight_cache: WeightCache | None = None,
    ranks: MeetingRanks | None = None,
) -> CpuModel:
    """Load the weights, packed ones from the `weight_cache` where it has them, and allocate the KV
    pool. `ranks`: where `config` and weights are one rank's, all of them.

    Raises `InvalidRequest` where native kernels are asked for and cannot be had, or the pool
    asked for does not fit into memory.
    """
    kv_dtype = kv_pool.storage_dtype(executor.kv_dtype, dtype)
    library = _library(config, kv_dtype, cache.block_size, executor, adapters, progress)

    def pool(taken: int = 0) -> torch.Tensor:
        """Beside so many bytes that the system believes to be free."""
        blocks = kv_pool.choose_num_blocks(
            *(config, cache, executor.kv_memory_bytes, rotary.context_length, kv_dtype),
            available=int((main_memory().available - taken) * executor.memory_share),
        )
        if ranks is not None:
            blocks = ranks.agree(blocks)
        try:
            return kv_pool.allocate(config, blocks, cache.block_size, CPU, kv_dtype)
        except (OSError, OverflowError) as error:
            raise InvalidRequest(
                f"main memory has no room for a KV cache of {blocks} blocks of "
                f"{cache.block_size} tokens: {error}"
            ) from error

    if library is not None:
        # Torch has little left to do; threads of its own would spin beside those of the kernels.
        torch.set_num_threads(1)
        threads = executor.threads or usable_cores()
        log.info("native kernels run on %d threads", threads)
        team = Team(library, threads)
        packer = Packer(library, team, dtype)
        if executor.product_paths == "measured":
            packer = replace(packer, path_of=MeasuredPaths(library, team, dtype))

        def load() -> ModelWeights:
            return weights_of(config, dtype, CPU, progress)

        packed = packed_weights(packer, config, executor, load, weight_cache)
        for remark in packed.remarks:
            log.warning("%s", remark)
        weights = NativeWeights(packer, config.spec, packed, adapters)
        memory = pool(packed.mapped)
        codes = kv_pool.codes(config.spec.attention, kv_dtype)
        forward = native_decoder.NativeDecoder(
            library, team, config.spec, weights, rotary, memory, codes, ranks
        )
        return CpuModel(forward, memory, native_kernels(library, team), packed.damage)

    if executor.threads is not None:
        torch.set_num_threads(executor.threads)
    kernels = REFERENCE
    if config.spec.foreign is not None:
        kernels = _beside_torch(config, kv_dtype, executor, progress)
    decoder = load_decoder(
        *(config, dtype, CPU, rotary, kernels, kv_dtype, weights_of, progress, adapters, ranks)
    )
    inputs = StepInputBuilder(config.spec, kernels, rotary, cache.block_size, dtype, CPU)
    memory = pool()
    return CpuModel(ReferenceForward(decoder, kernels, inputs, memory), memory, kernels)


def why_not_native(
    config: ModelConfig, kv_dtype: torch.dtype, block_size: int, ranks: int = 1
) -> str | None:
    """Why the native kernels cannot run a model, on so many ranks; None if they can."""
    if config.spec.foreign is not None:
        return "transformers' modules compute with torch"
    codes = config.quantisation.codes if config.quantisation is not None else frozenset()
    unknown = " or ".join(sorted(codes - KINDS))
    if unknown:
        return f"they have no products of {unknown} weights"
    return native_decoder.why_not(config.spec, kv_dtype, block_size, ranks)


def _beside_torch(
    config: ModelConfig, kv_dtype: torch.dtype, executor: ExecutorConfig, progress: Progress | None
) -> KernelSet:
    """Kernels for a model whose products are torch's: attention is native where it can be."""
    stored = kv_dtype in (torch.float32, torch.bfloat16)
    if executor.kernels == "reference" or not stored or config.spec.attention.head_dim > MAX_DIM:
        return REFERENCE
    try:
        library = native.load(lambda what: _report(what, progress))
    except NativeUnavailable as error:
        log.warning("attention is the reference's, which is slower than native: %s", error)
        return REFERENCE
    return attending_kernels(library, Team(library, executor.threads or usable_cores()))


def _library(
    config: ModelConfig,
    kv_dtype: torch.dtype,
    block_size: int,
    executor: ExecutorConfig,
    adapters: Sequence[Adapter],
    progress: Progress | None,
) -> ctypes.CDLL | None:
    """The native kernels, None where the reference is to run."""
    asked = executor.kernels
    if asked == "reference":
        return None
    reason = why_not_native(config, kv_dtype, block_size, executor.tensor_parallel)
    reason = reason or native_decoder.why_not_adapters(adapters)
    if reason is None:
        try:
            return native.load(lambda what: _report(what, progress))
        except NativeUnavailable as error:
            reason = str(error)
    check_without_native(asked, reason)
    if config.spec.foreign is not None:
        return None
    log.warning("the reference kernels run, which are slower than native ones: %s", reason)
    return None


def _report(what: str, progress: Progress | None) -> None:
    log.info("%s", what)
    if progress is not None:
        progress(what, 0.0)
