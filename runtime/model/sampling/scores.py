"""Log-probabilities of given tokens and of the best alternatives, from raw logits."""

from __future__ import annotations

import numpy as np
import torch

from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.model.sampling.ranking import best_ids


def score_tokens(logits: torch.Tensor, tokens: np.ndarray, top: int) -> TokenScores:
    """Score one token per row of logits float32 [N, V], with the `top` best tokens beside it.

    Log-softmax of the logits as they are. A token id of -1 (nothing sampled) scores NaN.
    """
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    index = torch.from_numpy(tokens.astype(np.int64)).to(logits.device).unsqueeze(1)
    logprobs = (logits.gather(1, index.clamp(min=0)) - normaliser).squeeze(1).cpu().numpy()
    if top:
        ids = best_ids(logits, top)
        top_logprobs = (logits.gather(1, ids) - normaliser).cpu().numpy()
        top_ids = ids.cpu().numpy().astype(np.int32)
    else:
        top_ids = np.empty((len(tokens), 0), dtype=np.int32)
        top_logprobs = np.empty((len(tokens), 0), dtype=np.float32)
    return TokenScores(np.where(tokens < 0, np.float32("nan"), logprobs), top_ids, top_logprobs)


def concatenate(parts: list[TokenScores], top: int) -> TokenScores:
    """Scores of consecutive tokens, joined."""
    if not parts:
        return TokenScores(
            np.empty(0, dtype=np.float32),
            np.empty((0, top), dtype=np.int32),
            np.empty((0, top), dtype=np.float32),
        )
    return TokenScores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )
