"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over what is cached of it.

With c the normed latent of a token, a head's plain key is U c and its value V c; r is the rotated
part of the key. Scores need no keys of heads:

    score = q . (U c) + q_r . r = (U^T q) . c + q_r . r

and neither are values made: what a head attends to is the sum of weights times c, times V.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.reference.rope import rotate
from rootlace.runtime.model.checkpoint.weights import LayerWeights
from rootlace.runtime.model.families.spec import Attention, Latent


class LatentAttention:
    """What stands before and behind attention to latents. Shapes: N heads, R rank, r rotated
    numbers."""

    def __init__(self, attention: Attention, latent: Latent, kernels: KernelSet) -> None:
        self._heads = attention.num_heads
        self._latent = latent
        self._rotated = attention.head_dim - latent.rank
        self._kernels = kernels

    def queries_and_key(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        product: Callable[[torch.Tensor, str], torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> queries [T, N, R + r], and what is cached, [T, R + r]. `product`: of rows and
        the part of the layer that has this name, adapters included. Of a row of cos and sin the
        first r / 2 numbers are for these heads."""
        latent, rotated = self._latent, self._rotated
        q, c, k_rotated = _split(product(x, "qkv"), -1, latent.rank, rotated)
        if layer.q_up is not None and layer.q_norm is not None:
            q = self._kernels.rms_norm(q.contiguous(), layer.q_norm, latent.eps)
            q = product(q, "q_up")
        assert layer.k_norm is not None
        c = self._kernels.rms_norm(c.contiguous(), layer.k_norm, latent.eps)
        cos, sin = cos[:, : rotated // 2], sin[:, : rotated // 2]
        plain, q_rotated = q.unflatten(1, (self._heads, -1)).split((latent.plain, rotated), dim=2)
        keys, _ = self._up(layer)
        absorbed = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        queries = torch.cat((absorbed, rotate(q_rotated, cos, sin)), dim=2)
        key = torch.cat((c, rotate(k_rotated.unsqueeze(1), cos, sin).squeeze(1)), dim=1)
        return queries, key

    def output(self, attended: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """attended [T, N, R + r], of which the first R count -> [T, N * a value's numbers]."""
        _, values = self._up(layer)
        latents = attended[:, :, : self._latent.rank].transpose(0, 1)
        return torch.bmm(latents, values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _up(self, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes keys [N, plain, R] and values [N, values, R] of a latent."""
        assert layer.kv_up is not None
        matrix = layer.kv_up.matrix.unflatten(0, (self._heads, -1))
        keys, values = matrix.split((self._latent.plain, self._latent.values), dim=1)
        return keys, values


def _split(x: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Parts of the last dimension, the first of which is what is left."""
    rest = x.shape[-1] - sum(sizes[1:])
    return x.split((rest, *sizes[1:]), dim=-1)
