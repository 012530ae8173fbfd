"""Fingerprints of a token sequence: hashes of some of its windows, chosen by their content.

Two sequences that share a passage share the fingerprints in it, wherever it stands in either (as
in Schleimer, Wilkerson, Aiken: "Winnowing: local algorithms for document fingerprinting", 2003,
with the simpler choice of windows whose hash is divisible by a number).
"""

from __future__ import annotations

import numpy as np

WINDOW = 16
"""Tokens in a window: what is shorter is not noticed."""
EVERY = 8
"""One window in so many is a fingerprint."""

_BASE = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_INVERSE = pow(_BASE, -1, 2**64)


def _powers(base: int, count: int) -> np.ndarray:
    found = np.empty(count, np.uint64)
    value = 1
    for at in range(count):
        found[at] = value
        value = value * base & _MASK
    return found


class Fingerprints:
    """Computes fingerprints of sequences of up to `longest` tokens. Two tables of powers, kept."""

    def __init__(self, longest: int) -> None:
        self._powers = _powers(_BASE, longest)
        self._inverse = _powers(_INVERSE, longest)

    def of(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hashes (uint64) and the positions (int64, ascending) where their windows begin; of
        windows that occur more than once, none.

        `tokens` (int32) is cut at the longest length. The hash of a window is that of its tokens
        alone: a polynomial in 64 bits, whose high bits are mixed into the low ones.
        """
        tokens = tokens[: len(self._powers)]
        if len(tokens) < WINDOW:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
        hashes = (sums[WINDOW:] - sums[:-WINDOW]) * self._inverse[: len(tokens) - WINDOW + 1]
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(_BASE)
        hashes ^= hashes >> np.uint64(32)
        chosen = np.flatnonzero(hashes % np.uint64(EVERY) == 0)
        _, first, count = np.unique(hashes[chosen], return_index=True, return_counts=True)
        chosen = chosen[np.sort(first[count == 1])]
        return hashes[chosen], chosen
