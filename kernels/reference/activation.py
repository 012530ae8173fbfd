"""Activations of an MLP without a gate.

relu: max(x, 0)
gelu: x / 2 * (1 + erf(x / sqrt(2)))
gelu_tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
"""

from __future__ import annotations

import torch


def relu(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I]."""
    return torch.nn.functional.relu(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I], exactly."""
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I]. The approximation by tanh."""
    return torch.nn.functional.gelu(x, approximate="tanh")
