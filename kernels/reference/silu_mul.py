"""Gated activation of the MLP (SwiGLU, Shazeer 2020, arXiv:2002.05202).

y = silu(g) * u,   silu(g) = g / (1 + exp(-g))
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
