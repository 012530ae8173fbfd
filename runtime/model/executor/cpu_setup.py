"""Set a model up on a CPU: with the native kernels where they can be had."""

from __future__ import annotations

import ctypes
import logging
import threading
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
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.loader import Progress
from rootlace.runtime.model.decoder import native_decoder
from rootlace.runtime.model.decoder.interface import Forward
from rootlace.runtime.model.decoder.native_weights import (
    KINDS,
    NativeWeights,
    PackedWeights,
    pack_weights,
)
from rootlace.runtime.model.decoder.torch_decoder import ReferenceForward
from rootlace.runtime.model.executor.refusals import check_without_native
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import main_memory
from rootlace.runtime.model.weight_cache import WeightCache, cache_key
from rootlace.wire.errors import InvalidRequest

# Packed -------------------------------------------------------------------------------------------
#
# Packed weights: those of an earlier start, or made now and kept for the next one.


def packed_weights(packer: Packer, setup: ModelSetup, cache: WeightCache | None) -> PackedWeights:
    """The weights of the checkpoint, rounded as the setup says."""
    config = setup.config
    if cache is None:
        return pack_weights(packer, config.spec, setup.weights())
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    files = checkpoint.files
    asked = (setup.executor.quantize, setup.executor.product_paths)
    try:
        if sum(file.stat().st_size for file in files) < cache.least_bytes:
            return pack_weights(packer, config.spec, setup.weights())
        key = cache_key(config, files, packer.library, packer.dtype, *asked)
    except OSError as error:  # the library was compiled to a temporary file, say
        log.warning("packed weights are not kept for the next start: %s", error)
        return pack_weights(packer, config.spec, setup.weights())
    entry = cache.find(key)
    if entry is not None:
        log.info("weights were packed by an earlier start: %s", cache.folder)
        return entry.packed(checkpoint)
    weights = setup.weights()
    packed = pack_weights(packer, config.spec, weights)
    cache.keep(key, packed, str(config.path), weights.embedding_stored)
    return packed


# Cpu setup ----------------------------------------------------------------------------------------


CPU = torch.device("cpu")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder and its KV cache. `kernels` sample from the decoder's logits; `adapters` are the
    names of those that plans number; `damage`: see `PackedWeights`."""

    forward: Forward
    pool: torch.Tensor
    kernels: KernelSet
    context_length: int
    adapters: tuple[str, ...] = ()
    damage: threading.Event = field(default_factory=threading.Event)


def on_cpu(setup: ModelSetup, weight_cache: WeightCache | None = None) -> LoadedModel:
    """Load the weights, packed ones from the `weight_cache` where it has them, and allocate the KV
    pool.

    Raises `InvalidRequest` where native kernels are asked for and cannot be had, or the pool
    asked for does not fit into memory.
    """
    config, executor, kv_dtype = setup.config, setup.executor, setup.kv_dtype
    library = _library(setup)
    context_length = setup.rotary.context_length
    names = tuple(one.name for one in setup.adapters)
    if library is not None:
        # Torch has little left to do; threads of its own would spin beside those of the kernels.
        torch.set_num_threads(1)
        threads = executor.threads or usable_cores()
        log.info("native kernels run on %d threads", threads)
        team = Team(library, threads)
        packer = Packer(library, team, setup.dtype)
        if executor.product_paths == "measured":
            packer = replace(packer, path_of=MeasuredPaths(library, team, setup.dtype))
        packed = packed_weights(packer, setup, weight_cache)
        for remark in packed.remarks:
            log.warning("%s", remark)
        weights = NativeWeights(packer, config.spec, packed, setup.adapters)
        pool = _pool(setup, packed.mapped)
        codes = kv_pool.codes(config.spec.attention, kv_dtype)
        forward = native_decoder.NativeDecoder(
            library, team, config.spec, weights, setup.rotary, pool, codes, setup.ranks
        )
        kernels = native_kernels(library, team)
        return LoadedModel(forward, pool, kernels, context_length, names, packed.damage)
    if executor.threads is not None:
        torch.set_num_threads(executor.threads)
    kernels = REFERENCE if config.spec.transformers is None else _beside_torch(setup)
    decoder, inputs = setup.decoder(kernels), setup.inputs(kernels)
    pool = _pool(setup)
    found = ReferenceForward(decoder, kernels, inputs, pool)
    return LoadedModel(found, pool, kernels, context_length, names)


def _pool(setup: ModelSetup, taken: int = 0) -> torch.Tensor:
    """The KV pool, beside `taken` bytes that the system believes to be free."""
    config, executor, block_size = setup.config, setup.executor, setup.cache.block_size
    blocks = kv_pool.choose_num_blocks(
        *(config, setup.cache, executor.kv_memory_bytes),
        *(setup.rotary.context_length, setup.kv_dtype),
        available=int((main_memory().available - taken) * executor.memory_share),
    )
    if setup.ranks is not None:
        blocks = setup.ranks.agree(blocks)
    try:
        return kv_pool.allocate(config, blocks, block_size, CPU, setup.kv_dtype)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(
            f"main memory has no room for a KV cache of {blocks} blocks of {block_size} tokens: "
            f"{error}"
        ) from error


def why_not_native(
    config: ModelConfig, kv_dtype: torch.dtype, block_size: int, ranks: int = 1
) -> str | None:
    """Why the native kernels cannot run a model, on so many ranks; None if they can."""
    if config.spec.transformers is not None:
        return "transformers' modules compute with torch"
    codes = config.quantisation.codes if config.quantisation is not None else frozenset()
    unknown = " or ".join(sorted(codes - KINDS))
    if unknown:
        return f"they have no products of {unknown} weights"
    return native_decoder.why_not(config.spec, kv_dtype, block_size, ranks)


def _beside_torch(setup: ModelSetup) -> KernelSet:
    """Kernels for a model whose products are torch's: attention is native where it can be."""
    executor, head_dim = setup.executor, setup.config.spec.attention.head_dim
    stored = setup.kv_dtype in (torch.float32, torch.bfloat16)
    if executor.kernels == "reference" or not stored or head_dim > MAX_DIM:
        return REFERENCE
    try:
        library = native.load(lambda what: _report(what, setup.progress))
    except NativeUnavailable as error:
        log.warning("attention is the reference's, which is slower than native: %s", error)
        return REFERENCE
    return attending_kernels(library, Team(library, executor.threads or usable_cores()))


def _library(setup: ModelSetup) -> ctypes.CDLL | None:
    """The native kernels, None where the reference is to run. Raises `InvalidRequest` where the
    native ones are asked for and cannot be had."""
    config, executor = setup.config, setup.executor
    if executor.kernels == "reference":
        return None
    ranks = executor.tensor_parallel
    reason = why_not_native(config, setup.kv_dtype, setup.cache.block_size, ranks)
    reason = reason or native_decoder.why_not_adapters(setup.adapters)
    if reason is None:
        try:
            return native.load(lambda what: _report(what, setup.progress))
        except NativeUnavailable as error:
            reason = str(error)
    check_without_native(executor.kernels, reason)
    if config.spec.transformers is None:
        log.warning("the reference kernels run, which are slower than native ones: %s", reason)
    return None


def _report(what: str, progress: Progress | None) -> None:
    log.info("%s", what)
    if progress is not None:
        progress(what, 0.0)
