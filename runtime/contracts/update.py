"""News of one request, as the scheduler tells it."""

from __future__ import annotations

import msgspec
import numpy as np

from rootlace.runtime.contracts.plan import TokenScores


class Update(msgspec.Struct):
    """New tokens, and at the end why it ended; the fields are those of `engine.messages.Update`.

    `scores` has one row per token of `token_ids`, `prompt_scores` one per token of
    `prompt_targets` (int32): the last prompt tokens, from index max(prompt_logprobs_from, 1) on
    (a prompt's first token has no log-probability). They come with the last prompt chunk.
    `forced` are the indices of those of `token_ids` that were not sampled, ascending.
    """

    rid: int
    token_ids: tuple[int, ...] = ()
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    prompt_targets: np.ndarray | None = None
    cached_tokens: int | None = None
    forced: tuple[int, ...] = ()
    queued: float | None = None
    finish: str | None = None
    matched: int | None = None
    code: str = ""
    error: str = ""
