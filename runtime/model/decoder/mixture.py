"""A mixture of experts: which MLPs each token has, and their outputs added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import GatedActivation
from rootlace.runtime.model.adapters.weights import Adapter
from rootlace.runtime.model.checkpoint.weights import LayerWeights
from rootlace.runtime.model.decoder.interface import Groups, Ranks
from rootlace.runtime.model.families.spec import Experts

Product = Callable[[torch.Tensor, str, Groups], torch.Tensor]
"""Rows times a part of a layer, by its name in `layer_parts`, with what adapters add to theirs."""
Mlp = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""The MLP of the expert of this number: rows [n, H], and which tokens they are -> [n, H]."""
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
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`activate` is that of MLPs whose activation is not clamped. `ranks`: where the MLPs are a
        rank's part of them, all of these."""
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
        """x [T, H] -> [T, H], of one rank its part of the sum. `product` is of this layer."""
        scores = product(x, "router", groups)
        if self._ranks is not None:  # a last bit may decide who is chosen, for all ranks alike
            scores = self._ranks.first(scores)
        found = choose(scores, self._experts, layer.correction)
        of_experts = [group for group in groups if group[0] in self._adapted]

        def expert(rows: torch.Tensor, number: int, tokens: torch.Tensor) -> torch.Tensor:
            own = _among(tokens, of_experts)
            inner = self._activate(product(rows, f"experts.{number}.gate_up", own))
            return product(inner, f"experts.{number}.down", own)

        out = added_up(x, found, self._experts.count, expert)
        if not self._experts.shared_size:
            return out
        shared = product(self._activate(product(x, "gate_up", groups)), "down", groups)
        if layer.shared_gate is not None:
            shared = torch.sigmoid(product(x, "shared_gate", groups)) * shared
        return out + shared


def _among(tokens: torch.Tensor, groups: Groups) -> Groups:
    """Which of the rows that are these tokens go through each adapter."""
    return [(number, torch.isin(tokens, rows).nonzero()[:, 0]) for number, rows in groups]


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


def added_up(x: torch.Tensor, found: Choice, experts: int, mlp: Mlp) -> torch.Tensor:
    """x [T, H] through the chosen experts -> the sum of their outputs times their shares, [T, H].

    Rows of one expert are gathered and go through its MLP together. A token's outputs are added up
    in float32 in the order in which its experts are chosen, whatever else is in the step.
    """
    chosen, shares = found
    count, each = chosen.shape
    expert_of = chosen.flatten()  # of each pair of a token and an expert
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
