"""Fingerprints of a token sequence: hashes of some of its windows, chosen by their content.

Two sequences that share a passage share the fingerprints in it, wherever it stands in either: of
`RUN` windows that follow each other, the one with the least hash is chosen (Schleimer, Wilkerson,
Aiken: "Winnowing: local algorithms for document fingerprinting", 2003). So no passage of
`RUN + WINDOW - 1` tokens is without one, also where it repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

WINDOW = 16
"""Tokens in a window: what is shorter is not noticed."""
EVERY = 8
"""One window in so many is a fingerprint, on average."""
RUN = 2 * EVERY - 1

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
        """Hashes (uint64) and the positions (int64, ascending) where their windows begin. The hash
        of a window that occurred before in `tokens` is mixed with how often it did.

        `tokens` (int32) is cut at the longest length. The hash of a window is that of its tokens
        alone: a polynomial in 64 bits, whose high bits are mixed into the low ones.
        """
        tokens = tokens[: len(self._powers)]
        if len(tokens) < WINDOW + RUN - 1:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
        hashes = _mixed((sums[WINDOW:] - sums[:-WINDOW]) * self._inverse[: len(sums) - WINDOW])
        edge = np.zeros(RUN - 1, np.uint64)
        least = np.concatenate((edge, _over_runs(np.minimum, hashes), edge))
        # The least of any run that it is in.
        chosen = np.flatnonzero(_over_runs(np.maximum, least) == hashes)
        times, gaps = _repeats(hashes[chosen], chosen)
        # Where every token or two begins the same window again, only some count.
        kept = times % np.maximum(EVERY // gaps, 1) == 0
        chosen, times = chosen[kept], times[kept].astype(np.uint64)
        again = _mixed(hashes[chosen] + times * np.uint64(_BASE))
        return np.where(times > 0, again, hashes[chosen]), chosen


def _over_runs(
    of: Callable[[np.ndarray, np.ndarray], np.ndarray], values: np.ndarray
) -> np.ndarray:
    """`of` (minimum or maximum) over each `RUN` values that follow each other."""
    for step in (1, 2, 4):
        values = of(values[:-step], values[step:])
    return of(values[: -(RUN - 8)], values[RUN - 8 :])


def _mixed(hashes: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_BASE)
    return hashes ^ (hashes >> np.uint64(32))


def _repeats(hashes: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each hash: how often it occurred before, and how far before the last time (int64)."""
    order = np.argsort(hashes, kind="stable")
    first = np.ones(len(order), bool)
    first[1:] = hashes[order][1:] != hashes[order][:-1]
    count = np.arange(len(order))
    times, gaps = np.empty_like(count), np.empty_like(count)
    times[order] = count - np.maximum.accumulate(np.where(first, count, 0))
    gaps[order] = np.where(first, EVERY, np.diff(positions[order], prepend=0))
    return times, gaps
