"""Random numbers that are a function of (seed, position), on any device.

SplitMix64 (Steele, Lea & Flood 2014) used as a counter-based generator:

    u = (mix(mix(seed + g) + (position + 1) * g) >> 11) * 2^-53,   g = 0x9e3779b97f4a7c15

with arithmetic modulo 2^64, mix its finaliser.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB

Integers = TypeVar("Integers", torch.Tensor, np.ndarray)
"""int64, in torch or, several times as fast for the few rows of a step, in NumPy."""


def uniforms(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """seed, position int64 [R] -> float64 [R] in [0, 1), of 53 random bits each."""
    return random_bits(seed, position).double() * 2.0**-53


def uniforms_on_host(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The same numbers as `uniforms`, for tensors in the host's memory."""
    return torch.from_numpy(random_bits(seed.numpy(), position.numpy()) * 2.0**-53)


def random_bits(seed: Integers, position: Integers) -> Integers:
    """seed, position int64 [R] -> int64 [R], from 0 to 2^53 - 1."""
    gamma = _signed(GAMMA)
    stream = _mix(seed + gamma)
    return _shifted(_mix(stream + (position + 1) * gamma), 11)


def _mix(x: Integers) -> Integers:
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Integers, by: int) -> Integers:
    """To the right, as if without a sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
