"""When a request's tokens are emitted, and what goes into each update."""

from __future__ import annotations

import numpy as np

from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.scheduler.sequence import Ending, Sequence
from rootlace.wire.errors import InternalError


def due(sequence: Sequence, now: float, spacing: float = 0.0) -> bool:
    """Whether to emit now: the first token always, later ones by `emit_every` and `emit_seconds`.

    Where streams are so many that each may have a piece only every `spacing` seconds, the next
    multiple of `emit_seconds` counts. Time is divided at multiples of the interval, so that streams
    with the same one are emitted together.
    """
    if not sequence.announced:
        return True
    request = sequence.request
    if sequence.length - sequence.emitted < request.emit_every:
        return False
    seconds = request.emit_seconds
    if 0 < seconds < spacing:
        seconds *= -(-spacing // seconds)
    return not seconds or now // seconds > sequence.emitted_at // seconds


def next_update(
    sequence: Sequence, now: float, spacing: float = 0.0, *, held_back: bool = False
) -> Update | None:
    """The next update of a request that goes on; None if there is nothing to emit. `spacing`: see
    `due`. `held_back`: ignore `emit_every` and `emit_seconds`.

    Tokens wait for their scores. Those of a checked constraint wait for the end, because they may
    be taken back until then. Tokens that were forced before the first sample wait until the prompt
    is computed, since the first update also carries the prompt's figures.
    """
    if held_back and not sequence.announced:
        return None
    stop = sequence.length
    if sequence.params.logprobs:
        # The scores of later tokens come with a step that is still under way.
        stop = sequence.emitted + sum(len(part.logprobs) for part in sequence.output_scores)
    elif sequence.scores_missing:
        stop = sequence.score_next
    if sequence.held:
        settled = 0 if sequence.matcher is None else sequence.matcher.settled()
        stop = min(stop, sequence.prompt_len + settled)
    if stop <= sequence.emitted or not (held_back or due(sequence, now, spacing)):
        return None
    update = _tokens(sequence, stop)
    sequence.emitted_at = now
    add_prompt_figures(sequence, update)
    return update


def last_update(sequence: Sequence, ending: Ending) -> Update:
    """The last update. With an error, tokens that were not emitted yet are dropped."""
    failed = ending.finish == "error"
    update = Update(sequence.rid) if failed else _tokens(sequence, sequence.length)
    update.finish, update.matched = ending.finish, ending.matched
    update.code, update.error = ending.code, ending.error
    update.pin = sequence.pin
    if sequence.pool is not None and not failed:
        update.vector = sequence.pool.vector()
    return update


def take_states(sequence: Sequence, states: np.ndarray) -> None:
    """Hidden states or scores that a step found for the sequence's pool, float32 [tokens, size].
    What is no number makes the request end with an error."""
    assert sequence.pool is not None
    sequence.pool.take(states)
    if not np.isfinite(states).all():
        error = "the model's hidden states are not numbers"
        sequence.ending = Ending("error", code=InternalError.code, error=error)


def add_prompt_figures(sequence: Sequence, update: Update) -> None:
    """Add the prompt's figures, if this is the request's first update."""
    if sequence.announced or sequence.queued is None:
        return
    sequence.announced = True
    update.cached_tokens = sequence.cached_tokens
    update.queued = sequence.queued
    update.report = sequence.report
    update.pin = sequence.pin
    first, stop = sequence.score_from, sequence.prompt_len
    scored = sum(len(part.logprobs) for part in sequence.prompt_scores)
    # If it is aborted, some may still be under way.
    if first < stop and scored == stop - max(first, 1):
        update.prompt_targets = sequence.tokens[first:stop]
        if scored:
            update.prompt_scores = _joined(sequence.prompt_scores)
        sequence.prompt_scores = []


def add_lost_drafts(sequence: Sequence, update: Update) -> None:
    """Add the drafted tokens that came to nothing, to the last update: also those that were right,
    of tokens that are never emitted."""
    update.rejected += sequence.rejected + len(sequence.accepted)


def _tokens(sequence: Sequence, stop: int) -> Update:
    """An update with the tokens up to `stop`, which then count as emitted."""
    start = sequence.emitted
    if stop == start + 1 == sequence.length:
        update = Update(sequence.rid, (sequence.last,))
    else:
        update = Update(sequence.rid, tuple(sequence.tokens[start:stop].tolist()))
    if sequence.output_scores:
        update.scores = _joined(sequence.output_scores)
        assert len(update.scores.logprobs) == stop - start, f"{sequence}: scores out of line"
        sequence.output_scores = []
    if sequence.forced:
        update.forced = tuple(at - start for at in sequence.forced if at < stop)
        sequence.forced = [at for at in sequence.forced if at >= stop]
    sequence.emitted = stop
    if sequence.accepted:
        update.accepted = tuple(at - start for at in sequence.accepted if at < stop)
        sequence.accepted = [at for at in sequence.accepted if at >= stop]
    update.rejected, sequence.rejected = sequence.rejected, 0
    return update


def _joined(parts: list[TokenScores]) -> TokenScores:
    if len(parts) == 1:
        return parts[0]
    return TokenScores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
