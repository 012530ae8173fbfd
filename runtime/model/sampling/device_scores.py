"""Log-probabilities on a device that is not waited for; `scores` is the host's side of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.model.sampling.ranking import best_ids_unseen


def score_on_device(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `scores.score_tokens`, of logits [N, V] and tokens int [N], all on the device: (logprobs
    float32 [N], top ids int32 [N, top], their logprobs float32 [N, top])."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    index = tokens.to(torch.int64).clamp(min=0).unsqueeze(1)
    logprobs = (logits.gather(1, index) - normaliser).squeeze(1)
    logprobs = torch.where(tokens < 0, float("nan"), logprobs)
    if not top:
        none = logprobs.new_empty(len(tokens), 0)
        return logprobs, none.to(torch.int32), none
    ids = best_ids_unseen(logits, top)
    return logprobs, ids.to(torch.int32), logits.gather(1, ids) - normaliser


def score_in_parts(
    logits: Callable[[slice], torch.Tensor], tokens: torch.Tensor, top: int, size: int
) -> list[torch.Tensor]:
    """`score_on_device` of N > 0 tokens, `size` at a time: so memory does not grow with N."""
    count = len(tokens)
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    found = [score_on_device(logits(part), tokens[part], top) for part in parts]
    return [torch.cat(each) for each in zip(*found, strict=True)]


def token_scores(
    logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, row: slice, top: int
) -> TokenScores:
    """Those of some tokens, of what `score_on_device` found for many, with `top` alternatives."""
    return TokenScores(logprobs[row], top_ids[row, :top], top_logprobs[row, :top])
