"""The draft model as a source of drafts: its rows, draft lengths and profit.

cost of a draft of k tokens     k steps of the draft model, shared by its rows, + k more tokens of
                                the model's step (`DraftPace`)
                                + once: the sequence's tokens that the draft model lacks
saved by a draft                r + r^2 + ... r^k steps of the row, for a chance r of agreement
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from operator import attrgetter

from rootlace.runtime.contracts.plan import DraftModel, DraftRow
from rootlace.runtime.scheduler.request import RequestState

log = logging.getLogger(__name__)

_LENGTH = attrgetter("length")

_FIRST_RIGHT, _MOST_RIGHT, _LEARNT_RIGHT = 0.65, 0.98, 0.05
"""Prior share of right tokens, upper bound, and weight of one more token, of all rows."""
_MOST_TOKENS = 12
"""Most tokens of a draft."""
_MARGIN = 1.1
"""Minimum ratio of savings to the draft model's own steps, which are measured well."""
_AHEAD = 96
"""Output tokens within which computing a sequence's missing draft KV has to pay."""
_TOKENS_PER_STEP = 8
"""Prior: computed tokens that take as long as a step of the draft model."""
_LEARNT, _LEARNT_FIRST, _HELD_UP = 0.1, 0.5, 3.0
"""Weight of a measured step beside earlier steps; weight of the first step with its numbers of rows
and computed tokens; largest ratio of a step that counts."""
_LEAST_COMPUTED, _MOST_SECONDS = 32, 0.1
"""Least sequence tokens computed in one step, and the seconds for more tokens, while other rows
wait."""
_TRIED_SHARE, _TRIED_SAVED, TRIED = 0.0075, 0.5, 3
"""Share of the time, seconds that may be saved up, and tokens, for unprofitable drafts. Such drafts
show whether new texts are worth drafting."""


class ModelSource:
    """Policy that chooses the draft model's drafts, from their cost and the share of right drafts.

    If no draft pays, one row gets a draft now and then, for at most `_TRIED_SHARE` of the time.
    """

    def __init__(self, model: DraftModel, max_step_tokens: int) -> None:
        self._model: DraftModel | None = model
        self._max_tokens = max_step_tokens
        self._right = _FIRST_RIGHT
        """Share of right tokens, of all rows."""
        self._steps = {1: max(model.step_seconds, 1e-9)}
        """Map from number of rows to seconds of a step of one token each."""
        self._token = self._steps[1] / _TOKENS_PER_STEP
        """Seconds to compute a token of a sequence."""
        self._saved_up = 0.0
        """Seconds saved up for unprofitable drafts."""

    def ready(self, sequences: Sequence[RequestState]) -> list[RequestState]:
        """Return the sequences that may get drafts: no checked constraint can take their tokens
        back."""
        model = self._model
        if model is None:
            return []
        return [
            s
            for s in sequences
            if not s.pending
            and not s.held
            and s.full - s.length > 1
            and s.length < model.context_length
        ]

    def worth(
        self, sequence: RequestState, rows: int, price: float, share: float
    ) -> tuple[int, float]:
        """Return the best draft length, and the tokens saved beyond its cost, as `Drafter.worth`
        does.

        `rows`: number of rows drafted for at a time. `price`: the cost of checking a token, in
        tokens. `share`: seconds that a token takes without drafts.
        """
        model = self._model
        right = min(sequence.agreement.chance(self._right), _MOST_RIGHT)
        price += _MARGIN * self._step(rows) / rows / share
        if model is None or price >= right:
            return 0, 0.0
        left = min(sequence.full, model.context_length) - sequence.length - 1
        count = min(int(math.log(price) / math.log(right)), _MOST_TOKENS, left)
        if count < 1:
            return 0, 0.0
        correct = right * (1 - right**count) / (1 - right)
        saves = correct - price * count
        lacking = self._lacking(sequence) * self._token / share
        if lacking > saves * min(left, _AHEAD) / (1 + correct):
            return 0, 0.0
        return count, saves

    def trial(
        self, sequences: Sequence[RequestState], price: float, share: float
    ) -> RequestState | None:
        """Return a row for an unprofitable draft of `TRIED` tokens, if there is time for one."""
        if self._saved_up < TRIED * (self._step(1) + price * share) or not sequences:
            return None
        # For one row alone: looking up its missing tokens takes time, perhaps in each step.
        sequence = min(sequences, key=_LENGTH)
        cost = self._lacking(sequence) * self._token + TRIED * (self._step(1) + price * share)
        return sequence if self.affords(cost) else None

    def affords(self, seconds: float) -> bool:
        """Return whether the saved time covers drafts that lose `seconds`; take the time if so."""
        if seconds <= 0 or self._saved_up < seconds:
            return False
        self._saved_up -= seconds
        return True

    def pass_time(self, seconds: float) -> None:
        """Record the duration of a step of the model."""
        self._saved_up = min(self._saved_up + _TRIED_SHARE * seconds, _TRIED_SAVED)

    def draft(self, wanted: Sequence[tuple[RequestState, int]]) -> list[list[int]]:
        """Draft up to the requested count of tokens per sequence; the tables have space for the
        tokens. After a failure of the draft model, this and all later calls return no drafts."""
        model = self._model
        if model is None or not wanted:
            return [[] for _ in wanted]
        compute = min(max(int(_MOST_SECONDS / self._token), _LEAST_COMPUTED), self._max_tokens)
        rows = []
        for s, count in wanted:
            tokens, table = s.tokens[: s.length], s.table[: s.table_len]
            rows.append(DraftRow(tokens, s.prompt_len, table, s.params, s.simple, count, compute))
            compute = max(compute - model.missing(tokens, table), 1)
        try:
            made = model.draft(rows)
        except Exception:
            log.exception("the draft model failed: nothing more is drafted with it")
            self._model = None
            return [[] for _ in wanted]
        few = made.computed <= 2 * len(rows)  # then the first step is like the steps behind it
        if made.steps + few:
            taken = (made.step_seconds + few * made.seconds) / (made.steps + few)
            known = self._step(len(rows))
            weight = _LEARNT if len(rows) in self._steps else _LEARNT_FIRST
            learnt = min(taken, _HELD_UP * known) - known
            self._steps[len(rows)] = known + weight * learnt
        if not few:
            taken = max(made.seconds - self._step(len(rows)), 0.0) / made.computed
            learnt = min(taken, _HELD_UP * self._token) - self._token
            self._token += _LEARNT_FIRST * learnt
        return made.drafts

    def settled(self, sequence: RequestState, right: int, planned: int) -> None:
        """Record that `right` of the `planned` tokens of a draft were right."""
        wrong = int(right < planned)
        sequence.agreement.note(right, wrong)
        weight = (1 - _LEARNT_RIGHT) ** (right + wrong)
        usual = right / max(right + wrong, 1)
        self._right = weight * self._right + (1 - weight) * usual

    def _step(self, rows: int) -> float:
        """Return the seconds of a step of one token for each of `rows` rows."""
        known = self._steps.get(rows)
        if known is None:
            known = self._steps[min(self._steps, key=lambda some: abs(some - rows))]
        return known

    def _lacking(self, sequence: RequestState) -> int:
        """Count the tokens to compute for a draft, beside the two tokens that every draft begins
        with."""
        assert self._model is not None
        table = sequence.table[: sequence.table_len]
        missing = self._model.missing(sequence.tokens[: sequence.length], table)
        return max(missing - 2, 0)
