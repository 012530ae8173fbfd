"""Log-probabilities of given tokens, and of the best ones, from logits as they are:

y[r, t] = x[r, t] - log sum_i exp(x[r, i])

The best rank by logit, equal ones by id (`ranking`).
"""

from __future__ import annotations

import torch

from rootlace.kernels.interface import Scores
from rootlace.kernels.reference.ranking import best_ids


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Scores:
    """See `interface.ScoreTokens`. Nothing waits for a device."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    index = tokens.to(torch.int64).clamp(min=0).unsqueeze(1)
    logprobs = (logits.gather(1, index) - normaliser).squeeze(1)
    logprobs = torch.where(tokens < 0, float("nan"), logprobs)
    if not top:
        none = logprobs.new_empty(len(tokens), 0)
        return logprobs, none.to(torch.int32), none
    ids = best_ids(logits, top)
    return logprobs, ids.to(torch.int32), logits.gather(1, ids) - normaliser
