"""Random numbers that are a function of (seed, position): no state, no order, no batch.

SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators") used as a
counter-based generator: the seed is mixed into a stream's start, the position counts in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, a bijection of 64-bit words in which every bit avalanches."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits per (seed, position) pair.

    Seeds are any 64-bit integers (negative ones by two's complement).
    """
    seed = np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in seeds], dtype=np.uint64)
    counter = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    stream = _mix(seed + _GAMMA)
    return (_mix(stream + counter * _GAMMA) >> np.uint64(11)) * 2.0**-53
