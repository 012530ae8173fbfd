"""A model on a GPU: the KV pool sized by what is left, and the steps that run there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from rootlace.kernels import KernelSet, kernels_for, with_reference
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import MAX_DRAFTED
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.decoder.interface import StepDecoder
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.executor.cuda import CudaDevice, Graphs
from rootlace.runtime.model.executor.device_steps import PREPARED_KINDS, DeviceSteps
from rootlace.runtime.model.executor.refusals import check_gpu_kernels
from rootlace.runtime.model.executor.staging import decode_buckets
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import free_memory, kv_bytes, measured, trial_steps
from rootlace.runtime.model.sampling.automaton_table import arena_for
from rootlace.runtime.model.sampling.sampler import Sampler
from rootlace.wire.errors import InvalidRequest

KINDS = PREPARED_KINDS + 1
"""Kinds of steps that there may be graphs of for every bucket: a few more than are prepared."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuModel:
    """A model whose weights are where it will run."""

    setup: ModelSetup
    kernels: KernelSet
    decoder: StepDecoder
    inputs: StepInputBuilder


@dataclass(frozen=True)
class StepLimits:
    """The largest step: its tokens, and its rows."""

    max_tokens: int
    max_rows: int


def load(setup: ModelSetup) -> GpuModel:
    """Put the weights on the device. Raises `InvalidRequest` where kernels are asked for that are
    not a GPU's, or the reference for operations that do not exist."""
    executor, device = setup.executor, setup.device
    check_gpu_kernels(executor.kernels, device)
    if executor.threads is not None:
        torch.set_num_threads(executor.threads)
    # float32 means float32: TF32 would round every product to ten bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    kernels = REFERENCE if executor.kernels == "reference" else kernels_for(device)
    try:
        kernels = with_reference(kernels, executor.reference_for)
    except ValueError as error:
        raise InvalidRequest(f"reference_for: {error}") from error
    if setup.config.spec.attention.latent is not None and kernels is not REFERENCE:
        log.warning("%s: the reference kernels run: others have no latent attention", device)
        kernels = REFERENCE
    model = GpuModel(setup, kernels, setup.decoder(kernels), setup.inputs(kernels))
    setup.rotary.tabulate()
    return model


def on_gpu(model: GpuModel, limits: StepLimits) -> tuple[DeviceSteps, torch.Tensor]:
    """The executor's steps and the KV pool (see `kv_pool.allocate`; without the block that padding
    writes to).

    Runs the largest steps once, on a small pool, so that kernels are compiled and libraries set up
    when the first request comes, and to see how much memory they take.
    """
    setup = model.setup
    device, cache, executor = setup.device, setup.cache, setup.executor
    cuda = CudaDevice(device)
    # Which experts a step has, the host must know, and transformers' modules may have any:
    # no graph can be captured of that.
    spec = setup.config.spec
    graphs = executor.cuda_graphs and spec.experts is None and spec.transformers is None
    most_graphs = KINDS * len(decode_buckets(limits.max_rows)) if graphs else 0
    with cuda.work():
        try:
            step_bytes = _step_bytes(model, cuda, limits)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"{setup.config.path}: beside the weights {device} has no memory for a step of "
                f"{limits.max_tokens} tokens and {limits.max_rows} rows: lower max_step_tokens or "
                "max_running"
            ) from error

        def left() -> int:
            free, total = free_memory(device)
            room = kv_bytes(free, total, step_bytes, most_graphs)
            log.info(
                "memory: %d MiB free beside the weights, %d for a step, %d for the KV cache",
                *(value >> 20 for value in (free, step_bytes, room)),
            )
            return room

        num_blocks = kv_pool.choose_num_blocks(
            setup.config,
            cache,
            executor.kv_memory_bytes,
            setup.rotary.context_length,
            setup.kv_dtype,
            left,
        )
        try:
            steps, pool = _steps(model, cuda, limits, num_blocks, most_graphs)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"{device} has no memory for a KV cache of {num_blocks} blocks of "
                f"{cache.block_size} tokens"
            ) from error
    return steps, pool[:, :, :num_blocks]


def _steps(
    model: GpuModel, cuda: CudaDevice, limits: StepLimits, num_blocks: int, most_graphs: int
) -> tuple[DeviceSteps, torch.Tensor]:
    """On a new pool, of a block more than plans may name."""
    setup, device, block_size = model.setup, cuda.device, model.setup.cache.block_size
    vocab_size = setup.config.spec.vocab_size
    arena = arena_for(vocab_size, limits.max_rows + MAX_DRAFTED, device)
    pool = kv_pool.allocate(setup.config, num_blocks + 1, block_size, device, setup.kv_dtype)
    steps = DeviceSteps(
        cuda,
        model.decoder,
        model.kernels,
        model.inputs,
        pool,
        Sampler(vocab_size, model.kernels, arena),
        Graphs(cuda, most_graphs > 0, most_graphs),
        max_rows=limits.max_rows,
        max_blocks=-(-setup.rotary.context_length // block_size),
        scratch_block=num_blocks,
        # Launches of the reference's attention depend on the step.
        fixed=model.kernels.plan_attention is not REFERENCE.plan_attention,
    )
    return steps, pool


def _step_bytes(model: GpuModel, cuda: CudaDevice, limits: StepLimits) -> int:
    """Measure the peak memory of steps and of their buffers, without the KV pool."""
    setup, block_size = model.setup, model.setup.cache.block_size
    plans, blocks = trial_steps(
        setup.config.spec.vocab_size,
        limits.max_tokens,
        limits.max_rows,
        setup.rotary.context_length,
        block_size,
    )

    def run() -> None:
        steps, _ = _steps(model, cuda, limits, blocks, most_graphs=0)
        for plan in plans:
            steps.collect(steps.launch(plan))

    used = measured(run, cuda.device)
    pool = (blocks + 1) * kv_pool.block_bytes(setup.config, block_size, setup.kv_dtype)
    return max(used - pool, 0)
