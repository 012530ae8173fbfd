"""Rotary position embedding: cos and sin of positions, for one context length."""

from __future__ import annotations

import logging

import torch

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder.frequencies import frequencies
from rootlace.runtime.model.families.spec import Rope

log = logging.getLogger(__name__)

TABLE_BYTES = 256 << 20
"""Memory for the rotations of all positions, at most."""
_TABULATED_AT_ONCE = 65536


def query_factors(growth: tuple[float, int], positions: torch.Tensor) -> torch.Tensor:
    """What queries at positions [T] are multiplied by (`Attention.growth`), float32 [T]."""
    beta, length = growth
    return 1 + beta * torch.log(1 + torch.floor(positions / length))


class RotaryEmbedding:
    """cos and sin of any position.

    Every position has one rotation, whatever else is in the batch or came before: cached keys stay
    valid. The two scalings of transformers that look at the length of the running batch are
    therefore pinned when the model is loaded:

    - `dynamic` (NTK) changes its base beyond `max_position_embeddings`; the context ends there.
    - `longrope` has a short and a long set of factors. The context ends at
      `original_max_position_embeddings` (short set), unless a longer one is asked for explicitly:
      then the long set serves all positions.

    `context_length` is the context that results; `requested` may only shorten the model's own.
    """

    def __init__(
        self, config: ModelConfig, requested: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        spec = config.spec
        rope, most = spec.rope, spec.max_context
        self.context_length = min(requested or most, most)
        if rope.kind == "longrope":
            self._choose_factors(
                requested, int(rope.parameters["original_max_position_embeddings"]), most
            )
        pairs = spec.attention.head_dim // 2
        rotated = (rope.rotated or spec.attention.head_dim) // 2
        found, scaling = frequencies(rope, 2 * rotated, self.context_length)
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
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def _choose_factors(self, requested: int | None, original: int, most: int) -> None:
        """Of `longrope`; says which set serves all texts where both could."""
        if requested is None:
            self.context_length = min(most, original)
        if most <= original:
            return
        if self.context_length > original:
            log.warning(
                "the context is %d tokens: long_factor is used for texts of every length, also for "
                "those of up to %d, which get other numbers than with a context of up to %d",
                self.context_length,
                original,
                original,
            )
        else:
            log.warning(
                "the context is %d tokens, with short_factor, which serves up to %d; for texts of "
                "up to %d, ask for a longer context (context_length): then long_factor is used for "
                "texts of every length",
                self.context_length,
                original,
                most,
            )

    def tabulate(self, max_bytes: int = TABLE_BYTES) -> None:
        """Compute the rotations of all positions now, if they take no more than `max_bytes`: then
        those of a step are two gathers in place of six operations."""
        if self.context_length * len(self._frequencies) * 2 * self._dtype.itemsize > max_bytes:
            return
        device = self._frequencies.device
        positions = torch.arange(self.context_length, device=device)
        parts = [self._rotations(part) for part in positions.split(_TABULATED_AT_ONCE)]
        self._tables = (torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts]))

    def tables(self, max_bytes: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(cos, sin) of all positions, float32 [context_length, head_dim / 2] each; None where they
        take more than `max_bytes`."""
        if self.context_length * len(self._frequencies) * 2 * 4 > max_bytes:
            return None
        positions = torch.arange(self.context_length, device=self._frequencies.device)
        return self.rotations(positions)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [T] -> (cos, sin), each [T, head_dim / 2] in the model's dtype.

        Where layers with windows have other ones, these stand behind them in the same rows.
        """
        if self._tables is None:
            return self._rotations(positions)
        cos, sin = self._tables
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotations(positions)
        return cos.to(self._dtype), sin.to(self._dtype)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [T] -> (cos, sin), each float32 [T, head_dim / 2]."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling is not None:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos, sin
