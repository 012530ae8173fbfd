"""What tokens mean for their request: those sampled, and those its constraint forces."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.scheduler.sequence import Ending, Sequence
from rootlace.wire.errors import ConstraintNotMet, InternalError, from_code

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retreat:
    """The constraint takes tokens back: the sequence is to go on from `length` tokens."""

    length: int


Verdict = Ending | Retreat | None
"""What to do after a token; None: go on."""


class TokenIntake:
    """Appends tokens to sequences and counts.

    *Jumps.* Where the matcher forces tokens, they are appended at once, so that the next step
    computes all of them in one chunk and samples behind. A forced token counts, ends and stops like
    a sampled one. A stop token that `min_tokens` bans now is not forced on the request: sampling
    then finds other tokens for the same text, if there are any.

    *Retreats.* A checked constraint may refuse a token that its mask allowed. It then says how many
    tokens it takes back: where `Matcher.can_retreat`, any that were not told yet, else none.
    """

    def __init__(self) -> None:
        self.forced_tokens = 0
        self.jumps = 0
        self.retreats = 0

    def begin(self, sequence: Sequence) -> None:
        """Append what is forced before anything is sampled, so that it is computed with the prompt.

        Raises what the constraint failed with.
        """
        if sequence.ending is not None:
            return
        try:
            verdict = self._jump(sequence)
        except BaseException as error:  # a panic in a compiled library is no Exception
            verdict = _failed(sequence, error)
        if isinstance(verdict, Retreat):
            sequence.shorten(verdict.length)
        elif isinstance(verdict, Ending) and verdict.finish == "error":
            raise from_code(verdict.code, verdict.error)
        else:
            sequence.ending = verdict

    def try_take_fast(self, sequence: Sequence, token: int, scores: TokenScores | None) -> bool:
        """`take` for the common case, as cheap as can be, since it runs once per row and step.

        For a `plain` sequence. Returns False, having done nothing, if the token may end it or the
        constraint needs a closer look: call `take` then.
        """
        if token < 0 or token in sequence.stops or sequence.length + 1 >= sequence.full:
            return False
        matcher = sequence.matcher
        if matcher is not None:
            try:
                if not matcher.try_advance_fast(token, sequence.jumps):
                    return False
            except BaseException:  # whatever it is, `take` meets it again
                return False
        sequence.pending -= 1
        sequence.append(token)
        if scores is not None:
            sequence.output_scores.append(scores)
        return True

    def take(self, sequence: Sequence, token: int, scores: TokenScores | None) -> Verdict:
        """Append `token`, whose log-probabilities are `scores`, and the tokens forced behind it.

        A token of -1 (see `StepResult`) ends the request with an error that says why nothing could
        be sampled.
        """
        if sequence.fault is not None:
            return _failed(sequence, sequence.fault)
        if token < 0:
            return _nothing(sequence)
        if sequence.matcher is None:
            return self._take_and_jump(sequence, token, scores)
        try:
            return self._take_and_jump(sequence, token, scores)
        except BaseException as error:
            return _failed(sequence, error)

    def _take_and_jump(self, sequence: Sequence, token: int, scores: TokenScores | None) -> Verdict:
        length = sequence.length
        verdict = self._append(sequence, token)
        if scores is not None and sequence.length > length:
            sequence.output_scores.append(scores)
        return self._jump(sequence) if verdict is None else verdict

    def _append(self, sequence: Sequence, token: int) -> Verdict:
        """Append `token` unless the constraint refuses it."""
        matcher = sequence.matcher
        stops = token in sequence.stops and sequence.outputs >= sequence.params.min_tokens
        stops = stops and not (matcher is not None and matcher.ignores(token))
        # A checked constraint must see the end of the text, too.
        asked = matcher is not None and (not stops or sequence.held)
        if asked and matcher is not None and not matcher.advance(token):
            return self._refused(sequence, token)
        sequence.append(token)
        if stops:
            return Ending("stop", token)
        if matcher is not None and matcher.is_finished():
            return Ending("stop")
        if matcher is not None and matcher.is_free():
            sequence.matcher = None
        if sequence.length >= sequence.full:
            return Ending("length")
        return None

    def _refused(self, sequence: Sequence, token: int) -> Verdict:
        matcher = sequence.matcher
        assert matcher is not None
        reason = matcher.error()
        undone = matcher.retreat()
        if undone is None or sequence.length - undone < sequence.emitted:
            error = matcher.error() or reason
            if not sequence.held:
                # The mask allowed the token, so the constraint has run into one of its bounds.
                error = f"the constraint stopped at token {token}: {reason}"
            return Ending("error", code=ConstraintNotMet.code, error=error)
        self.retreats += 1
        return Retreat(sequence.length - undone)

    def _jump(self, sequence: Sequence) -> Verdict:
        matcher = sequence.matcher
        if matcher is None or not sequence.jumps:
            return None
        start = sequence.length
        verdict: Verdict = None
        while verdict is None and (tokens := matcher.forced_tokens()):
            verdict, done = self._take_forced(sequence, tokens)
            if done:
                break
        if sequence.length > start:
            count = sequence.length - start
            sequence.forced.extend(range(start, sequence.length))
            if sequence.params.logprobs:
                sequence.want_scores(start)
            self.forced_tokens += count
            self.jumps += 1
        return verdict

    def _take_forced(self, sequence: Sequence, tokens: list[int]) -> tuple[Verdict, bool]:
        """Append `tokens`. The flag says whether to stop here and sample next."""
        early = sequence.request.params.min_tokens
        matcher = sequence.matcher
        if sequence.plain and matcher is not None:
            # The common case: tokens that neither stop nor complete the request.
            room = sequence.full - sequence.length - 1
            count = 0
            for token in tokens[: max(room, 0)]:
                if token in sequence.stops or not matcher.try_advance_fast(token, False):
                    break
                count += 1
            if count:
                sequence.extend(tokens[:count])
                tokens = tokens[count:]
        for token in tokens:
            if token in sequence.stops and sequence.outputs < early:
                return None, True
            verdict = self._append(sequence, token)
            if verdict is not None:
                return verdict, True
        return None, False


def _failed(sequence: Sequence, error: BaseException) -> Ending:
    """A fault of a matcher ends its request alone."""
    log.error("the constraint of %r failed", sequence, exc_info=error)
    return Ending("error", code=InternalError.code, error=f"the constraint failed: {error!r}")


def _nothing(sequence: Sequence) -> Ending:
    matcher = sequence.matcher
    if matcher is None:
        error = "no token can follow: the model's logits are not numbers, or all are excluded"
        return Ending("error", code=InternalError.code, error=error)
    reason = matcher.error() or "constraint, banned tokens and logit bias exclude all of them"
    return Ending("error", code=ConstraintNotMet.code, error=f"no token can follow: {reason}")
