"""Compute the hidden states of the wanted tokens from T flat tokens, with torch.

Layers are those of Llama and similar models: norm, attention with rotary positions and grouped
keys, norm, MLP. The model's spec lists further features. Tokens of all rows are laid out flat,
without padding; only attention knows rows. The kernel set computes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from rootlace.kernels.interface import KernelSet, KVScaling
from rootlace.kernels.reference.layers import rotate
from rootlace.kernels.weights import unknown_kind
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.automaton_table import Mask
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.runtime.model.decoder.interface import (
    PLAIN,
    Groups,
    StepDecoder,
    StepInput,
    StepInputBuilder,
    copied_slots,
    upload,
    why_not,
)
from rootlace.runtime.model.decoder.rope import query_factors
from rootlace.runtime.model.families.spec import Attention, Experts, Latent, ModelSpec
from rootlace.runtime.model.lora import Adapter
from rootlace.runtime.model.parallel.group import Group
from rootlace.wire.errors import UnsupportedModel

# Latent -------------------------------------------------------------------------------------------
#
# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over the cached latents.
#
# With c the normed latent of a token, a head's plain key is U c and its value V c; r is the rotated
# part of the key. Scores need no heads' keys:
#
#     score = q . (U c) + q_r . r = (U^T q) . c + q_r . r
#
# Nor are values computed: a head's output is V times the sum of weights times c.


class LatentAttention:
    """Computation before and behind attention over latents. Shapes: N heads, R rank, r rotated
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
        """Return the queries [T, N, R + r] and the cached vectors [T, R + r] of x [T, H]. `product`
        multiplies rows by the layer's part of a name, adapters included. The first r / 2 numbers of
        a row of cos and sin are for these heads."""
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
        """Map attended [T, N, R + r], of which the first R count, to [T, N * a value's numbers]."""
        _, values = self._up(layer)
        latents = attended[:, :, : self._latent.rank].transpose(0, 1)
        return torch.bmm(latents, values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _up(self, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return matrices that make keys [N, plain, R] and values [N, values, R] of a latent."""
        assert layer.kv_up is not None
        matrix = layer.kv_up.matrix.unflatten(0, (self._heads, -1))
        keys, values = matrix.split((self._latent.plain, self._latent.values), dim=1)
        return keys, values


def _split(x: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Split the last dimension into parts; the first part takes the rest."""
    rest = x.shape[-1] - sum(sizes[1:])
    return x.split((rest, *sizes[1:]), dim=-1)


# Mixture ------------------------------------------------------------------------------------------
#
# Mix experts: choose each token's MLPs, and sum their outputs.


Product = Callable[[torch.Tensor, str, Groups], torch.Tensor]
"""Multiplication of rows by a part of a layer, by its `layer_parts` name, adapters included."""
Mlp = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""MLP of an expert: rows [n, H], the expert's number and the rows' tokens -> [n, H]."""
Choice = tuple[torch.Tensor, torch.Tensor]
"""Experts int64 [T, K], best first, and their shares, float32 [T, K]."""


class Mixture:
    """MLPs of a layer with experts. A token's output depends on no other token, as far as products
    do not."""

    def __init__(
        self,
        experts: Experts,
        kernels: KernelSet,
        activate: Callable[[torch.Tensor], torch.Tensor],
        ranks: Group | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`activate`: the activation of MLPs without a clamp. `ranks`: the group of all ranks, if
        the MLPs are one rank's part."""
        self._experts = experts
        self._ranks = ranks
        self._adapted = {
            number
            for number, adapter in enumerate(adapters)
            if any(name.startswith("experts.") for layer in adapter.layers for name in layer)
        }
        self._activate = activate
        if experts.clamp is not None:
            alpha, limit = experts.clamp
            self._activate = lambda gate_up: kernels.clamped_mul(gate_up, alpha, limit)

    def __call__(
        self, x: torch.Tensor, layer: LayerWeights, product: Product, groups: Groups
    ) -> torch.Tensor:
        """Map x [T, H] to [T, H]; a rank returns its part of the sum. `product`: this layer's."""
        scores = product(x, "router", groups)
        if self._ranks is not None:  # one rank decides: a last bit may matter
            scores = self._ranks.first(scores)
        found = choose(scores, self._experts, layer.correction)
        of_experts = [group for group in groups if group[0] in self._adapted]

        def expert(rows: torch.Tensor, number: int, tokens: torch.Tensor) -> torch.Tensor:
            rows_of = _among(tokens, of_experts)
            inner = self._activate(product(rows, f"experts.{number}.gate_up", rows_of))
            return product(inner, f"experts.{number}.down", rows_of)

        out = added_up(x, found, self._experts.count, expert)
        if not self._experts.shared_size:
            return out
        shared = product(self._activate(product(x, "gate_up", groups)), "down", groups)
        if layer.shared_gate is not None:
            shared = torch.sigmoid(product(x, "shared_gate", groups)) * shared
        return out + shared


def _among(tokens: torch.Tensor, groups: Groups) -> Groups:
    """Map each adapter to its rows among the rows `tokens`."""
    return [(number, torch.isin(tokens, rows).nonzero()[:, 0]) for number, rows in groups]


def choose(
    scores: torch.Tensor, experts: Experts, correction: torch.Tensor | None = None
) -> Choice:
    """Map scores [T, E] to each token's experts and shares; of equal scores the first wins."""
    scores = scores.float()
    shares = scores.sigmoid() if experts.scores == "sigmoid" else torch.softmax(scores, dim=-1)
    ranked = shares if correction is None else shares + correction
    if experts.groups > 1:
        ranked = _in_best_groups(ranked, experts)
    chosen = _best(ranked, experts.chosen)
    found = shares.gather(1, chosen)
    if experts.normalised:
        found = found / found.sum(dim=-1, keepdim=True)
    return chosen, found if experts.factor == 1.0 else found * experts.factor


def _best(ranked: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest numbers of each row, the first of equals first."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(ranked: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Set the ranks of experts outside the best groups to -inf."""
    grouped = ranked.unflatten(1, (experts.groups, -1))
    best = grouped.topk(experts.best_of_group, dim=-1).values.sum(dim=-1)
    counts = torch.zeros_like(best, dtype=torch.bool)
    counts.scatter_(1, _best(best, experts.chosen_groups), True)
    return grouped.masked_fill(~counts.unsqueeze(-1), -torch.inf).flatten(1)


def added_up(x: torch.Tensor, found: Choice, experts: int, mlp: Mlp) -> torch.Tensor:
    """Sum the outputs of the chosen experts for x [T, H], times their shares: [T, H].

    Rows of one expert are gathered and go through the expert's MLP together. A token's outputs are
    summed in float32 in the order of its choice, whatever else is in the step.
    """
    chosen, shares = found
    count, each = chosen.shape
    expert_of = chosen.flatten()  # by pair of token and expert
    order = torch.argsort(expert_of, stable=True)
    tokens = order // each
    rows = x.index_select(0, tokens)
    sizes = torch.bincount(expert_of, minlength=experts).tolist()
    outputs = torch.empty_like(rows)
    start = 0
    for expert, size in enumerate(sizes):
        some = slice(start, start := start + size)
        if size:
            outputs[some] = mlp(rows[some], expert, tokens[some])
    by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(count, each, -1)
    total = by_token[:, 0].float() * shares[:, :1]
    for rank in range(1, each):
        total.addcmul_(by_token[:, rank].float(), shares[:, rank : rank + 1])
    return total.to(x.dtype)


# Torch decoder ------------------------------------------------------------------------------------


NormWeights = tuple[torch.Tensor | None, torch.Tensor | None]
"""Weight and bias of a norm; None: there is no norm, or it has no bias."""
Rotations = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a step's tokens in a layer, each [T, D/2]."""


class Decoder:
    """Decoder in torch; the caller passes the KV cache [layers, 2, B, S, Nk, D] to write to."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: KernelSet,
        scales: Sequence[KVScaling] | None = None,
        adapters: Sequence[Adapter] = (),
        ranks: Group | None = None,
    ) -> None:
        """`scales`: scaling per layer of a cache stored in few bits. `adapters`: adapters that a
        step's `AdaptedRows` may name. `ranks`: the group of all ranks, if spec and weights are one
        rank's (`Shard.local_spec`); logits are then those of the rank's part of the vocabulary.

        Raises `UnsupportedModel` if this decoder cannot compute the model exactly, or if the
        kernels cannot multiply by its kind of weights.
        """
        reason = why_not(spec)
        if reason is not None:
            raise UnsupportedModel(f"the decoder cannot compute this model: {reason}")
        unknown = unknown_kind(weights.products(), kernels.weights)
        if unknown is not None:
            raise UnsupportedModel(f"the {kernels.name} kernels have no products of {unknown}")
        self.spec = spec
        self._weights = weights
        self._kernels = kernels
        self._adapters = adapters
        self._ranks = ranks
        self._scales: Sequence[KVScaling | None] = scales or [None] * spec.num_layers
        if spec.mlp.gated:
            activations = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_mul}
        else:
            activations = {name: getattr(kernels, name) for name in PLAIN}
        self._activate = activations[spec.mlp.activation]
        self._latent: LatentAttention | None = None
        if spec.attention.latent is not None:
            self._latent = LatentAttention(spec.attention, spec.attention.latent, kernels)
        self._experts: Mixture | None = None
        if spec.experts is not None:
            self._experts = Mixture(spec.experts, kernels, self._activate, ranks, adapters)
        multiplier = spec.embedding_multiplier
        if spec.rounded_multiplier:
            multiplier = torch.tensor(multiplier, dtype=weights.embedding.dtype).item()
        self._embedding_multiplier = multiplier

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Run all layers; return the final-normed hidden states of the wanted tokens, [N, H]."""
        kernels, spec, weights = self._kernels, self.spec, self._weights
        residual = _scaled(
            kernels.embedding(weights.embedding, step.token_ids), self._embedding_multiplier
        )
        if weights.positions is not None:
            residual = residual + kernels.embedding(weights.positions, step.positions)
        x = self._normed(residual, weights.layers[0].norm("input_norm"))
        last = len(weights.layers) - 1
        rotations, factors = self._rotations(step), self._query_factors(step)
        groups: Groups = [(one.adapter, one.tokens) for one in step.adapted]
        for index, layer in enumerate(weights.layers):
            q = self._write(index, layer, x, rotations[index], step, cache, groups)
            q = q if factors is None else q * factors
            # Behind its keys and values, compute the last layer for wanted tokens only.
            if index == last and step.wanted is not None and not len(step.wanted):
                return x[:0]
            attended = self._attend(index, layer, q, step, cache)
            if index == last and step.wanted is not None:
                attended = attended.index_select(0, step.wanted)
                residual = residual.index_select(0, step.wanted)
                x = x.index_select(0, step.wanted) if spec.parallel else x
                groups = [(one.adapter, one.wanted) for one in step.adapted]
            out = self._summed(self._product(attended, layer, index, "output", groups))
            out = _scaled(out, spec.residual_multiplier)
            if spec.parallel:
                post_norm = layer.norm("post_norm")
                x = x if post_norm[0] is None else self._normed(residual, post_norm)
                out = out.add_(self._mlp(x, layer, index, groups))
            else:
                x, residual = self._join(
                    out, residual, layer.norm("attention_out_norm"), layer.norm("post_norm")
                )
                out = self._mlp(x, layer, index, groups)
            following: NormWeights = (weights.final_norm, weights.final_norm_bias)
            if index != last:
                following = weights.layers[index + 1].norm("input_norm")
            x, residual = self._join(out, residual, layer.norm("mlp_out_norm"), following)
        return x

    def _mlp(
        self, x: torch.Tensor, layer: LayerWeights, index: int, groups: Groups
    ) -> torch.Tensor:
        if self._experts is not None and layer.experts:
            out = self._experts(
                x,
                layer,
                lambda x, name, groups: self._product(x, layer, index, name, groups),
                groups,
            )
        else:
            inner = self._activate(self._product(x, layer, index, "gate_up", groups))
            out = self._product(inner, layer, index, "down", groups)
        return _scaled(self._summed(out), self.spec.residual_multiplier)

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        return part if self._ranks is None else self._ranks.summed(part)

    def _product(
        self, x: torch.Tensor, layer: LayerWeights, index: int, name: str, groups: Groups
    ) -> torch.Tensor:
        """Multiply x by the part `name` of a layer; add the adapters' products to their rows."""
        y = self._kernels.linear(x, layer.part(name))
        for number, rows in groups:
            found = self._adapters[number].layers[index].get(name)
            if found is not None:
                inner = torch.nn.functional.linear(x.index_select(0, rows), found.a)
                y.index_add_(0, rows, torch.nn.functional.linear(inner, found.b))
        return y

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [N, H] to logits, float32 [N, V], or to scores of labels."""
        assert self._weights.head is not None, "there is no head"
        return self._capped(self._kernels.linear(hidden, self._weights.head)).float()

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of hidden [N, H] to out [N, V], in the model's dtype. A model without
        logits of tokens leaves `out` unchanged."""
        if self.spec.labels is not None or self._weights.head is None:
            return
        self._capped(self._kernels.linear(hidden, self._weights.head, out))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiply and cap logits in place, as the spec says."""
        logits = _scaled(logits, self.spec.logit_multiplier)
        cap = self.spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _rotations(self, step: StepInput) -> list[Rotations]:
        """Return cos and sin of each layer."""
        spec = self.spec
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

    def _query_factors(self, step: StepInput) -> torch.Tensor | None:
        """Return the factors of the queries, [T, 1, 1]; None: no factors."""
        growth = self.spec.attention.growth
        if growth is None:
            return None
        return query_factors(growth, step.positions).to(self.dtype).view(-1, 1, 1)

    def _join(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeights, following: NormWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output x of attention or MLP, after the norm `norm`, to the residual stream.
        Return the next part's input, after the `following` norm, and the stream."""
        x = self._normed(x, norm)
        weight, _ = following
        if weight is not None and self.spec.norm.kind == "rms":
            return self._kernels.add_rms_norm(x, residual, weight, self.spec.norm.eps)
        residual = residual + x
        return self._normed(residual, following), residual

    def _normed(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        """Return x [T, H] after a norm; unchanged without a norm."""
        (weight, bias), eps = norm, self.spec.norm.eps
        if weight is None:
            return x
        if self.spec.norm.kind == "rms":
            return self._kernels.rms_norm(x, weight, eps)
        return self._kernels.layer_norm(x, weight, bias, eps)

    def _write(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        rotations: Rotations,
        step: StepInput,
        cache: torch.Tensor,
        groups: Groups,
    ) -> torch.Tensor:
        """Write this layer's keys and values; return the queries [T, Nq, D] of x [T, H]."""
        spec = self.spec
        if self._latent is not None:
            q, key = self._latent.queries_and_key(
                x, layer, lambda x, name: self._product(x, layer, index, name, groups), *rotations
            )
            key = key if step.write_tokens is None else key.index_select(0, step.write_tokens)
            cache[index, 0].view(-1, key.shape[-1]).index_copy_(0, step.write_slots, key)
            return q
        qkv = self._product(x, layer, index, "qkv", groups)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if spec.attention.joint_norm and q_norm is not None and k_norm is not None:
            q, k, v = qkv.split((len(q_norm), len(k_norm), len(k_norm)), dim=1)
            q, k = self._joint_norms((q, q_norm), (k, k_norm))
            qkv, q_norm, k_norm = torch.cat((q, k, v), dim=1), None, None
        qkv = qkv.view(len(x), -1, spec.attention.head_dim)
        if spec.attention.own_norms and q_norm is not None and k_norm is not None:
            qkv = _own_norms(qkv, torch.cat((q_norm, k_norm)), spec.norm.eps)
            q_norm, k_norm = None, None
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

    def _joint_norms(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Apply RMSNorm with weight [n] to each x [T, n], of which each rank has a part."""
        eps = self.spec.norm.eps
        if self._ranks is None:
            return [self._kernels.rms_norm(x.contiguous(), weight, eps) for x, weight in parts]
        # Heads that several ranks hold all count equally often: the mean is unchanged.
        squares = [x.float().square().mean(dim=1) for x, _ in parts]
        total = self._ranks.summed(torch.stack(squares, dim=1))
        scales = torch.rsqrt(total / self._ranks.count + eps)
        return [
            (x.float() * scales[:, at : at + 1]).to(x.dtype).mul_(weight)
            for at, (x, weight) in enumerate(parts)
        ]

    def _attend(
        self, index: int, layer: LayerWeights, q: torch.Tensor, step: StepInput, cache: torch.Tensor
    ) -> torch.Tensor:
        """Attend with q [T, Nq, D]; return [T, Nq * D], or Nq * a value's numbers if latent."""
        attention = self.spec.attention
        out, lse = self._kernels.paged_attention(
            q,
            cache[index, 0],
            cache[index, -1],
            step.attention[attention.windows[index]],
            scale=attention.scale,
            soft_cap=attention.soft_cap,
            scales=self._scales[index],
            want_lse=attention.sinks,
        )
        if lse is not None and layer.sinks is not None:
            out = with_sinks(out, lse, layer.sinks)
        return out.flatten(1) if self._latent is None else self._latent.output(out, layer)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return out [T, Nq, D] as if a further key had the score `sinks` [Nq] and a value of zero."""
    share = torch.sigmoid(lse - sinks.float())
    return (out.float() * share.unsqueeze(-1)).to(out.dtype)


def _own_norms(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm the first n of heads [T, N, D] by LayerNorm with weight [n * D]."""
    dim = heads.shape[2]
    normed, rest = heads.tensor_split([len(weight) // dim], dim=1)
    found = torch.nn.functional.layer_norm(normed.float(), (dim,), eps=eps)
    found = found * weight.float().view(-1, dim)
    return torch.cat((found.to(heads.dtype), rest), dim=1)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply x by `factor`, in place."""
    return x if factor == 1.0 else x.mul_(factor)


class ReferenceForward(msgspec.Struct, frozen=True):
    """Decoder in torch with its KV cache, on any device."""

    decoder: StepDecoder
    inputs: StepInputBuilder
    cache: torch.Tensor

    @property
    def vocab_size(self) -> int:
        return self.decoder.spec.vocab_size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> torch.Tensor:
        if len(plan.copies):
            slots = copied_slots(plan, self.inputs.block_size)
            source, target = upload(slots, self.cache.device)
            cache = self.cache.view(-1, *self.cache.shape[2:])
            self.inputs.kernels.copy_slots(cache, source, target)
        if not plan.num_tokens:
            return self.cache.new_empty((0, self.decoder.spec.hidden_size))
        return self.decoder.forward(self.inputs.build(plan), self.cache)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> np.ndarray:
        return self.decoder.logits(hidden).numpy(force=True)

    def vectors(self, hidden: torch.Tensor) -> np.ndarray:
        return hidden.float().numpy(force=True)

    def best(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        return None
