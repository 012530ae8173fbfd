"""Rotations of a context's positions, as NumPy's arrays, by the frequencies that `rope` finds.

Imports no torch: those of packed weights are kept beside them.
"""

from __future__ import annotations

import logging
import math

import numpy as np

from rootlace.kernels.native.machine import mapped
from rootlace.runtime.model.checkpoint.config import ModelConfig

log = logging.getLogger(__name__)

_AT_ONCE = 1024
"""Rows of the tables that are computed together, at least: more would hold up a step."""


def chosen_context(config: ModelConfig, requested: int | None) -> int:
    """The context of a model, of which `requested` tokens are asked for: that may only shorten the
    model's own.

    Every position has one rotation, whatever else is in the batch or came before: cached keys stay
    valid. The two scalings of transformers that look at the length of the running batch are
    therefore pinned when the model is loaded:

    - `dynamic` (NTK) changes its base beyond `max_position_embeddings`; the context ends there.
    - `longrope` has a short and a long set of factors. The context ends at
      `original_max_position_embeddings` (short set), unless a longer one is asked for explicitly:
      then the long set serves all positions. The log says which set serves all texts where both
      could.
    """
    rope, most = config.spec.rope, config.spec.max_context
    chosen = min(requested or most, most)
    if rope.kind != "longrope":
        return chosen
    original = int(rope.parameters["original_max_position_embeddings"])
    if requested is None:
        chosen = min(most, original)
    if most <= original:
        return chosen
    if chosen > original:
        log.warning(
            "the context is %d tokens: long_factor is used for texts of every length, also for "
            "those of up to %d, which get other numbers than with a context of up to %d",
            chosen,
            original,
            original,
        )
    else:
        log.warning(
            "the context is %d tokens, with short_factor, which serves up to %d; for texts of "
            "up to %d, ask for a longer context (context_length): then long_factor is used for "
            "texts of every length",
            chosen,
            original,
            most,
        )
    return chosen


def query_factors(growth: tuple[float, int], positions: np.ndarray) -> np.ndarray:
    """Factors of queries at positions [T] (`Attention.growth`), float32 [T]."""
    beta, length = growth
    steps = np.floor(positions.astype(np.float32) / np.float32(length))
    return 1 + np.float32(beta) * np.log(1 + steps)


class Rotations:
    """cos and sin of the positions of one context."""

    def __init__(
        self, context_length: int, frequencies: np.ndarray, factors: np.ndarray | None = None
    ) -> None:
        """frequencies float32 [P]: radians per position of each pair of a head's numbers; factors
        float32 [P]: what cos and sin are multiplied by."""
        self.context_length = context_length
        self._frequencies = frequencies
        self._factors = factors
        self.filled = 0
        """Positions whose rows the tables have."""

    def tables(self, max_bytes: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(cos, sin) of all positions, float32 [context_length, P] each; None where they take more
        than `max_bytes`. Rows that `reach` was not asked for are neither computed nor in memory."""
        shape = (2, self.context_length, len(self._frequencies))
        size = 4 * math.prod(shape)
        if size > max_bytes:
            return None
        # Mapped: what malloc has, a start used before, and then it is in memory.
        self._cos, self._sin = mapped(size, parts=2).view(np.float32).reshape(shape)
        return self._cos, self._sin

    def reach(self, position: int) -> None:
        """Have the rows of the `tables` up to that of `position`, which is not `filled` yet."""
        first = self.filled
        end = min(max(position + 1, first + _AT_ONCE), self.context_length)
        self._cos[first:end], self._sin[first:end] = self.of(np.arange(first, end))
        self.filled = end

    def of(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions int [T] -> (cos, sin), each float32 [T, P]."""
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        if self._factors is not None:
            cos, sin = cos * self._factors, sin * self._factors
        return cos, sin
