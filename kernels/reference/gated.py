"""Gated activations of the MLP (SwiGLU and GeGLU, Shazeer 2020, arXiv:2002.05202).

silu_mul: y = silu(g) * u,   silu(g) = g / (1 + exp(-g))
clamped_mul: y = a * sigmoid(alpha * a) * (b + 1),   a = min(g, limit), b = u in -limit ... limit
gelu_mul: y = gelu(g) * u,   gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def clamped_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]. As gpt-oss has it."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1.0))


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]. The approximation by tanh, as Gemma has it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
