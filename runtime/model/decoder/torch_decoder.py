"""The decoder: T flat tokens in, hidden states of the wanted tokens out.

Layers of Llama and its kin: RMSNorm, attention with rotary positions and grouped keys, RMSNorm,
gated MLP; the model's spec says which features it has besides. Tokens of all rows are laid out
flat, without padding; only attention knows rows. Everything is computed by the kernel set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import KVScales
from rootlace.kernels.weights import unknown_kind
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.runtime.model.families import support
from rootlace.runtime.model.families.spec import (
    Attention,
    GatedMlp,
    ModelSpec,
    Norm,
    Rope,
    WeightNames,
)
from rootlace.runtime.model.families.support import Support, any_value, kind, one_of
from rootlace.wire.errors import UnsupportedModel

SUPPORT: Support = {
    **any_value("vocab_size", "hidden_size", "num_layers", "max_context", "tied_embeddings"),
    "norm": kind(Norm),
    "norm.kind": one_of("rms"),
    "norm.placement": one_of("before", "after", "around"),
    **any_value("norm.eps", "norm.offset"),
    "attention": kind(Attention),
    **any_value("attention.num_heads", "attention.num_kv_heads", "attention.head_dim"),
    **any_value("attention.scale", "attention.soft_cap", "attention.windows"),
    **any_value("attention.qkv_bias", "attention.output_bias"),
    **any_value("attention.head_norm", "attention.joint_norm"),
    "mlp": kind(GatedMlp),
    "mlp.activation": one_of("silu", "gelu_tanh"),
    **any_value("mlp.inner_size", "mlp.bias"),
    "rope": kind(Rope),
    **any_value("rope.kind", "rope.parameters", "rope.rotated", "rope.neighbours"),
    **any_value("rope.unrotated_layers", "rope.local_theta"),
    "names": kind(WeightNames),
    **any_value("names.embedding", "names.layer", "names.parts", "names.final_norm", "names.head"),
    **any_value("embedding_multiplier", "rounded_multiplier", "residual_multiplier"),
    **any_value("logit_multiplier", "logit_soft_cap"),
}
"""What this decoder, with its loader and rotations, can compute."""


def why_not(spec: ModelSpec) -> str | None:
    """Why this decoder cannot run a model; None if it can."""
    return support.why_not(spec, SUPPORT)


Rotations = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a step's tokens in a layer, each [T, D/2]."""


@dataclass(frozen=True)
class StepInput:
    """One step on the device. T tokens, M writes (T and the duplicates), N wanted tokens."""

    token_ids: torch.Tensor  # [T] int64
    cos: torch.Tensor  # [T, D/2], or [T, D] with those of layers with windows behind them
    sin: torch.Tensor  # the same
    write_slots: torch.Tensor  # [M] int64
    write_tokens: torch.Tensor | None  # [M] int64, None where M = T and in order
    attention: dict[int | None, Any]  # per window: what plan_attention returned
    wanted: torch.Tensor | None  # [N] int64, flat tokens whose hidden state is needed; None: all


class Decoder:
    """Weights and kernels; the KV cache [layers, 2, B, S, Nk, D] is passed in and written to."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: KernelSet,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        """`scales`: per layer, of a cache that is stored in eight bits.

        Raises `UnsupportedModel` for a model that is not to be computed exactly: by this decoder,
        or because the kernels do not multiply by its kind of weights.
        """
        reason = why_not(spec)
        if reason is not None:
            raise UnsupportedModel(f"the decoder cannot compute this model: {reason}")
        unknown = unknown_kind(weights.products(), kernels.weights)
        if unknown is not None:
            raise UnsupportedModel(f"the {kernels.name} kernels have no products of {unknown}")
        self._spec = spec
        self._weights = weights
        self._kernels = kernels
        self._scales: Sequence[KVScales | None] = scales or [None] * spec.num_layers
        gated = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_mul}
        self._gated = gated[spec.mlp.activation]
        multiplier = spec.embedding_multiplier
        if spec.rounded_multiplier:
            multiplier = torch.tensor(multiplier, dtype=weights.embedding.dtype).item()
        self._embedding_multiplier = multiplier

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Run all layers -> final-normed hidden states of the wanted tokens, [N, H]."""
        kernels, spec, weights = self._kernels, self._spec, self._weights
        residual = _scaled(
            kernels.embedding(weights.embedding, step.token_ids), self._embedding_multiplier
        )
        x, first = residual, weights.layers[0].input_norm
        if first is not None:
            x = kernels.rms_norm(residual, first, spec.norm.eps)
        last = len(weights.layers) - 1
        rotations = self._rotations(step)
        for index, layer in enumerate(weights.layers):
            q = self._write(index, layer, x, rotations[index], step, cache)
            # Beyond its keys and values, the last layer is needed only where logits are wanted.
            if index == last and step.wanted is not None and not len(step.wanted):
                return x[:0]
            attended = self._attend(index, q, step, cache)
            if index == last and step.wanted is not None:
                attended = attended.index_select(0, step.wanted)
                residual = residual.index_select(0, step.wanted)
            x = _scaled(kernels.linear(attended, layer.output), spec.residual_multiplier)
            x, residual = self._join(x, residual, layer.attention_out_norm, layer.post_norm)
            x = self._gated(kernels.linear(x, layer.gate_up))
            x = _scaled(kernels.linear(x, layer.down), spec.residual_multiplier)
            norm = weights.final_norm if index == last else weights.layers[index + 1].input_norm
            x, residual = self._join(x, residual, layer.mlp_out_norm, norm)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return self._capped(self._kernels.linear(hidden, self._weights.head)).float()

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden [N, H] -> out [N, V], in the model's dtype."""
        self._capped(self._kernels.linear(hidden, self._weights.head, out))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """What the spec does to logits, in place."""
        logits = _scaled(logits, self._spec.logit_multiplier)
        cap = self._spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _rotations(self, step: StepInput) -> list[Rotations]:
        """cos and sin of each layer."""
        spec = self._spec
        everywhere = local = (step.cos, step.sin)
        if spec.rope.local_theta:
            halves = [part.chunk(2, dim=1) for part in everywhere]
            everywhere, local = (
                (cos.contiguous(), sin.contiguous()) for cos, sin in zip(*halves, strict=True)
            )
        found = [everywhere if window is None else local for window in spec.attention.windows]
        if spec.rope.unrotated_layers:
            still = (torch.ones_like(everywhere[0]), torch.zeros_like(everywhere[1]))
            for index in spec.rope.unrotated_layers:
                found[index] = still
        return found

    def _join(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        own: torch.Tensor | None,
        following: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output x of attention or MLP, after its `own` norm, to the residual stream -> the
        input of what follows, after its norm, and the stream. None: no norm."""
        eps = self._spec.norm.eps
        if own is not None:
            x = self._kernels.rms_norm(x, own, eps)
        if following is not None:
            return self._kernels.add_rms_norm(x, residual, following, eps)
        residual = residual + x
        return residual, residual

    def _write(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        rotations: Rotations,
        step: StepInput,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write this layer's keys and values. x [T, H] -> the queries [T, Nq, D]."""
        spec = self._spec
        qkv = self._kernels.linear(x, layer.qkv)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if spec.attention.joint_norm and q_norm is not None and k_norm is not None:
            q, k, v = qkv.split((len(q_norm), len(k_norm), len(k_norm)), dim=1)
            q = self._kernels.rms_norm(q.contiguous(), q_norm, spec.norm.eps)
            k = self._kernels.rms_norm(k.contiguous(), k_norm, spec.norm.eps)
            qkv, q_norm, k_norm = torch.cat((q, k, v), dim=1), None, None
        qkv = qkv.view(len(x), -1, spec.attention.head_dim)
        return self._kernels.rope_and_write(
            qkv,
            *rotations,
            cache[index, 0],
            cache[index, 1],
            step.write_slots,
            step.write_tokens,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.norm.eps,
            scales=self._scales[index],
        )

    def _attend(
        self, index: int, q: torch.Tensor, step: StepInput, cache: torch.Tensor
    ) -> torch.Tensor:
        """q [T, Nq, D] -> [T, Nq * D]."""
        attention = self._spec.attention
        out, _ = self._kernels.paged_attention(
            q,
            cache[index, 0],
            cache[index, 1],
            step.attention[attention.windows[index]],
            scale=attention.scale,
            soft_cap=attention.soft_cap,
            scales=self._scales[index],
        )
        return out.flatten(1)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x times `factor`, in place."""
    return x if factor == 1.0 else x.mul_(factor)
