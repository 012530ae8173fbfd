"""Set a model up on a CPU: with native kernels if available. With weights in the weight cache no
torch is imported: importing torch takes a second, and memory."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rootlace.kernels.interface import HostSampling
from rootlace.kernels.native import library as native
from rootlace.kernels.native.build import NativeUnavailable
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.machine import usable_cores
from rootlace.kernels.native.packed import ACTIVATIONS, KINDS
from rootlace.kernels.native.sampling import native_sampling
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint, Progress
from rootlace.runtime.model.decoder import native_decoder
from rootlace.runtime.model.decoder.interface import Forward
from rootlace.runtime.model.decoder.native_weights import (
    AdaptedLayers,
    NativeWeights,
    PackedWeights,
)
from rootlace.runtime.model.decoder.rotations import Rotations
from rootlace.runtime.model.executor.refusals import check_without_native
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import main_memory
from rootlace.runtime.model.weight_cache import WeightCache, cache_key
from rootlace.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from rootlace.kernels.native.linear import Packer

# Packed -------------------------------------------------------------------------------------------
#
# Get packed weights from the weight cache, or pack them and keep them for the next start.


def packed_weights(
    library: ctypes.CDLL, team: Team, setup: ModelSetup, cache: WeightCache | None
) -> PackedWeights:
    """Return packed weights, rounded as the setup says, from the weight cache if possible."""
    config = setup.config
    if cache is None:
        return _pack(library, team, setup)[0]
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    files = checkpoint.files
    options = [setup.executor.quantize, str(kv_pool.balances_keys(setup.executor))]
    rope = config.spec.rope
    if rope.kind == "longrope":  # the context chooses between two sets of frequencies
        longer = setup.context_length > rope.parameters["original_max_position_embeddings"]
        options.append(str(longer))
    try:
        if sum(file.stat().st_size for file in files) < cache.least_bytes:
            return _pack(library, team, setup)[0]
        key = cache_key(config, files, library, setup.dtype, *options)
    except OSError as error:  # for example, a library in a temporary file
        log.warning("packed weights are not kept for the next start: %s", error)
        return _pack(library, team, setup)[0]
    entry = cache.find(key)
    if entry is not None:
        log.info("weights were packed by an earlier start: %s", cache.folder)
        return entry.packed(checkpoint)
    packed, embedding = _pack(library, team, setup)
    cache.keep(key, packed, str(config.path), embedding)
    return packed


def _pack(library: ctypes.CDLL, team: Team, setup: ModelSetup) -> tuple[PackedWeights, str | None]:
    """Read and pack weights; return also the name of the mapped embedding, if any."""
    import torch

    # Not all cores of the machine: other ranks pack too, and a container has few cores.
    torch.set_num_threads(setup.executor.threads or usable_cores())
    # Torch's import leaves garbage that refers to this frame: keep the weights out of the frame,
    # or they would take memory from the KV pool.
    return _read_and_pack(library, team, setup)


def _read_and_pack(
    library: ctypes.CDLL, team: Team, setup: ModelSetup
) -> tuple[PackedWeights, str | None]:
    from rootlace.runtime.model.decoder.packing import pack_weights

    weights = setup.weights()
    packed = pack_weights(
        packer_of(library, team, setup), setup.config.spec, weights, setup.rotary.arrays()
    )
    return packed, weights.embedding_stored


def packer_of(library: ctypes.CDLL, team: Team, setup: ModelSetup) -> Packer:
    """Build the packer of the setup's weights; imports torch."""
    from rootlace.kernels.arrays import torch_dtype
    from rootlace.kernels.native.linear import Packer

    return Packer(library, team, torch_dtype(setup.dtype))


# Cpu setup ----------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class LoadedModel(msgspec.Struct, frozen=True):
    """Decoder and KV cache of a loaded model (on a GPU a tensor). `sampling`: samples from logits.
    `kernels`: the kernels' name. `damage`: see `PackedWeights`. `team`: the native kernels'
    threads."""

    setup: ModelSetup
    forward: Forward
    pool: Any
    sampling: HostSampling
    kernels: str
    damage: threading.Event = msgspec.field(default_factory=threading.Event)
    team: Team | None = None


def on_cpu(
    setup: ModelSetup, weight_cache: WeightCache | None = None, team: Team | None = None
) -> LoadedModel:
    """Load the weights, from the `weight_cache` if possible, and allocate the KV pool. `team`:
    another model's threads, to be shared.

    Raises `InvalidRequest` if native kernels are requested but not available, or if the requested
    pool does not fit into memory.
    """
    config, executor = setup.config, setup.executor
    library = _library(setup)
    if library is None:
        return _on_torch(setup)
    if team is None:
        threads = executor.threads or usable_cores()
        log.info("native kernels run on %d threads", threads)
        team = Team(library, threads)
    packed = packed_weights(library, team, setup, weight_cache)
    for remark in packed.remarks:
        log.warning("%s", remark)
    adapted: AdaptedLayers = ()
    if setup.adapters:
        from rootlace.runtime.model.decoder.packing import pack_adapters

        packer = packer_of(library, team, setup)
        adapted = pack_adapters(packer, config.spec, packed, setup.adapters)
    weights = NativeWeights(config.spec, packed, setup.dtype, library, adapted)
    pool = _pool(setup, packed.mapped)
    codes = kv_pool.codes(config.spec.attention, setup.kv_dtype)
    found = packed.tensors
    rotations = Rotations(setup.context_length, found["frequencies"], found.get("factors"))
    forward = native_decoder.NativeDecoder(
        library, team, config.spec, weights, rotations, pool, codes, setup.ranks
    )
    if "torch" in sys.modules:
        # Torch has little left to do; its own threads would spin beside the kernels' threads.
        sys.modules["torch"].set_num_threads(1)
    sampling = native_sampling(library, team)
    return LoadedModel(setup, forward, pool, sampling, "native", packed.damage, team)


def _on_torch(setup: ModelSetup) -> LoadedModel:
    """Load a model that torch computes."""
    import torch

    from rootlace.kernels.arrays import as_tensor
    from rootlace.kernels.native.attention import MAX_DIM, attending_kernels
    from rootlace.kernels.reference import REFERENCE
    from rootlace.runtime.model.decoder.torch_decoder import ReferenceForward
    from rootlace.runtime.model.executor.torch_setup import decoder_of, host_sampling, inputs_of

    executor, kernels, sampling = setup.executor, REFERENCE, host_sampling()
    if executor.threads is not None:
        torch.set_num_threads(executor.threads)
    if setup.config.spec.transformers is not None:
        # Torch computes products; attention and sampling are native if possible.
        fits = setup.config.spec.attention.head_dim <= MAX_DIM and setup.kv_dtype in ACTIVATIONS
        if executor.kernels != "reference" and fits:
            try:
                library = native.load(lambda what: _report(what, setup.progress))
            except NativeUnavailable as error:
                log.warning("attention is the reference's, which is slower than native: %s", error)
            else:
                team = Team(library, executor.threads or usable_cores())
                kernels, sampling = attending_kernels(library, team), native_sampling(library, team)
    decoder, inputs = decoder_of(setup, kernels), inputs_of(setup, kernels)
    pool = _pool(setup)
    forward = ReferenceForward(decoder, inputs, as_tensor(pool))
    return LoadedModel(setup, forward, pool, sampling, kernels.name)


def _pool(setup: ModelSetup, taken: int = 0) -> np.ndarray:
    """Allocate the KV pool, beside `taken` bytes that the system counts as free."""
    block_size = setup.cache.block_size
    free = main_memory().available - taken - setup.beside.weights
    blocks = setup.choose_num_blocks(available=int(free * setup.executor.memory_share))
    if setup.ranks is not None:
        blocks = setup.ranks.agree(blocks)
    try:
        return kv_pool.allocate(setup.config, blocks, block_size, setup.kv_dtype)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(
            f"main memory has no room for a KV cache of {blocks} blocks of {block_size} tokens: "
            f"{error}"
        ) from error


def why_not_native(
    config: ModelConfig, kv_dtype: np.dtype[Any], block_size: int, ranks: int = 1
) -> str | None:
    """Explain why the native kernels cannot run a model on `ranks` ranks; None if they can."""
    if config.spec.transformers is not None:
        return "transformers' modules compute with torch"
    codes = config.quantisation.codes if config.quantisation is not None else frozenset()
    unknown = " or ".join(sorted(codes - KINDS))
    if unknown:
        return f"they have no products of {unknown} weights"
    return native_decoder.why_not(config.spec, kv_dtype, block_size, ranks)


def _library(setup: ModelSetup) -> ctypes.CDLL | None:
    """Load the native kernels; None if the reference is to run. Raises `InvalidRequest` if native
    kernels are requested but not available."""
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
