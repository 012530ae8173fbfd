"""Sampled and forced tokens on their way into requests and out to clients.

Sections: updates (times of emission), suspects (the request that made a step fail), intake (append
tokens, find stops, roll back).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque

import msgspec
import numpy as np

from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineOutput
from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.scheduler.request import Ending, InFlightStep, RequestState
from rootlace.wire.errors import ConstraintNotMet, InternalError, from_code
from rootlace.wire.protocol import RequestFacts

# Updates ------------------------------------------------------------------------------------------


def next_update(
    sequence: RequestState, now: float, spacing: float = 0.0, *, held_back: bool = False
) -> EngineOutput | None:
    """Return the next update of a request that goes on; None if nothing is due.

    The first token is due at once, later ones by `emit_every` and `emit_seconds`. With many
    streams, each stream emits at most every `spacing` seconds; the next multiple of `emit_seconds`
    counts. Emission times are multiples of the interval, so that streams with the same interval are
    emitted together. `held_back`: ignore `emit_every` and `emit_seconds`.

    Tokens wait for their scores. Tokens of a checked constraint wait for the end of the request, as
    a rollback may drop them. Tokens forced before the first sample wait until the prompt is
    computed, since the first update also carries the prompt's figures.
    """
    if not sequence.announced:
        if held_back:
            return None
    elif not held_back:
        request = sequence.request
        if sequence.length - sequence.emitted < request.emit_every:
            return None
        seconds = request.emit_seconds
        if 0 < seconds < spacing:
            seconds *= -(-spacing // seconds)
        if seconds and now // seconds <= sequence.emitted_at // seconds:
            return None
    stop = sequence.length
    if sequence.params.logprobs:
        # A step in flight returns the scores of later tokens.
        stop = sequence.emitted + sum(len(part.logprobs) for part in sequence.output_scores)
    elif sequence.score_next < sequence.score_stop:
        stop = sequence.score_next
    if sequence.held:
        settled = 0 if sequence.matcher is None else sequence.matcher.settled()
        stop = min(stop, sequence.prompt_len + settled)
    if stop <= sequence.emitted:
        return None
    update = _tokens(sequence, stop)
    sequence.emitted_at = now
    if not sequence.announced:
        add_prompt_figures(sequence, update)
    return update


def last_update(sequence: RequestState, ending: Ending) -> EngineOutput:
    """Return the last update; with an error, tokens not yet emitted are dropped."""
    failed = ending.finish == "error"
    update = EngineOutput(sequence.rid) if failed else _tokens(sequence, sequence.length)
    update.finish, update.matched = ending.finish, ending.matched
    update.code, update.error = ending.code, ending.error
    if sequence.announced:
        update.facts = _facts(sequence)
    if sequence.pool is not None and not failed:
        update.vector = sequence.pool.vector()
    return update


def _facts(sequence: RequestState) -> RequestFacts:
    return RequestFacts(
        sequence.cached_tokens, sequence.queued or 0.0, sequence.report, sequence.pin
    )


def take_states(sequence: RequestState, states: np.ndarray) -> None:
    """Give hidden states or scores of a step to the sequence's pool: float32 [tokens, size].

    A NaN or infinity ends the request with an error.
    """
    assert sequence.pool is not None
    sequence.pool.take(states)
    if not np.isfinite(states).all():
        error = "the model's hidden states are not numbers"
        sequence.ending = Ending("error", code=InternalError.code, error=error)


def add_prompt_figures(sequence: RequestState, update: EngineOutput) -> None:
    """Add the prompt's figures to `update`, the request's first, if the prompt was computed."""
    if sequence.queued is None:
        return
    sequence.announced = True
    update.facts = _facts(sequence)
    first, stop = sequence.score_from, sequence.prompt_len
    if first >= stop:
        return
    scored = sum(len(part.logprobs) for part in sequence.prompt_scores)
    if scored == stop - max(first, 1):  # an aborted request may have scores in flight
        update.prompt_targets = sequence.tokens[first:stop]
        if scored:
            update.prompt_scores = _joined(sequence.prompt_scores)
    sequence.prompt_scores = []


def _tokens(sequence: RequestState, stop: int) -> EngineOutput:
    """Return an update with the tokens up to `stop`, which count as emitted from now on."""
    start = sequence.emitted
    if stop == start + 1 == sequence.length:
        update = EngineOutput(sequence.rid, (sequence.last,))
    else:
        update = EngineOutput(sequence.rid, tuple(sequence.tokens[start:stop].tolist()))
    if sequence.output_scores:
        update.scores = _joined(sequence.output_scores)
        assert len(update.scores.logprobs) == stop - start, f"{sequence}: scores out of line"
        sequence.output_scores = []
    if sequence.forced:
        count = bisect_left(sequence.forced, stop)
        update.forced = tuple([at - start for at in sequence.forced[:count]])
        del sequence.forced[:count]
    sequence.emitted = stop
    if sequence.accepted:
        update.accepted = tuple((at - start, by) for at, by in sequence.accepted if at < stop)
        sequence.accepted = [one for one in sequence.accepted if one[0] >= stop]
    if any(sequence.rejected):
        update.rejected = tuple(sequence.rejected)
        sequence.rejected = [0] * len(sequence.rejected)
    return update


def _joined(parts: list[TokenScores]) -> TokenScores:
    if len(parts) == 1:
        return parts[0]
    return TokenScores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )


# Suspects -----------------------------------------------------------------------------------------


TURNS = 4
"""Period in steps: one step of `TURNS` is for cleared requests; more would keep suspects waiting.
"""
MAX_ACCUSATIONS = 2
"""Most failing steps that a request may share without any of their requests failing alone. A
failure that needs several requests together (memory, for example) must end, too."""


class Suspects:
    """Requests to compute alone until each is past the token where its step failed.

    A failing step of several requests does not name the cause, but a step of one request does. A
    request that fails alone is the cause; a request that passes the token is not.
    """

    def __init__(self) -> None:
        self.queue: deque[RequestState] = deque()
        self._accused: list[RequestState] = []
        """Requests of the last failing step of several requests."""
        self._turns = 0
        """Steps of suspects since the last step of other requests."""

    def add(self, sequence: RequestState, until: int) -> None:
        """Compute `sequence` alone until its first `until` tokens are computed."""
        sequence.suspected_until = until
        self.queue.append(sequence)

    def first(self) -> RequestState | None:
        """Return the sequence to compute alone now; None if none. No step may be in flight."""
        while self.queue:
            sequence = self.queue[0]
            if not sequence.finished and sequence.computed < sequence.suspected_until:
                return sequence
            sequence.suspected_until = 0
            self.queue.popleft()
        self._accused = []  # a later failure has another cause
        return None

    def turn(self, alone: RequestState, running: list[RequestState]) -> bool:
        """Return whether the next step decodes for all running requests but `alone`.

        One of `TURNS` steps does. The other requests have passed the token where their step failed,
        and need not wait for `alone`.
        """
        others = any(one.decoding for one in running if one is not alone)
        self._turns = (self._turns + 1) % TURNS if others else 0
        return others and not self._turns

    def accuse(self, flight: InFlightStep) -> list[RequestState]:
        """Suspect the requests of a failed step; return the requests that must end."""
        rows = [sequence for sequence in flight.rows if not sequence.finished]
        if len(flight.rows) == 1:  # requests aborted meanwhile shared the step, too
            for sequence in self._accused:
                sequence.accusations = 0
            self._accused = []
            return rows
        self._accused, guilty = rows, []
        for sequence in rows:
            if sequence.accusations == MAX_ACCUSATIONS:
                guilty.append(sequence)
                continue
            sequence.accusations += 1
            self.add(sequence, min(sequence.computed, sequence.length))
        return guilty


# Intake -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class Rollback(msgspec.Struct, frozen=True):
    """Verdict that drops tokens: the sequence continues from `length` tokens."""

    length: int


Verdict = Ending | Rollback | None
"""Consequence of a token; None: continue."""


class TokenIntake:
    """Intake of tokens, which appends them to sequences and counts them.

    *Jumps.* Tokens forced by the matcher are appended at once. The next step computes all of them
    in one chunk and samples behind the last. A forced token counts, ends and stops as a sampled one
    does. A stop token that `min_tokens` bans is not forced: sampling then finds other tokens for
    the same text, if there are any.

    *Rollbacks.* A checked constraint may refuse a token that its mask allowed. The constraint then
    names the count of tokens to drop. If `Matcher.can_rollback`, the tokens are any not yet
    emitted; otherwise none.
    """

    def __init__(self) -> None:
        self.forced_tokens = 0
        self.jumps = 0
        self.rollbacks = 0

    def begin(self, sequence: RequestState) -> None:
        """Append tokens forced before the first sample, to be computed with the prompt.

        Raises the constraint's error.
        """
        matcher = sequence.matcher
        if sequence.ending is not None or not sequence.jumps or matcher is None:
            return
        try:
            verdict = self._jump(sequence, matcher)
        except BaseException as error:  # a panic in a compiled library is no Exception
            verdict = _failed(sequence, error)
        if isinstance(verdict, Rollback):
            sequence.shorten(verdict.length)
        elif isinstance(verdict, Ending) and verdict.finish == "error":
            raise from_code(verdict.code, verdict.error)
        else:
            sequence.ending = verdict

    def take(
        self,
        sequence: RequestState,
        token: int,
        scores: TokenScores | None = None,
        *,
        forced: bool = False,
    ) -> Verdict:
        """Append `token` with log-probabilities `scores` and, unless `forced`, the tokens forced
        behind it.

        A token of -1 (see `StepResult`) ends the request with an error that names the reason.
        """
        if sequence.fault is not None:
            return _failed(sequence, sequence.fault)
        if token < 0:
            return _nothing(sequence)
        matcher, length = sequence.matcher, sequence.length
        stops = token in sequence.stops and sequence.outputs >= sequence.params.min_tokens
        try:
            if matcher is not None:
                stops = stops and not matcher.ignores(token)
                # A checked constraint must see the end of the text, too.
                if (not stops or sequence.held) and not matcher.advance(token):
                    return self._refused(sequence, token)
            if length == len(sequence.tokens):
                sequence.reserve_tokens(1)
            sequence.tokens[length] = token
            sequence.last = token
            sequence.length = length + 1
            sequence.outputs += 1
            if scores is not None:
                sequence.output_scores.append(scores)
            if stops:
                return Ending("stop", token)
            if matcher is not None and not matcher.place.unfinished:
                if matcher.is_finished():
                    return Ending("stop")
                if matcher.free:
                    sequence.matcher = matcher = None
            if length + 1 >= sequence.full:
                return Ending("length")
            if forced or matcher is None or not sequence.jumps or matcher.place.unforced:
                return None
            return self._jump(sequence, matcher)
        except BaseException as error:  # a panic in a compiled library is no Exception
            if matcher is None:
                raise
            return _failed(sequence, error)

    def _refused(self, sequence: RequestState, token: int) -> Verdict:
        matcher = sequence.matcher
        assert matcher is not None
        reason = matcher.error()
        undone = matcher.rollback_refused()
        if undone is None or sequence.length - undone < sequence.emitted:
            error = matcher.error() or reason
            if not sequence.held:
                # The mask allowed the token, so the constraint has reached one of its bounds.
                error = f"the constraint stopped at token {token}: {reason}"
            return Ending("error", code=ConstraintNotMet.code, error=error)
        self.rollbacks += 1
        return Rollback(sequence.length - undone)

    def _jump(self, sequence: RequestState, matcher: Matcher) -> Verdict:
        """Append the tokens that are forced now, until one may be sampled again."""
        start, early = sequence.length, sequence.params.min_tokens
        verdict: Verdict = None
        banned = False
        while not (verdict or banned or matcher.place.unforced) and (
            tokens := matcher.forced_tokens()
        ):
            for token in tokens:
                banned = token in sequence.stops and sequence.outputs < early
                if banned or (verdict := self.take(sequence, token, forced=True)) is not None:
                    break
        count = sequence.length - start
        if count > 0:
            sequence.forced.extend(range(start, sequence.length))
            if sequence.params.logprobs:
                sequence.want_scores(start)
            self.forced_tokens += count
            self.jumps += 1
        return verdict


def _failed(sequence: RequestState, error: BaseException) -> Ending:
    """End a request whose matcher failed."""
    log.error("the constraint of %r failed", sequence, exc_info=error)
    return Ending("error", code=InternalError.code, error=f"the constraint failed: {error!r}")


def _nothing(sequence: RequestState) -> Ending:
    matcher = sequence.matcher
    if matcher is None:
        error = "no token can follow: the model's logits are not numbers, or all are excluded"
        return Ending("error", code=InternalError.code, error=error)
    reason = matcher.error() or "constraint, banned tokens and logit bias exclude all of them"
    return Ending("error", code=ConstraintNotMet.code, error=f"no token can follow: {reason}")
