"""From logits to tokens: the specification of sampling, which every set of kernels is tested with.

A row's mask, if it has one, makes the logits of forbidden tokens -inf. At temperature 0 the token
is the first of the largest logits x. At temperature T > 0 the distribution is that of the weights
w = exp((x - max x) / T), of which

1. top-k keeps the k largest,
2. top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the shortest prefix of the rest, largest
   first, whose mass among what top-k kept reaches p,
3. min-p (Nguyen et al. 2024, arXiv:2407.01082) keeps w >= min_p.

Equal logits rank by id. The token is the first, in order of ids, at which the mass of what is kept
exceeds u times all of it, where u is the uniform number of the row's (seed, position). Weights and
sums are float64, and every row is computed by itself: who else is in the batch changes nothing.

A row has no distribution, and its token is -1, where its largest logit is not a finite number or
one is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rootlace.kernels.interface import Choice, PickRows
from rootlace.kernels.reference.bitmask import allowed_ids, allows, apply_masks
from rootlace.kernels.reference.ranking import best_ids
from rootlace.kernels.reference.uniform import uniforms, uniforms_on_host

NO_TOKEN = -1
FIRST_RANKED = 256
MORE_RANKED = 16
"""On a CPU, so many tokens of a row are ranked first; then so many times as many, until the cut is
among them."""


def pick_tokens(
    logits: torch.Tensor, rows: PickRows, choice: Choice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], not changed -> int32 [R]."""
    if logits.device.type != "cpu":
        return pick_tokens_by_tensors(logits, rows, choice, out)
    token = _picked_on_host(logits, rows, choice).to(torch.int32)
    return token if out is None else out.copy_(token)


def pick_tokens_by_tensors(
    logits: torch.Tensor, rows: PickRows, choice: Choice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `pick_tokens`, on any device by operations on tensors alone, so that a graph can hold
    them."""
    u = None if choice == "greedy" else uniforms(rows.seed, rows.position)
    token = _picked(logits, rows, choice, u).to(torch.int32)
    return token if out is None else out.copy_(token)


def _picked(
    logits: torch.Tensor, rows: PickRows, choice: Choice, u: torch.Tensor | None
) -> torch.Tensor:
    """`u`: what `uniforms` says of the rows, if any is drawn."""
    x = logits.to(torch.float32, copy=rows.mask_row is not None)
    if rows.mask_row is not None:
        assert rows.mask_table is not None
        apply_masks(x, rows.mask_table, rows.mask_row)
    best, token = x.max(dim=1)  # NaN is larger than everything, the first of equals counts
    if u is not None:
        drawn = _drawn(x, best, rows, choice, u)
        token = torch.where(rows.temperature > 0, drawn, token)
    return torch.where(best.isfinite(), token, NO_TOKEN)


def _picked_on_host(logits: torch.Tensor, rows: PickRows, choice: Choice) -> torch.Tensor:
    """As `_picked`, but rows that are not drawn from are not weighed, and not masked where their
    best token is allowed."""
    if choice == "greedy":
        return _best_on_host(logits.float(), rows)
    drawn = rows.temperature > 0
    u = uniforms_on_host(rows.seed, rows.position)
    if bool(drawn.all()):
        return _picked(logits, rows, choice, u)
    token = _best_on_host(logits.float(), rows)
    chosen = drawn.nonzero().squeeze(1)
    if len(chosen):
        token[chosen] = _picked(logits[chosen], _part(rows, chosen), choice, u[chosen])
    return token


def _best_on_host(x: torch.Tensor, rows: PickRows) -> torch.Tensor:
    values = x.numpy()
    token = values.argmax(axis=1)  # as torch's `max`, several times as fast
    found = np.isfinite(values[np.arange(len(values)), token])
    if rows.mask_row is not None:
        assert rows.mask_table is not None
        table = rows.mask_table.numpy()
        for at, row in enumerate(rows.mask_row.tolist()):
            if row < 0 or allows(table[row], token.item(at)):
                continue
            ids = allowed_ids(table[row], values.shape[1])
            if len(ids):
                token[at] = ids[values[at, ids].argmax()]
            found[at] = bool(len(ids)) and np.isfinite(values[at, token[at]])
    return torch.from_numpy(np.where(found, token, NO_TOKEN))


def _part(rows: PickRows, chosen: torch.Tensor) -> PickRows:
    """Those of the rows that are `chosen`."""
    return replace(
        rows,
        temperature=rows.temperature[chosen],
        top_k=rows.top_k[chosen],
        top_p=rows.top_p[chosen],
        min_p=rows.min_p[chosen],
        seed=rows.seed[chosen],
        position=rows.position[chosen],
        mask_row=None if rows.mask_row is None else rows.mask_row[chosen],
    )


def _drawn(
    x: torch.Tensor, best: torch.Tensor, rows: PickRows, choice: Choice, u: torch.Tensor
) -> torch.Tensor:
    # Where nothing is drawn any temperature will do.
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1)
    # In place: fresh memory of this size costs a CPU more than the arithmetic.
    weights = x.double().sub_(best.unsqueeze(1)).div_(temperature).exp_()
    if choice == "cut":
        weights.masked_fill_(~_kept(x, weights, rows), 0.0)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    target = u.unsqueeze(1) * total
    # u < 1, but u * total may round up to total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _kept(x: torch.Tensor, weights: torch.Tensor, rows: PickRows) -> torch.Tensor:
    """bool [R, V]: what top-k, top-p and min-p leave."""
    vocab = x.shape[1]
    above = weights >= rows.min_p.unsqueeze(1)
    top_k, top_p = rows.top_k.clamp(max=vocab), rows.top_p
    if x.device.type != "cpu":
        return above & _in_prefix(x, weights, top_k, top_p, vocab)[0]
    pending = ((top_k < vocab) | (top_p < 1.0)).nonzero().squeeze(1)
    ranked = FIRST_RANKED
    while len(pending):
        ranked = min(ranked, vocab)
        given = x[pending], weights[pending], top_k[pending], top_p[pending]
        inside, decided = _in_prefix(*given, ranked)
        above[pending[decided]] &= inside[decided]
        pending = pending[~decided]
        ranked *= MORE_RANKED
    return above


def _in_prefix(
    x: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, ranked: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool [R, V]: what top-k and top-p leave, of each row's `ranked` best; bool [R]: whether
    that is all that they leave)."""
    vocab = x.shape[1]
    ids = best_ids(x, ranked)
    in_top_k = torch.arange(ranked, device=x.device) < top_k.unsqueeze(1)
    by_rank = weights.gather(1, ids) * in_top_k
    reached = by_rank.cumsum(1)
    # Top-p is a share of what top-k keeps; without top-k, of all tokens, summed in order of ids.
    mass = torch.where(top_k < vocab, reached[:, -1], weights.cumsum(1)[:, -1])
    in_top_p = reached - by_rank < (top_p * mass).unsqueeze(1)
    inside = in_top_k & (in_top_p | (top_p == 1.0).unsqueeze(1))
    # Both keep a prefix: it ends among the ranked ones if the last of them is out. With fewer than
    # k ranked, the mass of the k best is not known yet.
    ends = ~inside[:, -1] & ((top_k <= ranked) | (top_k == vocab))
    decided = ends | (top_k == ranked) | (ranked == vocab)
    return torch.zeros_like(x, dtype=torch.bool).scatter_(1, ids, inside), decided
