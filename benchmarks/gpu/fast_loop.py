"""The loop that engines are measured against: a static batch, a static cache, one captured graph.

Plain torch in the manner of gpt-fast (https://github.com/pytorch-labs/gpt-fast): the batch and the
length are fixed beforehand, every step attends to the whole cache under a mask, sampling is greedy,
and the graph of a step is replayed until the length is reached. The host does nothing else. It can
serve nobody (no request comes or goes meanwhile), which is what makes it a good measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from benchmarks.gpu.models import RandomModel
from rootlace.kernels.reference.linear import linear
from rootlace.runtime.model.checkpoint.weights import LayerWeights
from rootlace.runtime.model.decoder.rope import RotaryEmbedding

WARM_UPS = 3


class FastLoop:
    """Continues `rows` prompts of `prompt` tokens by `new` tokens each, greedily."""

    def __init__(
        self, model: RandomModel, rows: int, prompt: int, new: int, compiled: bool = False
    ) -> None:
        """`compiled`: a layer's decode step goes through torch.compile (inductor)."""
        spec, device = model.config.spec, model.device
        self._model = model
        self._prompt, self._new = prompt, new
        attention = spec.attention
        self._heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        length = prompt + new
        shape = (spec.num_layers, 2, rows, attention.num_kv_heads, length, attention.head_dim)
        self._cache = torch.zeros(shape, dtype=model.dtype, device=device)
        rotary = RotaryEmbedding(model.config, None, device, model.dtype)
        self._cos, self._sin = rotary(torch.arange(length, device=device))  # [length, D/2]
        self._places = torch.arange(length, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._found = torch.zeros((new, rows), dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._layer: Callable[..., Any] = self._decode_layer
        if compiled:
            self._layer = torch.compile(self._decode_layer, fullgraph=True, dynamic=False)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the step (on a GPU)."""
        if self._cache.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._reset()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    @torch.inference_mode()
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """prompts int64 [rows, prompt] -> int64 [rows, new]."""
        self._reset()
        first = self._prefill(prompts)
        self._found[0].copy_(first)
        self._ids.copy_(first)
        for _ in range(self._new - 1):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self._found.t().clone()

    def _reset(self) -> None:
        self._position.fill_(self._prompt)
        self._number.fill_(1)

    # ------------------------------------------------------------ one decode step

    def _step(self) -> None:
        weights, eps = self._model.weights, self._model.config.spec.norm.eps
        x = weights.embedding[self._ids]
        cos, sin = self._cos[self._position], self._sin[self._position]
        mask = (self._places <= self._position).view(1, 1, 1, -1)
        for layer, cache in zip(weights.layers, self._cache, strict=True):
            x = self._layer(x, layer, cache, cos, sin, mask, self._position)
        x = rms_norm(x, x.shape[-1:], weights.final_norm, eps)
        ids = linear(x, weights.head).argmax(-1)
        self._ids.copy_(ids)
        self._found.index_copy_(0, self._number, ids.unsqueeze(0))
        self._number.add_(1)
        self._position.add_(1)

    def _decode_layer(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        cache: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """x [B, H] -> [B, H]; cache [2, B, Nk, S, D]."""
        heads, kv_heads, dim = self._heads
        eps = self._model.config.spec.norm.eps
        rows = len(x)
        normed = rms_norm(x, x.shape[-1:], layer.input_norm, eps)
        q, k, v = (
            linear(normed, layer.qkv).view(rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        cache[0].index_copy_(2, position, k.unsqueeze(2))
        cache[1].index_copy_(2, position, v.unsqueeze(2))
        # The queries that share a key head are rows of one query matrix: keys are not repeated.
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        attended = scaled_dot_product_attention(grouped, cache[0], cache[1], attn_mask=mask)
        x = x + linear(attended.reshape(rows, heads * dim), layer.output)
        return x + _mlp(x, layer, eps)

    # ------------------------------------------------------------ the prompts

    def _prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        """All prompts at once -> the first tokens, int64 [B]."""
        weights, eps = self._model.weights, self._model.config.spec.norm.eps
        heads, kv_heads, dim = self._heads
        rows, length = prompts.shape
        cos, sin = self._cos[:length, None], self._sin[:length, None]
        x = weights.embedding[prompts]
        for layer, cache in zip(weights.layers, self._cache, strict=True):
            normed = rms_norm(x, x.shape[-1:], layer.input_norm, eps)
            qkv = linear(normed, layer.qkv).view(rows, length, -1, dim)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 2)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            cache[0, :, :, :length] = k
            cache[1, :, :, :length] = v
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended = attended.transpose(1, 2).reshape(rows, length, heads * dim)
            x = x + linear(attended, layer.output)
            x = x + _mlp(x, layer, eps)
        last = rms_norm(x[:, -1], x.shape[-1:], weights.final_norm, eps)
        return linear(last, weights.head).argmax(-1)


def _mlp(x: torch.Tensor, layer: LayerWeights, eps: float) -> torch.Tensor:
    normed = rms_norm(x, x.shape[-1:], layer.post_norm, eps)
    gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, layer.down)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: halves of the last axis are the two parts of complex numbers."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
