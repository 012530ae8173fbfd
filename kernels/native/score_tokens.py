"""Log-probabilities in C++: `reference/score_tokens.py`, by all threads and without copies."""

from __future__ import annotations

import ctypes

import torch

from rootlace.kernels.interface import Scores
from rootlace.kernels.native.handles import Team


class NativeScoreTokens:
    """See `interface.ScoreTokens`. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library = library
        self._team = team

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Scores:
        logits = logits.to(torch.float32).contiguous()
        tokens = tokens.to(torch.int32).contiguous()
        count, vocab = logits.shape
        if tokens.shape != (count,):
            raise ValueError(f"{list(tokens.shape)} tokens for {count} rows")
        top = min(top, vocab)
        logprobs = torch.empty(count)
        top_ids = torch.empty(count, top, dtype=torch.int32)
        top_logprobs = torch.empty(count, top)
        self._library.rl_scores(
            self._team.handle,
            logits.data_ptr(),
            count,
            vocab,
            tokens.data_ptr(),
            top,
            logprobs.data_ptr(),
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
        )
        return logprobs, top_ids, top_logprobs
