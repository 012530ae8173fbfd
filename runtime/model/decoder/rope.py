"""Compute rotary position embeddings: cos and sin of positions, for one context length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rootlace.kernels.arrays import as_array
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.spec import Rope

# Frequencies --------------------------------------------------------------------------------------
#
# Compute the angles by which rotary embeddings turn each pair of numbers, per position.
#
# Scalings of a trained model's angles to longer contexts: `linear` interpolation (Chen et al.
# 2023), `yarn` (Peng et al. 2023), `longrope` (Ding et al. 2024), and that of Llama 3.1. Each is
# computed in float32 in the order that transformers does: at far positions another rounding would
# show.


def frequencies(rope: Rope, dim: int, context: int) -> tuple[torch.Tensor, float]:
    """Return the radians per position of the pairs of a head, float32 [dim / 2], and a factor for
    cos and sin. `dim`: numbers of a head. `context`: the longest context in tokens."""
    fields = rope.parameters
    theta = float(fields["rope_theta"])
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return 1.0 / powers / fields["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(1.0 / powers, fields), 1.0
    if rope.kind == "yarn":
        return _yarn(powers, theta, fields), _yarn_scaling(fields)
    if rope.kind == "longrope":
        return _longrope(powers, context, fields), _longrope_scaling(fields)
    # `dynamic` differs only beyond the trained context, where the served context ends.
    return 1.0 / powers, 1.0


def _llama3(plain: torch.Tensor, fields: Mapping[str, Any]) -> torch.Tensor:
    """Divide slow angles by the factor, keep fast angles, and interpolate between."""
    factor, original = fields["factor"], fields["original_max_position_embeddings"]
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    length = 2 * math.pi / plain  # positions of a full turn
    share = (original / length - low) / (high - low)
    mean = (1 - share) * plain / factor + share * plain
    slow, fast = length > original / low, length < original / high
    return torch.where(slow, plain / factor, torch.where(fast, plain, mean))


def _yarn(powers: torch.Tensor, theta: float, fields: Mapping[str, Any]) -> torch.Tensor:
    """Keep angles that turn often within the original context, and divide angles of less than one
    turn by the factor. A ramp over the pairs' indices lies between."""
    dim, original = 2 * len(powers), fields["original_max_position_embeddings"]

    def index(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(fields.get("beta_fast") or 32), index(fields.get("beta_slow") or 1)
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    share = 1 - ramp
    return 1.0 / (fields["factor"] * powers) * (1 - share) + 1.0 / powers * share


def _yarn_scaling(fields: Mapping[str, Any]) -> float:
    def grown(weight: float) -> float:
        factor = fields["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    stated, above, below = (fields.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is not None:
        return float(stated)
    return grown(above) / grown(below) if above and below else grown(1)


def _longrope(powers: torch.Tensor, context: int, fields: Mapping[str, Any]) -> torch.Tensor:
    """Divide by a factor for each pair; sets of factors exist for original and longer contexts."""
    longer = context > fields["original_max_position_embeddings"]
    factors = torch.tensor(fields["long_factor" if longer else "short_factor"], dtype=torch.float32)
    return 1.0 / (factors * powers)


def _longrope_scaling(fields: Mapping[str, Any]) -> float:
    stated, factor = fields.get("attention_factor"), fields["factor"]
    if stated is not None:
        return float(stated)
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(fields["original_max_position_embeddings"]))


# Rope ---------------------------------------------------------------------------------------------


def query_factors(growth: tuple[float, int], positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries at positions [T] (`Attention.growth`), float32 [T]."""
    beta, length = growth
    return 1 + beta * torch.log(1 + torch.floor(positions / length))


class RotaryEmbedding:
    """Map from positions to cos and sin, on any device. `context_length`: see `chosen_context`."""

    def __init__(
        self, config: ModelConfig, context_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        spec, rope = config.spec, config.spec.rope
        self.context_length = context_length
        pairs = spec.attention.head_dim // 2
        rotated = (rope.rotated or spec.attention.head_dim) // 2
        found, scaling = frequencies(rope, 2 * rotated, context_length)
        # Pairs that are not rotated stand behind the others: an angle of 0, a factor of 1.
        found = torch.nn.functional.pad(found, (0, pairs - rotated))
        factor = torch.full((pairs,), scaling)
        factor[rotated:] = 1.0
        if rope.local_theta:
            local, _ = frequencies(Rope("default", {"rope_theta": rope.local_theta}), 2 * pairs, 0)
            found, factor = torch.cat((found, local)), torch.cat((factor, torch.ones(pairs)))
        self._frequencies = found.to(device, torch.float32)
        self._scaling = None if scaling == 1.0 else factor.to(device)
        self._dtype = dtype

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that `Rotations` takes."""
        found = {"frequencies": as_array(self._frequencies.cpu())}
        if self._scaling is not None:
            found["factors"] = as_array(self._scaling.cpu())
        return found

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map positions, int [T], to (cos, sin), each [T, head_dim / 2] in the model's dtype. If
        layers with windows have other rotations, these follow in the same rows."""
        cos, sin = self.rotations(positions)
        return cos.to(self._dtype), sin.to(self._dtype)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map positions, int [T], to (cos, sin), each float32 [T, head_dim / 2]."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling is not None:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos, sin
