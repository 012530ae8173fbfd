"""What a model is set up from, and what runs its steps: `plain_steps` or `device_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import KVScales, KVScaling
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.loader import (
    KV_SCALE,
    KV_SCALES,
    LoadWeights,
    Progress,
    is_kv_scale,
)
from rootlace.runtime.model.checkpoint.source import has_weights
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.interface import StepDecoder, StepInputBuilder
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.lora import Adapter
from rootlace.runtime.model.parallel.group import Group
from rootlace.wire.errors import UnsupportedModel

# Setup --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSetup:
    """A model and how it is to be run. `ranks`: where `config` and weights are one rank's, all."""

    config: ModelConfig
    executor: ExecutorConfig
    cache: CacheConfig
    dtype: torch.dtype
    device: torch.device
    rotary: RotaryEmbedding
    weights_of: LoadWeights
    progress: Progress | None = None
    adapters: Sequence[Adapter] = ()
    ranks: Group | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """How keys and values are stored."""
        return kv_pool.storage_dtype(self.executor.kv_dtype, self.dtype)

    def weights(self) -> ModelWeights:
        """Read the weights."""
        return self.weights_of(self.config, self.dtype, self.device, self.progress)

    def decoder(self, kernels: KernelSet) -> StepDecoder:
        """Read the weights of a model that our torch decoder or transformers' modules run."""
        config, dtype, device, rotary = self.config, self.dtype, self.device, self.rotary
        if config.spec.transformers is not None:
            # Only here: no other model should wait for transformers to be imported.
            from rootlace.runtime.model.transformers_backend.loading import load_transformers

            return load_transformers(
                *(config, config.spec.transformers, dtype, device, rotary, kernels, self.kv_dtype),
                self.progress,
            )
        weights = self.weights().resident()
        scales = kv_scaling(config, weights, rotary, dtype, device, self.kv_dtype)
        return Decoder(config.spec, weights, kernels, scales, self.adapters, self.ranks)

    def inputs(self, kernels: KernelSet) -> StepInputBuilder:
        """Build the maker of decoder inputs."""
        block_size = self.cache.block_size
        return StepInputBuilder(
            self.config.spec, kernels, self.rotary, block_size, self.dtype, self.device
        )


# Steps --------------------------------------------------------------------------------------------


class Steps(Protocol):
    """`launch`, `sample`, `collect` and `overlaps` are those of `Executor`."""

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, step: Any, samples: Sequence[SampleRow]) -> None: ...

    def collect(self, step: Any) -> StepResult: ...

    def work(self) -> AbstractContextManager[object]:
        """Within it operations on tensors come behind the steps launched before, and before the
        next one."""

    def prepare(self) -> bool:
        """See `ModelRunner.prepare`."""

    def stats(self) -> dict[str, int | float]:
        """See `ModelRunner.stats`."""


# Scales of the cache ------------------------------------------------------------------------------
#
# What stored keys and values of each layer stand for, where they are not stored as they are.
#
# Integers have their scales beside them. The scales of an fp8 cache are those of a layer's KV
# heads: e4m3 holds magnitudes up to 448 and is a floating-point format: from 2^-6 on every number
# has the same relative precision. So a scale need not fit tightly, it must only keep values below
# 448 (they are cut off there) and most of them far above 2^-6. Taken from the checkpoint where it
# has scales, else found by running the model once over random tokens: the largest magnitude of each
# head's keys (normed and rotated, as they are stored) and values, times `HEADROOM`, is to become
# 448. The result is rounded up to a power of two, so that multiplying by it is exact in every
# format.

E4M3_MAX = 448.0
HEADROOM = 2.0
"""How much larger than in the calibration a value may be before it is cut off."""
CALIBRATION_TOKENS = 256
CALIBRATION_SEED = 20
BLOCK_SIZE = 16


def kv_scaling(
    config: ModelConfig,
    weights: ModelWeights,
    rotary: RotaryEmbedding,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype,
) -> Sequence[KVScaling] | None:
    """Of each layer of a cache of `kv_dtype`; None where that is the model's own. Raises as
    `kv_scales`."""
    if kv_dtype == torch.float8_e4m3fn:
        return kv_scales(config, weights, rotary, dtype, device)
    codes = kv_pool.codes(config.spec.attention, kv_dtype)
    return None if codes is None else [codes] * config.spec.num_layers


def kv_scales(
    config: ModelConfig,
    weights: ModelWeights,
    rotary: RotaryEmbedding,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KVScales, ...]:
    """The scales of each layer, float32 [Nk] on `device`: the checkpoint's, else calibrated.

    Raises `UnsupportedModel`, naming the tensor, for scales in the checkpoint that are incomplete,
    not positive numbers, or neither one per layer nor one per KV head.
    """
    stored = stored_scales(config, device)
    return calibrate(config, weights, rotary, dtype, device) if stored is None else stored


def stored_scales(config: ModelConfig, device: torch.device) -> tuple[KVScales, ...] | None:
    """Scales stored in the checkpoint; None where it has none, or there is no checkpoint."""
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
def calibrate(
    config: ModelConfig,
    weights: ModelWeights,
    rotary: RotaryEmbedding,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KVScales, ...]:
    """Run the model (on the reference kernels, whatever serves later) and look at its cache."""
    count = min(CALIBRATION_TOKENS, rotary.context_length)
    blocks = -(-count // BLOCK_SIZE)
    cache = kv_pool.allocate(config, blocks, BLOCK_SIZE, device, dtype)
    inputs = StepInputBuilder(config.spec, REFERENCE, rotary, BLOCK_SIZE, dtype, device)
    Decoder(config.spec, weights, REFERENCE).forward(inputs.build(_plan(config, count)), cache)
    written = cache.flatten(2, 3)[:, :, :count]  # [layers, 2, tokens, Nk, D]
    largest = written.abs().amax(dim=(2, 4)).float()  # [layers, 2, Nk]
    if not bool(largest.isfinite().all()):
        raise UnsupportedModel(f"{config.path}: keys and values of random tokens are not finite")
    scales = _power_of_two(largest * (HEADROOM / E4M3_MAX))
    return tuple(KVScales(layer[0].contiguous(), layer[1].contiguous()) for layer in scales)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The next one up, per element; 1 for 0 (a head whose keys are all zero)."""
    mantissa, exponent = torch.frexp(values)  # values = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    found = torch.ldexp(torch.ones_like(values), exponent)
    return torch.where(values > 0, found, torch.ones_like(values))


def _plan(config: ModelConfig, count: int) -> StepPlan:
    """One row of pseudo-random tokens, after the token that begins a text if there is one: the
    first token is often attended to by all others, and then has unusual keys and values."""
    tokens = np.random.default_rng(CALIBRATION_SEED).integers(0, config.spec.vocab_size, count)
    begin = config.bos_token_id
    if begin is not None and 0 <= begin < config.spec.vocab_size:
        tokens[0] = begin
    return kv_pool.plan_of_rows([tokens], BLOCK_SIZE)
