"""The decoder's weights as the layers use them: QKV and gate/up fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Shapes: H hidden, Q = Nq * D, K = Nk * D, I intermediate."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [Q + 2K, H]
    qkv_bias: torch.Tensor | None  # [Q + 2K]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    output: torch.Tensor  # [H, Q]
    output_bias: torch.Tensor | None  # [H]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2I, H]
    gate_up_bias: torch.Tensor | None  # [2I]
    down: torch.Tensor  # [H, I]
    down_bias: torch.Tensor | None  # [H]


@dataclass(frozen=True)
class ModelWeights:
    embedding: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]; the embedding itself where they are tied

    def num_bytes(self) -> int:
        """Memory taken, tied weights counted once."""
        tensors = [self.embedding, self.final_norm]
        if self.head is not self.embedding:
            tensors.append(self.head)
        for layer in self.layers:
            tensors += [value for value in vars(layer).values() if value is not None]
        return sum(tensor.nbytes for tensor in tensors)
