"""What a sampled token means for its request."""

from __future__ import annotations

import numpy as np

from rootlace.runtime.scheduler.plan import TokenScores
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.runtime.scheduler.update import Update


def sampled(sequence: Sequence, token: int, scores: TokenScores | None, max_length: int) -> Update:
    """Append `token` and say so; `finish` is set if it is the last one.

    `max_length`: a sequence that is this long ends with "length". A token of -1 (see `StepResult`)
    is not appended: the request ends with an error that says what left nothing to sample.
    """
    if token < 0:
        update = Update(sequence.rid, finish="error", code="internal", error=_nothing(sequence))
        announce(sequence, update)
        return update
    may_stop = sequence.outputs >= sequence.request.params.min_tokens
    sequence.append(token)
    update = Update(sequence.rid, token_ids=(token,), scores=scores)
    announce(sequence, update)
    matcher = sequence.request.matcher
    if token in sequence.stops and may_stop:
        update.finish, update.matched = "stop", token
    elif matcher is not None and not matcher.advance(token):
        update.finish, update.code = "error", "internal"
        update.error = f"the constraint stopped at token {token}: {matcher.error()}"
    elif matcher is not None and matcher.is_finished():
        update.finish = "stop"
    elif sequence.outputs >= sequence.max_tokens or sequence.length >= max_length:
        update.finish = "length"
    return update


def _nothing(sequence: Sequence) -> str:
    if sequence.request.matcher is not None:
        return "no token can follow: constraint, banned tokens and logit bias exclude all of them"
    return "no token can follow: the model's logits are not numbers, or all tokens are excluded"


def prefilled(sequence: Sequence) -> Update:
    """The last update of a request that wants no token, or no more."""
    complete = sequence.outputs < sequence.max_tokens  # then the constraint has nothing to add
    update = Update(sequence.rid, finish="stop" if complete else "length")
    announce(sequence, update)
    return update


def announce(sequence: Sequence, update: Update) -> None:
    """Add what comes with a request's first update."""
    if sequence.announced or sequence.queued is None:
        return
    sequence.announced = True
    update.cached_tokens = sequence.cached_tokens
    update.queued = sequence.queued
    if sequence.prompt_scores and sequence.score_next >= sequence.prompt_len:
        update.prompt_scores = _joined(sequence.prompt_scores)
        update.prompt_targets = sequence.tokens[sequence.score_from : sequence.prompt_len]
        sequence.prompt_scores = []


def _joined(parts: list[TokenScores]) -> TokenScores:
    if len(parts) == 1:
        return parts[0]
    return TokenScores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
