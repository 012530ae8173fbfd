"""From logits to tokens on the CPU, all rows of a step at once (`device_sampler` does it on a GPU).

A row's distribution, after `logit_edits`: softmax of the logits divided by the temperature, then

1. top-k keeps the k most probable tokens,
2. top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the shortest prefix of the rest, most
   probable first, whose probability among what top-k kept reaches p,
3. min-p (Nguyen et al. 2024, arXiv:2407.01082) keeps tokens of at least min_p times the highest
   probability,

which is sglang's order. Equally probable tokens rank by id, so exactly k are kept. The token is
found by inverting the cumulative distribution over the kept tokens in order of their ids, in
float64, at one uniform number that depends on (seed, position) alone. Each row takes the path its
own parameters ask for: who else is in the batch changes nothing.

Temperature 0 is greedy: the largest logit, the smallest id among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import MaskRow, SampleRow
from rootlace.runtime.model.sampling.logit_edits import (
    edit_logits,
    has_edits,
    leaves,
    left_ids,
    only_masked,
    only_takes_away,
)
from rootlace.runtime.model.sampling.mask_tables import MaskTables, allowed_ids, allows
from rootlace.runtime.model.sampling.ranking import best_ids
from rootlace.runtime.model.sampling.uniform import uniforms

NO_TOKEN = -1
"""What a row gets whose distribution is empty (everything masked) or not a number."""

Masks = Sequence[np.ndarray | MaskRow | None]
FIRST_CANDIDATES = 256
MORE_CANDIDATES = 16
"""Where a row is cut that many tokens are ranked first, then times so many, until they suffice."""


class Pick(Protocol):
    """Finds tokens in logits float32 [S, V]."""

    @property
    def draws_masked(self) -> bool:
        """Whether `draw` takes masks."""

    def best(self, logits: torch.Tensor, masks: Masks = ()) -> np.ndarray:
        """See `greedy_tokens`."""

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], masks: Masks = ()
    ) -> np.ndarray:
        """The token of rows with a temperature, int32 [S]. `masks` as in `greedy_tokens`; nothing
        else that edits logits is looked at."""


class TorchPick:
    """See `Pick`."""

    draws_masked = False

    def best(self, logits: torch.Tensor, masks: Masks = ()) -> np.ndarray:
        return greedy_tokens(logits, masks)

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], masks: Masks = ()
    ) -> np.ndarray:
        assert not any(mask is not None for mask in masks)
        return _drawn(logits, rows)


TORCH_PICK = TorchPick()


def greedy_tokens(logits: torch.Tensor, masks: Masks = ()) -> np.ndarray:
    """The best token of each row of logits float32 [S, V] -> int32 [S].

    `masks`: which of them may be taken (None: all), one per row unless it is empty. `NO_TOKEN`
    where such a logit is NaN or the largest is infinite, or minus infinity like all others, or
    there is none.
    """
    # NaN counts as the largest, the first of equals wins. Several times as fast as torch.
    values = logits.numpy()
    best = values.argmax(axis=1)
    finite = np.isfinite(values[np.arange(len(best)), best])
    tokens = np.where(finite, best, NO_TOKEN).astype(np.int32)
    # Where the best token of all may be taken, nothing else has to be looked at.
    for i, (mask, token) in enumerate(zip(masks, tokens.tolist(), strict=False)):
        if mask is not None and not (token >= 0 and allows(mask, token)):
            tokens[i] = _best_of(values[i], allowed_ids(mask, values.shape[1]))
    return tokens


def sample(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    kernels: KernelSet,
    tables: MaskTables,
    pick: Pick = TORCH_PICK,
) -> np.ndarray:
    """Draw one token per row, on the host. logits float32 [S, V], not changed -> int32 [S].

    Logits that the mask of a row excludes may be anything, if the mask is its only edit
    (`only_masked`).
    """
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not random:
        return _best(logits, rows, kernels, tables, pick)
    tokens = np.empty(len(rows), dtype=np.int32)
    cold = [i for i, row in enumerate(rows) if row.params.temperature <= 0]
    if cold:
        chosen = [rows[i] for i in cold]
        tokens[cold] = _best(_select(logits, cold), chosen, kernels, tables, pick)
    chosen = [rows[i] for i in random]
    # A mask alone is best looked at where the token is drawn.
    masked = pick.draws_masked
    edited = [has_edits(row) and not (masked and only_masked(row)) for row in chosen]
    masks = [
        row.mask if masked and not edits else None
        for row, edits in zip(chosen, edited, strict=True)
    ]
    picked = _edited(_select(logits, random), chosen, edited, kernels, tables)
    tokens[random] = pick.draw(picked, chosen, masks)
    return tokens


def _edited(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    wanted: Sequence[bool],
    kernels: KernelSet,
    tables: MaskTables,
) -> torch.Tensor:
    """The logits as those `rows` that are `wanted` ask for them; those given are not changed."""
    edited = [i for i, asks in enumerate(wanted) if asks]
    if len(edited) == len(rows):
        logits = logits.clone()
        edit_logits(logits, rows, kernels, tables)
    elif edited:
        where = torch.tensor(edited, device=logits.device)
        chosen = logits.index_select(0, where)
        edit_logits(chosen, [rows[i] for i in edited], kernels, tables)
        logits = logits.index_copy(0, where, chosen)
    return logits


def _best(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    kernels: KernelSet,
    tables: MaskTables,
    pick: Pick,
) -> np.ndarray:
    """The token of greedy rows, int32 [S]."""
    # What a mask alone excludes is not looked at: it may be anything.
    tokens = pick.best(logits, [row.mask if only_masked(row) else None for row in rows])
    values = logits.numpy()
    edited: list[int] = []
    for i, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        if not only_takes_away(row):
            edited.append(i)
        # Where the best token of all may be taken, nothing else has to be looked at.
        elif not (only_masked(row) or leaves(row, token)):
            tokens[i] = _best_of(values[i], left_ids(row, logits.shape[1]))
    if edited:
        chosen = logits[edited]
        edit_logits(chosen, [rows[i] for i in edited], kernels, tables)
        tokens[edited] = pick.best(chosen)
    return tokens


def _best_of(values: np.ndarray, ids: np.ndarray) -> int:
    """The best of some tokens; values float32 [V]."""
    if not len(ids):
        return NO_TOKEN
    best = ids.item(values[ids].argmax())
    return best if math.isfinite(values.item(best)) else NO_TOKEN


def _drawn(logits: torch.Tensor, rows: Sequence[SampleRow]) -> np.ndarray:
    """The token of rows with a temperature, int32 [S]; logits after edits."""
    tokens = np.empty(len(rows), dtype=np.int32)
    plain = [i for i, row in enumerate(rows) if not _is_cut(row)]
    cut = [i for i, row in enumerate(rows) if _is_cut(row)]
    u = row_uniforms(rows)
    if plain:
        weights = _weights(_select(logits, plain), [rows[i] for i in plain])
        tokens[plain] = _pick(weights.cumsum(1), u[plain])
    if cut:
        tokens[cut] = _sample_cut(_select(logits, cut), [rows[i] for i in cut], u[cut])
    return tokens


def _is_cut(row: SampleRow) -> bool:
    params = row.params
    return params.top_k != -1 or params.top_p < 1.0 or params.min_p > 0.0


def _select(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    if len(chosen) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(chosen, device=logits.device))


def row_uniforms(rows: Sequence[SampleRow]) -> np.ndarray:
    """The number in [0, 1) that each row's token is drawn with, float64 [S]."""
    return uniforms([row.params.seed or 0 for row in rows], [row.position for row in rows])


def _weights(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """exp((x - max x) / temperature), float64: probabilities up to their common sum.

    The difference comes first, so that no temperature overflows.
    """
    temperature = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64)
    below = logits.double().sub_(logits.amax(1, keepdim=True))
    return below.div_(temperature.to(logits.device)).exp_()


def _pick(cumulative: torch.Tensor, u: np.ndarray) -> np.ndarray:
    """The first index whose cumulative weight exceeds u times the total; `NO_TOKEN` where none."""
    total = cumulative[:, -1:]
    target = torch.from_numpy(u).to(cumulative.device).unsqueeze(1) * total
    # u < 1, but u * total may round up to total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    index = torch.where(total.isfinite() & (total > 0), index, NO_TOKEN).squeeze(1)
    return index.cpu().numpy().astype(np.int32)


def _sample_cut(logits: torch.Tensor, rows: Sequence[SampleRow], u: np.ndarray) -> np.ndarray:
    """Rows with top-k, top-p or min-p: rank only as many tokens as a row needs."""
    vocab = logits.shape[1]
    tokens = np.empty(len(rows), dtype=np.int32)
    pending = list(range(len(rows)))
    candidates = min(FIRST_CANDIDATES, vocab)
    while pending:
        chosen = [rows[i] for i in pending]
        found, decided = _among_best(_select(logits, pending), chosen, u[pending], candidates)
        tokens[np.array(pending)[decided]] = found[decided]
        pending = [i for i, done in zip(pending, decided, strict=True) if not done]
        candidates = min(candidates * MORE_CANDIDATES, vocab)
    return tokens


def _among_best(
    logits: torch.Tensor, rows: Sequence[SampleRow], u: np.ndarray, candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sample from each row's `candidates` best tokens; say which rows that decides.

    A row is undecided if the cut might lie beyond its candidates.
    """
    vocab, device = logits.shape[1], logits.device
    limits = [vocab if row.params.top_k == -1 else min(row.params.top_k, vocab) for row in rows]
    top_k = torch.tensor(limits, device=device)
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=device)
    min_p = torch.tensor([row.params.min_p for row in rows], dtype=torch.float64, device=device)

    ids = best_ids(logits, candidates)  # [S, C], best first
    everything = _weights(logits, rows)
    weights = everything.gather(1, ids)
    rank = torch.arange(ids.shape[1], device=device)
    in_top_k = rank < top_k.unsqueeze(1)
    kept = weights * in_top_k
    before = kept.cumsum(1) - kept
    # What top-p refers to: the mass of the top k, which without top-k is that of the vocabulary.
    # Sums run in a fixed order (cumsum), so that they do not depend on the number of rows.
    mass = torch.where(top_k < vocab, kept.cumsum(1)[:, -1], everything.cumsum(1)[:, -1])
    in_top_p = (before < (top_p * mass).unsqueeze(1)) | (top_p == 1.0).unsqueeze(1)
    in_min_p = weights >= min_p.unsqueeze(1) * weights[:, :1]
    inside = in_top_k & in_top_p & in_min_p
    # Each condition holds for a prefix of the ranking: if the last candidate is out, all later ones
    # are; and with fewer than k candidates the mass of the top k is not known yet.
    complete = ~inside[:, -1] & ((top_k <= candidates) | (top_k == vocab))
    decided = complete | (candidates == vocab) | (top_k == candidates)

    weights = torch.where(inside, weights, 0.0)
    by_id, order = ids.sort(dim=1)
    picked = _pick(weights.gather(1, order).cumsum(1), u)
    found = by_id.cpu().numpy()[np.arange(len(rows)), np.maximum(picked, 0)]
    found = np.where(picked == NO_TOKEN, NO_TOKEN, found)
    return found.astype(np.int32), decided.cpu().numpy()
