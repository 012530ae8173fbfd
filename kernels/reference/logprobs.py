"""Log-probabilities of given tokens: y[r] = x[r, t[r]] - log sum_i exp(x[r, i])."""

from __future__ import annotations

import torch


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], tokens int [R] -> float32 [R]; NaN where a token is -1."""
    x = logits.float()
    chosen = x.gather(1, tokens.long().clamp(min=0).unsqueeze(1)).squeeze(1)
    found = torch.where(tokens >= 0, chosen - x.logsumexp(dim=1), float("nan"))
    return found if out is None else out.copy_(found)
