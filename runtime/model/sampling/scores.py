"""Log-probabilities of given tokens and of the best alternatives, from raw logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rootlace.kernels.interface import Scores, ScoreTokens
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow, TokenScores

LOGITS_BYTES = 64 << 20
"""Logits of scored tokens held at once; more tokens are scored in parts of this size."""
PART_TOKENS = 256
"""With a large vocabulary, parts have as many tokens as this, unless their logits take more than
four times `LOGITS_BYTES`: each part reads the whole output head again, which counts where tokens
are few."""


def score_in_parts(
    score: ScoreTokens,
    logits: Callable[[slice], torch.Tensor],
    tokens: torch.Tensor,
    top: int,
    vocab_size: int,
) -> Scores:
    """`score` of N > 0 tokens, of whose logits it asks for a part at a time, so that memory does
    not grow with N."""
    row = 4 * vocab_size
    size = max(LOGITS_BYTES // row, min(PART_TOKENS, 4 * LOGITS_BYTES // row), 1)
    count = len(tokens)
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    found = [score(logits(part), tokens[part], top) for part in parts]
    if len(found) == 1:
        return found[0]
    logprobs, ids, top_logprobs = (torch.cat(each) for each in zip(*found, strict=True))
    return logprobs, ids, top_logprobs


def of_samples(
    rows: Sequence[SampleRow],
    logprobs: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> list[TokenScores | None]:
    """The scores of those rows that ask for them, of arrays that have all rows'."""
    return [
        _part(logprobs, top_ids, top_logprobs, slice(i, i + 1), row.params.top_logprobs)
        if row.params.logprobs
        else None
        for i, row in enumerate(rows)
    ]


def of_prompts(
    rows: Sequence[PromptScoreRow],
    logprobs: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> list[TokenScores]:
    """The scores of each row's targets, of arrays that have all rows' one behind the other."""
    scores = []
    start = 0
    for row in rows:
        here = slice(start, start + len(row.targets))
        scores.append(_part(logprobs, top_ids, top_logprobs, here, row.top_logprobs))
        start = here.stop
    return scores


def _part(
    logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, row: slice, top: int
) -> TokenScores:
    return TokenScores(logprobs[row], top_ids[row, :top], top_logprobs[row, :top])
