"""The decoder: T flat tokens in, hidden states of the wanted tokens out.

Pre-norm transformer layers of Llama and its kin: RMSNorm, attention with rotary positions and
grouped keys, RMSNorm, gated MLP. Tokens of all rows are laid out flat, without padding; only
attention knows rows.

Products with weights are torch's (cuBLAS on a GPU); everything else is a kernel of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import KVScales
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class StepInput:
    """One step on the device. T tokens, M writes (T and the duplicates), N wanted tokens."""

    token_ids: torch.Tensor  # [T] int64
    cos: torch.Tensor  # [T, D/2]
    sin: torch.Tensor  # [T, D/2]
    write_slots: torch.Tensor  # [M] int64
    write_tokens: torch.Tensor | None  # [M] int64, None where M = T and in order
    attention: dict[int | None, Any]  # per window: what plan_attention returned
    wanted: torch.Tensor | None  # [N] int64, flat tokens whose hidden state is needed; None: all


class Decoder:
    """Weights and kernels; the KV cache [layers, 2, B, S, Nk, D] is passed in and written to."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: KernelSet,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        """`scales`: per layer, of a cache that is stored in eight bits."""
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._scales: Sequence[KVScales | None] = scales or [None] * config.num_layers

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.head.dtype

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Run all layers -> final-normed hidden states of the wanted tokens, [N, H]."""
        kernels, config, weights = self._kernels, self._config, self._weights
        eps = config.rms_norm_eps
        residual = kernels.embedding(weights.embedding, step.token_ids)
        x = kernels.rms_norm(residual, weights.layers[0].input_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            q = self._write(index, layer, x, step, cache)
            # Past its keys and values the last layer only matters where logits are wanted.
            if index == last and step.wanted is not None and not len(step.wanted):
                return x[:0]
            attended = self._attend(index, q, step, cache)
            if index == last and step.wanted is not None:
                attended = attended.index_select(0, step.wanted)
                residual = residual.index_select(0, step.wanted)
            x = linear(attended, layer.output, layer.output_bias)
            x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = kernels.silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))
            x = linear(x, layer.down, layer.down_bias)
            norm = weights.final_norm if index == last else weights.layers[index + 1].input_norm
            x, residual = kernels.add_rms_norm(x, residual, norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return linear(hidden, self._weights.head).float()

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden [N, H] -> out [N, V], in the model's dtype."""
        torch.mm(hidden, self._weights.head.t(), out=out)

    def _write(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        step: StepInput,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write this layer's keys and values. x [T, H] -> the queries [T, Nq, D]."""
        config = self._config
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        return self._kernels.rope_and_write(
            qkv,
            step.cos,
            step.sin,
            cache[index, 0],
            cache[index, 1],
            step.write_slots,
            step.write_tokens,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
            scales=self._scales[index],
        )

    def _attend(
        self, index: int, q: torch.Tensor, step: StepInput, cache: torch.Tensor
    ) -> torch.Tensor:
        """q [T, Nq, D] -> [T, Nq * D]."""
        plan = step.attention[self._config.windows[index]]
        out, _ = self._kernels.paged_attention(
            q, cache[index, 0], cache[index, 1], plan, scales=self._scales[index]
        )
        return out.flatten(1)
