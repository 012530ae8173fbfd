"""Compute the rotations of a context's positions with NumPy, from the frequencies of `rope`.
Importing this module imports no torch: the weight cache keeps the frequencies."""

from __future__ import annotations

import logging
import math

import numpy as np

from rootlace.kernels.native.machine import mapped
from rootlace.runtime.model.checkpoint.config import ModelConfig

log = logging.getLogger(__name__)

_AT_ONCE = 1024
"""Least number of rows of the tables computed together; a larger number would delay a step."""


def chosen_context(config: ModelConfig, requested: int | None) -> int:
    """Return the context length of a model in tokens; `requested` may only shorten the model's own.

    Every position has one rotation, whatever else is in the batch or came before: cached keys stay
    valid. Two scalings of transformers depend on the length of the running batch. Both are
    therefore fixed when the model is loaded:

    - `dynamic` (NTK) changes its base beyond `max_position_embeddings`; the context ends there.
    - `longrope` has a short and a long set of factors. The context ends at
      `original_max_position_embeddings` (short set), unless a longer one is requested: then the
      long set serves all positions. If both sets are possible, the log names the chosen one.
    """
    rope, longest = config.spec.rope, config.spec.max_context
    chosen = min(requested or longest, longest)
    if rope.kind != "longrope":
        return chosen
    original = int(rope.parameters["original_max_position_embeddings"])
    if requested is None:
        chosen = min(longest, original)
    if longest <= original:
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
            longest,
        )
    return chosen


def query_factors(growth: tuple[float, int], positions: np.ndarray) -> np.ndarray:
    """Return the factors of queries at positions [T] (`Attention.growth`), float32 [T]."""
    beta, length = growth
    steps = np.floor(positions.astype(np.float32) / np.float32(length))
    return 1 + np.float32(beta) * np.log(1 + steps)


class Rotations:
    """Table of cos and sin for the positions of one context."""

    def __init__(
        self, context_length: int, frequencies: np.ndarray, factors: np.ndarray | None = None
    ) -> None:
        """`frequencies`: float32 [P], radians per position of each pair of a head's numbers.
        `factors`: float32 [P], multipliers of cos and sin."""
        self.context_length = context_length
        self._frequencies = frequencies
        self._factors = factors
        self.filled = 0
        """Number of positions whose rows the tables have."""

    def tables(self, max_bytes: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (cos, sin) of all positions, float32 [context_length, P] each; None if larger than
        `max_bytes`. Rows that `reach` was not asked for are neither computed nor in memory."""
        shape = (2, self.context_length, len(self._frequencies))
        size = 4 * math.prod(shape)
        if size > max_bytes:
            return None
        # Mapped: memory from malloc may be resident from the start, and stay so.
        self._cos, self._sin = mapped(size, parts=2).view(np.float32).reshape(shape)
        return self._cos, self._sin

    def reach(self, position: int) -> None:
        """Compute the rows of the `tables` up to that of `position`, which is not `filled` yet."""
        first = self.filled
        end = min(max(position + 1, first + _AT_ONCE), self.context_length)
        self._cos[first:end], self._sin[first:end] = self.of(np.arange(first, end))
        self.filled = end

    def of(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map positions, int [T], to (cos, sin), each float32 [T, P]."""
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        if self._factors is not None:
            cos, sin = cos * self._factors, sin * self._factors
        return cos, sin
