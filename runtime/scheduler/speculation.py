"""Drafts: tokens that are expected next, computed in the step of the one before them."""

from __future__ import annotations

import hashlib
from weakref import WeakValueDictionary

import msgspec

from rootlace.runtime.contracts.messages import NO_TOKENS
from rootlace.runtime.contracts.plan import MAX_DRAFTED, StepPlan
from rootlace.runtime.scheduler.batch import PlanBuilder
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.pacing import DraftPace
from rootlace.runtime.scheduler.prediction import MAX_DRAFT, PredictedText, Prediction
from rootlace.runtime.scheduler.request import Counters, RequestState
from rootlace.runtime.scheduler.rows import SampleRows

_MARGIN = 1.7
"""A draft is to save so many times what it costs: the cost is known roughly."""
_MOST_RESTED = 8
"""Steps for which nothing is looked at where drafts are not worth it, at most."""


class Drafting:
    """Decides which rows of a step have a draft, and how long it is.

    A row with a draft of k tokens computes k + 1 and samples behind each of them. What is sampled
    counts as far as each token before it is the one that was drafted, so the output is the one
    without drafts, whatever is drafted.

    *Where it helps.* What drafts cost is what they have cost of late (`DraftPace`): so much that a
    step has any, and so much for each token. One that is right saves its row's share of a further
    step: less, the more rows there are. So where many rows share a step, drafts are short, and then
    there are none; and none are made where those of all rows together would save less than it
    costs that there are any. To follow the predictions costs, too: where nothing is drafted though
    something could be, that rests for ever more steps.

    *Overlap.* Whose next token is planned ahead has no draft: it is not known what to draft behind.
    A row with a draft is in no step that is planned meanwhile, and one whose prediction is right
    may stand by, to be drafted for: each misses a step, which counts as a token lost.
    """

    def __init__(self, kv: KVStore, sample_rows: SampleRows, counters: Counters) -> None:
        self._kv = kv
        self._count = counters
        self._sample_rows = sample_rows
        self._texts: WeakValueDictionary[bytes, PredictedText] = WeakValueDictionary()
        """What requests predict, by digest."""
        self.pace = DraftPace()
        self.requests = 0
        """How many with a prediction there are."""
        self._fixed = self._price = 0.0
        """Of there being drafts in the step planned last, and of a token: as parts of what a right
        one saves."""
        self._times = 1.0
        """How many times as much as expected the drafts cost of the step noted last."""
        self._rests, self._rest = 0, 0
        """For how many steps nothing is followed, and how many of them are left."""
        self._drafters = 1
        """How many of the running sequences may be drafted for."""

    def added(self, sequence: RequestState) -> None:
        """A request came. Others may predict the same text: it is kept once."""
        ids = sequence.request.prediction
        if not len(ids):
            return
        # What a checked constraint may take back is not drafted: what was accepted has been told.
        if not sequence.held:
            digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
            sequence.predicted = self._texts.setdefault(digest, PredictedText(ids))
            ids = sequence.predicted.ids
            self.requests += 1
            self._rests = self._rest = 0
        kept = NO_TOKENS if sequence.predicted is None else ids
        sequence.request = msgspec.structs.replace(sequence.request, prediction=kept)

    def ended(self, sequence: RequestState) -> None:
        """A request is over: its draft under way, if it has one, has come to what it has."""
        self.requests -= sequence.predicted is not None
        self.close(sequence)

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long, which is about to be committed."""
        self._times = 1.0
        if plan.num_tokens == len(plan.samples):  # else there are prompts, too
            drafted = plan.num_tokens - plan.num_rows
            self._times = self.pace.note(plan.num_rows, drafted, seconds)

    def plan(
        self, ready: list[RequestState], builder: PlanBuilder, budget: int
    ) -> tuple[list[RequestState], int]:
        """Add the rows of `ready` that have a draft, of at most `budget` tokens in all; returns the
        others, and what is left of the budget. Each of `ready` has room for one token."""
        if self._rest:
            self._rest -= 1
            return ready, budget
        near = [s for s in ready if s.prediction is not None and s.prediction.at >= 0]
        if not near or self.pace.wants_none():
            return ready, budget
        # Before anybody is able: who stands by to be drafted for is decided by it.
        fixed, price = self.pace.price(len(ready))
        self._fixed, self._price = _MARGIN * fixed, _MARGIN * price
        wanted, saved = [], 0.0
        for sequence in near:
            prediction = sequence.prediction
            if prediction is None or sequence.pending:
                continue
            sequence.stands_by = False
            count, saves = prediction.worth(self._price)
            saved += saves
            if count:
                wanted.append((sequence, count))
        if not wanted or saved <= self._fixed:
            self._rests = self._rest = min(2 * self._rests + 1, _MOST_RESTED)
            return ready, budget
        self._rests = 0
        most = min(MAX_DRAFT, MAX_DRAFTED // len(wanted))
        drafting = set()
        self._sample_rows.begin_drafts()
        for sequence, count in wanted:
            if count := self._draft(sequence, min(count, most, budget), builder):
                drafting.add(sequence)
                budget -= count
                self._count.drafted_tokens += count
        for sequence in drafting:
            assert sequence.draft is not None
            sequence.draft.cost += self._fixed / len(drafting)
        return [s for s in ready if s not in drafting] if drafting else ready, budget

    def launched(self, running: list[RequestState]) -> None:
        """A step is launched with those of `running` that do not stand by with a token pending."""
        self._drafters = 0
        for sequence in running:
            prediction = sequence.prediction
            if prediction is not None:
                self._drafters += 1
                prediction.missed += sequence.stands_by and sequence.pending > 0

    def close(self, sequence: RequestState) -> None:
        """Count the draft, of which no more can turn out to be right."""
        draft = sequence.draft
        if draft is not None:
            right = sequence.close_draft()
            self._count.accepted_tokens += right
            if sequence.prediction is not None:
                sequence.prediction.drafted(right, draft.cost * self._times)

    def settle(self, sequence: RequestState) -> None:
        """What was sampled behind a token of the draft is taken in. Where something else than the
        draft follows, what was computed of that is given up."""
        draft, prediction = sequence.draft, sequence.prediction
        if draft is not None:
            right = draft.agreed(sequence.tokens, sequence.length)
            if right == sequence.length:
                sequence.pending = sequence.computed + 1 - right
                return
            self.close(sequence)
            sequence.drop_pending()
            self._kv.rewind(sequence, min(right, sequence.length - 1))
        if prediction is not None and sequence.length >= prediction.until and not self._rest:
            prediction.follow(sequence.tokens, sequence.length)
            sequence.stands_by = self._should_stand_by(prediction)

    # ------------------------------------------------------------ inside

    def _should_stand_by(self, prediction: Prediction) -> bool:
        """Whether its sequence is better not planned ahead: it can be drafted for once its last
        token is known, and that is likely to save more than the token that it misses."""
        saves = prediction.worth(self._price)[1] if prediction.sure else 0.0
        return saves - self._fixed / max(self._drafters, 1) > 1

    def _draft(self, sequence: RequestState, most: int, builder: PlanBuilder) -> int:
        """Plan the sequence's row with a draft of at most `most` tokens; returns how many."""
        prediction, kv = sequence.prediction, self._kv
        assert prediction is not None
        # A block is left for a prompt that needs one to go on.
        blocks = sequence.table_len + max(kv.pool.available - 1, 0)
        room = blocks * kv.block_size - sequence.computed - 1
        most = min(most, sequence.full - sequence.length - 1, room)
        draft = prediction.draft(max(most, 0))
        for at, token in enumerate(draft):
            if token in sequence.stops:
                del draft[at:]
                break
        constraints = self._sample_rows.along(sequence, draft) if draft else []
        count = len(constraints) - 1
        if count < 1:
            return 0
        del draft[count:]
        sequence.begin_draft(draft, self._price * count)
        kv.grow(sequence, count + 1, builder)
        builder.add_draft(sequence, constraints)
        sequence.computed += count + 1
        return count
