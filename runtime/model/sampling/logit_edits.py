"""What happens to logits before sampling: bias, bans, masks, penalties; all rows at once.

In this order, on float32 logits x of a row (as vLLM documents its own):

1. `logit_bias`: x[t] += bias[t]
2. `banned`: x[t] = -inf
3. `mask`: x[t] = -inf where the constraint does not allow t
4. repetition penalty r (Keskar et al. 2019, arXiv:1909.05858, as in transformers), for every token
   of the prompt or the output: x[t] = x[t] / r if x[t] > 0 else x[t] * r
5. frequency penalty f and presence penalty p (OpenAI), for tokens of the output alone:
   x[t] -= f * count(t) + p
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.mask_tables import MaskTables, allowed_ids, allows


def has_edits(row: SampleRow) -> bool:
    params = row.params
    return (
        row.mask is not None or bool(row.banned) or bool(params.logit_bias) or _has_penalties(row)
    )


def only_takes_away(row: SampleRow) -> bool:
    """Whether the edits leave a logit as it is, or take its token away."""
    params = row.params
    return not (params.logit_bias or _has_penalties(row))


def only_masked(row: SampleRow) -> bool:
    """Whether a mask is all that is done to the logits, if anything is."""
    return not row.banned and only_takes_away(row)


def leaves(row: SampleRow, token: int) -> bool:
    """Whether mask and bans leave `token` (-1: there is none)."""
    if token < 0 or token in row.banned:
        return False
    return row.mask is None or allows(row.mask, token)


def left_ids(row: SampleRow, vocab_size: int) -> np.ndarray:
    """int64: the ids that mask and bans leave, ascending."""
    ids = np.arange(vocab_size) if row.mask is None else allowed_ids(row.mask, vocab_size)
    return np.setdiff1d(ids, row.banned, assume_unique=False) if row.banned else ids


def edit_logits(
    logits: torch.Tensor, rows: Sequence[SampleRow], kernels: KernelSet, tables: MaskTables
) -> None:
    """Apply everything `rows` ask for to logits float32 [len(rows), V], in place.

    Ids outside the vocabulary are ignored. `tables` is where masks stay on the device.
    """
    _add_bias(logits, rows)
    _ban(logits, rows)
    _mask(logits, rows, kernels, tables)
    _penalise(logits, rows)


def _has_penalties(row: SampleRow) -> bool:
    params = row.params
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def _add_bias(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    vocab = logits.shape[1]
    entries = [
        (i * vocab + token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
        if 0 <= token < vocab
    ]
    if entries:
        keys, values = zip(*entries, strict=True)
        index = torch.tensor(keys, device=logits.device)
        logits.view(-1).index_add_(0, index, torch.tensor(values, device=logits.device))


def _ban(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    vocab = logits.shape[1]
    keys = [
        i * vocab + token
        for i, row in enumerate(rows)
        for token in row.banned
        if 0 <= token < vocab
    ]
    if keys:
        index = torch.tensor(keys, device=logits.device)
        logits.view(-1).index_fill_(0, index, float("-inf"))


def _mask(
    logits: torch.Tensor, rows: Sequence[SampleRow], kernels: KernelSet, tables: MaskTables
) -> None:
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    table, index = tables.place([row.mask for row in rows if row.mask is not None])
    if len(masked) == len(rows):
        kernels.apply_mask_rows(logits, table, index)
        return
    where = torch.tensor(masked, device=logits.device)
    chosen = logits.index_select(0, where)
    kernels.apply_mask_rows(chosen, table, index)
    logits.index_copy_(0, where, chosen)


def _penalise(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    repeated = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if repeated:
        owner, token, _ = _distinct([(i, rows[i].token_ids) for i in repeated], logits.shape[1])
        factor = np.array([row.params.repetition_penalty for row in rows], dtype=np.float32)[owner]
        index, by = _device(owner * logits.shape[1] + token, factor, logits)
        old = logits.view(-1).index_select(0, index)
        logits.view(-1).index_copy_(0, index, torch.where(old > 0, old / by, old * by))

    counted = [
        i
        for i, row in enumerate(rows)
        if row.params.frequency_penalty or row.params.presence_penalty
    ]
    if counted:
        outputs = [(i, rows[i].token_ids[rows[i].prompt_len :]) for i in counted]
        owner, token, count = _distinct(outputs, logits.shape[1])
        frequency = np.array([row.params.frequency_penalty for row in rows])[owner]
        presence = np.array([row.params.presence_penalty for row in rows])[owner]
        amount = (frequency * count + presence).astype(np.float32)
        index, by = _device(owner * logits.shape[1] + token, amount, logits)
        logits.view(-1).index_add_(0, index, by, alpha=-1)


def _distinct(
    sequences: list[tuple[int, np.ndarray]], vocab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, token, count) of the distinct tokens of each (row, token ids), int64 each."""
    keys = np.concatenate([ids.astype(np.int64) + i * vocab for i, ids in sequences])
    distinct, counts = np.unique(keys, return_counts=True)
    owner, token = np.divmod(distinct, vocab)
    return owner, token, counts


def _device(
    index: np.ndarray, values: np.ndarray, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(index).to(like.device), torch.from_numpy(values).to(like.device)
