"""Set a model up for torch: its decoder, and scales of a cache that is stored in few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import asdict, replace

from rootlace.kernels.arrays import as_tensor, torch_dtype
from rootlace.kernels.interface import HostSampling, KernelSet, KVScales, KVScaling
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import KV_SCALE, KV_SCALES, Checkpoint, is_kv_scale
from rootlace.runtime.model.checkpoint.source import has_weights
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.interface import StepDecoder, StepInputBuilder
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.wire.errors import UnsupportedModel

# Decoder ------------------------------------------------------------------------------------------


@torch.inference_mode()
def decoder_of(setup: ModelSetup, kernels: KernelSet) -> StepDecoder:
    """Read the weights of a model that the torch decoder or transformers' modules run."""
    config = setup.config
    if config.spec.transformers is not None:
        # Only here: no other model should wait for transformers to be imported.
        from rootlace.runtime.model.transformers_backend.loading import load_transformers

        return load_transformers(setup, config.spec.transformers, kernels)
    weights = setup.weights().resident()
    scales = kv_scaling(setup, weights)
    return Decoder(config.spec, weights, kernels, scales, setup.adapters, setup.ranks)


def inputs_of(setup: ModelSetup, kernels: KernelSet) -> StepInputBuilder:
    """Return the builder of decoder inputs."""
    return StepInputBuilder(
        *(setup.config.spec, kernels, setup.rotary, setup.cache.block_size),
        *(torch_dtype(setup.dtype), torch.device(setup.device)),
    )


def allocate_on(
    device: torch.device,
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: np.dtype[Any],
) -> torch.Tensor:
    """Allocate the KV cache on a device: see `kv_pool.allocate`."""
    if device.type == "cpu":
        return as_tensor(kv_pool.allocate(config, num_blocks, block_size, dtype))
    shape, element = kv_pool.shape_of(config, num_blocks, block_size, dtype)
    return torch.empty(shape, device=device, dtype=torch_dtype(element))


def host_sampling(kernels: KernelSet = REFERENCE) -> HostSampling:
    """Build functions that sample from NumPy arrays with torch's operations."""
    return HostSampling(
        _of_arrays(kernels.edit_logits),
        _of_arrays(kernels.pick_tokens),
        _of_arrays(kernels.score_tokens),
    )


def _of_arrays(operation: Callable[..., Any]) -> Callable[..., Any]:
    @torch.inference_mode()
    def run(*arguments: Any) -> Any:
        found = operation(*map(_tensors, arguments))
        return tuple(one.numpy() for one in found) if isinstance(found, tuple) else found.numpy()

    return run


def _tensors(argument: Any) -> Any:
    """Return an argument with its arrays as tensors, over the same memory if contiguous."""
    if isinstance(argument, np.ndarray):
        return torch.from_numpy(argument)
    if isinstance(argument, dict):
        return {name: _tensors(value) for name, value in argument.items()}
    if isinstance(argument, msgspec.Struct):
        parts = {name: _tensors(value) for name, value in asdict(argument).items()}
        return replace(argument, **parts)
    return argument


# Scales of the cache ------------------------------------------------------------------------------
#
# Find the scales of each layer's stored keys and values, for caches in few bits.
#
# A cache of integers stores scales with its blocks. An fp8 cache has one scale for each KV head of
# a layer. e4m3 is a floating-point format with magnitudes up to 448; from 2^-6 on every number has
# the same relative precision. So a scale need not fit tightly. It must keep values below 448, where
# they are cut off, and most values far above 2^-6. Scales come from the checkpoint if it has any.
# Otherwise the model runs once over random tokens. The largest magnitude of each head's keys
# (normed and rotated, as stored) and values, times `HEADROOM`, becomes 448. The result is rounded
# up to a power of two, so that multiplying by it is exact in every format.

E4M3_MAX = 448.0
HEADROOM = 2.0
"""Factor by which a value may exceed the calibration's largest before it is cut off."""
CALIBRATION_TOKENS = 256
CALIBRATION_SEED = 20
BLOCK_SIZE = 16


def kv_scaling(setup: ModelSetup, weights: ModelWeights) -> Sequence[KVScaling] | None:
    """Return the scaling of each layer of the cache; None if the cache has the model's dtype. fp8
    scales, float32 [Nk] on the model's device, are the checkpoint's, else calibrated.

    Raises `UnsupportedModel`, naming the tensor, if stored scales are incomplete or not positive.
    Likewise for scales that are neither one per layer nor one per KV head.
    """
    spec = setup.config.spec
    if setup.kv_dtype.name != "float8_e4m3fn":
        codes = kv_pool.codes(spec.attention, setup.kv_dtype)
        return None if codes is None else [codes] * spec.num_layers
    stored = stored_scales(setup.config, torch.device(setup.device))
    return calibrate(setup, weights) if stored is None else stored


def stored_scales(config: ModelConfig, device: torch.device) -> tuple[KVScales, ...] | None:
    """Return the scales stored in the checkpoint; None without scales or without a checkpoint."""
    if not has_weights(config.path, config.allow_pickle):
        return None
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    if not any(is_kv_scale(name) for name in checkpoint.types):
        return None
    return tuple(
        KVScales(
            _stored(config, checkpoint, index, "k", device),
            _stored(config, checkpoint, index, "v", device),
        )
        for index in range(config.spec.num_layers)
    )


def _stored(
    config: ModelConfig, checkpoint: Checkpoint, layer: int, kind: str, device: torch.device
) -> torch.Tensor:
    prefix = config.spec.names.layer.format(layer)
    names = [prefix + name for name in (*KV_SCALES[kind], KV_SCALE)]
    name = next((name for name in names if name in checkpoint.types), None)
    if name is None:
        raise UnsupportedModel(f"{config.path}: weights are missing: {names[0]}")
    found = checkpoint.tensor(name)
    values = found.to(torch.float32).flatten()
    heads = config.spec.attention.num_kv_heads
    if len(values) not in (1, heads):
        raise UnsupportedModel(
            f"{config.path}: {name} has shape {list(found.shape)}; expected one scale or {heads}"
        )
    if not bool((values.isfinite() & (values > 0)).all()):
        raise UnsupportedModel(f"{config.path}: {name} is not a positive number")
    return values.expand(heads).contiguous().to(device)


@torch.inference_mode()
def calibrate(setup: ModelSetup, weights: ModelWeights) -> tuple[KVScales, ...]:
    """Run the model (on the reference kernels, whatever serves later) and look at its cache."""
    config, rotary, device = setup.config, setup.rotary, torch.device(setup.device)
    count = min(CALIBRATION_TOKENS, rotary.context_length)
    blocks = -(-count // BLOCK_SIZE)
    cache = allocate_on(device, config, blocks, BLOCK_SIZE, setup.dtype)
    dtype = torch_dtype(setup.dtype)
    inputs = StepInputBuilder(config.spec, REFERENCE, rotary, BLOCK_SIZE, dtype, device)
    Decoder(config.spec, weights, REFERENCE).forward(inputs.build(_plan(config, count)), cache)
    written = cache.flatten(2, 3)[:, :, :count]  # [layers, 2, tokens, Nk, D]
    largest = written.abs().amax(dim=(2, 4)).float()  # [layers, 2, Nk]
    if not bool(largest.isfinite().all()):
        raise UnsupportedModel(f"{config.path}: keys and values of random tokens are not finite")
    scales = _power_of_two(largest * (HEADROOM / E4M3_MAX))
    return tuple(KVScales(layer[0].contiguous(), layer[1].contiguous()) for layer in scales)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """Round up to powers of two, per element; 1 for 0 (a head whose keys are all zero)."""
    mantissa, exponent = torch.frexp(values)  # values = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    found = torch.ldexp(torch.ones_like(values), exponent)
    return torch.where(values > 0, found, torch.ones_like(values))


def _plan(config: ModelConfig, count: int) -> StepPlan:
    """Plan one row of pseudo-random tokens, behind the token that begins a text if there is one.
    All others often attend to the first token, which then has unusual keys and values."""
    tokens = np.random.default_rng(CALIBRATION_SEED).integers(0, config.spec.vocab_size, count)
    begin = config.bos_token_id
    if begin is not None and 0 <= begin < config.spec.vocab_size:
        tokens[0] = begin
    return kv_pool.plan_of_rows([tokens], BLOCK_SIZE)
