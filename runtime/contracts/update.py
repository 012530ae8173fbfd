"""What is new about one request: made by the scheduler, sent by the engine, read by the gateway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from rootlace.runtime.contracts.plan import TokenScores
from rootlace.wire.cache_report import CacheReport


class TokenScore(NamedTuple):
    """Log-probability of one token (None: nothing precedes it) and the best alternatives as
    (id, logprob)."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Update(msgspec.Struct, omit_defaults=True, eq=False, tag="update"):
    """New tokens, and at the end why the request ended.

    `finish` is "stop", "length", "abort" or "error" (then `code` and `error` say what). On "stop"
    by a token, that token is in `token_ids` and `matched` names it. `forced` are the indices,
    ascending, of those of `token_ids` that the constraint forced. `cached_tokens` and `queued`
    (seconds from arrival to admission) come with the first update, and so does `report`, if the
    request asks for it. `pin`, the id of what it pinned, comes then or with `finish`.

    `scores` has one row per token of `token_ids`. `prompt_targets` (int32) are the prompt's tokens
    from index `prompt_logprobs_from` on, and `prompt_scores` has one row for each of them but for
    the prompt's first token, which has no log-probability. They come with the last prompt chunk.

    `accepted` are the indices, ascending, of those of `token_ids` that were computed before they
    were sampled, because they were predicted; `rejected` says how many more were since the last
    update, which are not in the output.

    `vector` (float32) is what a request with a `pooling` asked for; it comes with `finish`.
    """

    rid: int
    token_ids: tuple[int, ...] = ()
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    prompt_targets: np.ndarray | None = None
    cached_tokens: int | None = None
    forced: tuple[int, ...] = ()
    queued: float | None = None
    report: CacheReport | None = None
    finish: str | None = None
    matched: int | None = None
    vector: np.ndarray | None = None
    accepted: tuple[int, ...] = ()
    rejected: int = 0
    pin: str = ""
    code: str = ""
    error: str = ""

    def token_scores(self) -> list[TokenScore]:
        """One per token of `token_ids`; empty where nobody asked for them."""
        return [] if self.scores is None else _single(self.token_ids, self.scores)

    def prompt_token_scores(self) -> list[TokenScore]:
        """One per token of `prompt_targets`."""
        if self.prompt_targets is None:
            return []
        targets = self.prompt_targets.tolist()
        scored = 0 if self.prompt_scores is None else len(self.prompt_scores.logprobs)
        unscored = len(targets) - scored
        found = [TokenScore(token, None) for token in targets[:unscored]]
        if self.prompt_scores is not None:
            found += _single(targets[unscored:], self.prompt_scores)
        return found


def _single(token_ids: Iterable[int], scores: TokenScores) -> list[TokenScore]:
    top_ids, top_logprobs = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    return [
        TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            token_ids, scores.logprobs.tolist(), top_ids, top_logprobs, strict=True
        )
    ]
