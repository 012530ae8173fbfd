"""From logits to tokens. A row's distribution is that of w = exp((x - max x) / T), of which

1. top-k keeps the k largest,
2. top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the shortest prefix of the rest, largest
   first, whose mass among what top-k kept reaches p,
3. min-p (Nguyen et al. 2024, arXiv:2407.01082) keeps w >= min_p.

Equal logits rank by id. The token is the first, in order of ids, at which the mass of what is kept
exceeds u times all of it. At T = 0 it is the first of the largest logits. Everything in float64.

A row has no distribution where its largest logit is not a finite number or one is NaN.
"""

from __future__ import annotations

import torch

from rootlace.kernels.interface import Choice, PickRows
from rootlace.kernels.reference.bitmask import apply_chosen_masks
from rootlace.kernels.reference.uniform import uniforms

NO_TOKEN = -1


def pick_tokens(
    logits: torch.Tensor, rows: PickRows, choice: Choice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], not changed -> int32 [R]."""
    x = logits.to(torch.float32, copy=rows.mask_row is not None)
    if rows.mask_row is not None:
        assert rows.mask_table is not None
        apply_chosen_masks(x, rows.mask_table, rows.mask_row)
    best, token = x.max(dim=1)  # NaN is larger than everything
    token = (x == best.unsqueeze(1)).to(torch.int8).argmax(dim=1)
    if choice != "greedy":
        drawn = _drawn(x, best, rows, choice)
        token = torch.where(rows.temperature > 0, drawn, token)
    token = torch.where(best.isfinite(), token, NO_TOKEN).to(torch.int32)
    return token if out is None else out.copy_(token)


def _drawn(x: torch.Tensor, best: torch.Tensor, rows: PickRows, choice: Choice) -> torch.Tensor:
    # Where nothing is drawn any temperature will do.
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1)
    weights = ((x.double() - best.unsqueeze(1)) / temperature).exp()
    if choice == "cut":
        weights = torch.where(_kept(x, weights, rows), weights, 0.0)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    target = uniforms(rows.seed, rows.position).unsqueeze(1) * total
    # u < 1, but u * total may round up to total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _kept(x: torch.Tensor, weights: torch.Tensor, rows: PickRows) -> torch.Tensor:
    """bool [R, V]: what top-k, top-p and min-p leave."""
    vocab = x.shape[1]
    ids = x.sort(dim=1, descending=True, stable=True).indices  # equal ones stay in order of ids
    top_k, top_p = rows.top_k.clamp(max=vocab).unsqueeze(1), rows.top_p.unsqueeze(1)
    in_top_k = torch.arange(vocab, device=x.device) < top_k
    ranked = weights.gather(1, ids) * in_top_k
    reached = ranked.cumsum(1)
    in_top_p = (reached - ranked < top_p * reached[:, -1:]) | (top_p == 1.0)
    kept = torch.zeros_like(in_top_p).scatter_(1, ids, in_top_k & in_top_p)
    return kept & (weights >= rows.min_p.unsqueeze(1))
