"""A mixture of experts: which MLPs each token has, and their outputs added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rootlace.kernels import KernelSet, Weight
from rootlace.kernels.interface import GatedActivation
from rootlace.runtime.model.checkpoint.weights import ExpertWeights, LayerWeights
from rootlace.runtime.model.decoder.interface import Ranks
from rootlace.runtime.model.families.spec import Experts

Mlp = Callable[[torch.Tensor, Weight, Weight], torch.Tensor]
"""The gated MLP of these weights (gate and up, down), [T, H] -> [T, H]."""
Choice = tuple[torch.Tensor, torch.Tensor]
"""Experts int64 [T, K], best first, and their shares, float32 [T, K]."""


class Mixture:
    """The MLPs of a layer with experts. What a token gets depends on no other token, as far as the
    products do not."""

    def __init__(
        self,
        experts: Experts,
        kernels: KernelSet,
        activate: GatedActivation,
        ranks: Ranks | None = None,
    ) -> None:
        """`activate` is that of MLPs whose activation is not clamped. `ranks`: where the MLPs are a
        rank's part of them, all of these."""
        self._experts = experts
        self._ranks = ranks
        self._linear = kernels.linear
        self._activate = activate
        if experts.clamp is not None:
            alpha, limit = experts.clamp
            self._activate = lambda gate_up: kernels.clamped_mul(gate_up, alpha, limit)

    def __call__(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """x [T, H] -> [T, H], of one rank its part of the sum."""
        assert layer.router is not None
        scores = self._linear(x, layer.router)
        if self._ranks is not None:  # a last bit may decide who is chosen, for all ranks alike
            scores = self._ranks.first(scores)
        found = choose(scores, self._experts, layer.correction)
        out = added_up(x, found, layer.experts, self._mlp)
        if not self._experts.shared_size:
            return out
        assert layer.gate_up is not None and layer.down is not None
        shared = self._mlp(x, layer.gate_up, layer.down)
        if layer.shared_gate is not None:
            shared = torch.sigmoid(self._linear(x, layer.shared_gate)) * shared
        return out + shared

    def _mlp(self, x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
        return self._linear(self._activate(self._linear(x, gate_up)), down)


def choose(
    scores: torch.Tensor, experts: Experts, correction: torch.Tensor | None = None
) -> Choice:
    """Scores [T, E] -> what each token has. Among equals the first experts are chosen."""
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
    """The places of the largest numbers of each row, the first of equals first."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(ranked: torch.Tensor, experts: Experts) -> torch.Tensor:
    """What experts are ranked by, with -inf for those whose group does not count."""
    grouped = ranked.unflatten(1, (experts.groups, -1))
    best = grouped.topk(experts.best_of_group, dim=-1).values.sum(dim=-1)
    counts = torch.zeros_like(best, dtype=torch.bool)
    counts.scatter_(1, _best(best, experts.chosen_groups), True)
    return grouped.masked_fill(~counts.unsqueeze(-1), -torch.inf).flatten(1)


def added_up(
    x: torch.Tensor, found: Choice, experts: Sequence[ExpertWeights], mlp: Mlp
) -> torch.Tensor:
    """x [T, H] through the chosen experts -> the sum of their outputs times their shares, [T, H].

    Rows of one expert are gathered and go through its MLP together. A token's outputs are added up
    in float32 in the order in which its experts are chosen, whatever else is in the step.
    """
    chosen, shares = found
    count, each = chosen.shape
    expert_of = chosen.flatten()  # of each pair of a token and an expert
    order = torch.argsort(expert_of, stable=True)
    rows = x.index_select(0, order // each)
    sizes = torch.bincount(expert_of, minlength=len(experts)).tolist()
    outputs = torch.empty_like(rows)
    start = 0
    for expert, size in zip(experts, sizes, strict=True):
        some = slice(start, start := start + size)
        if size:
            outputs[some] = mlp(rows[some], expert.gate_up, expert.down)
    by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(count, each, -1)
    total = by_token[:, 0].float() * shares[:, :1]
    for rank in range(1, each):
        total.addcmul_(by_token[:, rank].float(), shares[:, rank : rank + 1])
    return total.to(x.dtype)
