"""Drafts: tokens that are expected next, computed in the step of the one before them."""

from __future__ import annotations

from rootlace.runtime.contracts.plan import MAX_DRAFTED, StepPlan
from rootlace.runtime.scheduler.counters import Counters
from rootlace.runtime.scheduler.kv import KVStore
from rootlace.runtime.scheduler.pace import DraftPace
from rootlace.runtime.scheduler.plan_builder import PlanBuilder
from rootlace.runtime.scheduler.prediction import MAX_DRAFT
from rootlace.runtime.scheduler.sample_rows import SampleRows
from rootlace.runtime.scheduler.sequence import Sequence

_MARGIN = 1.3
"""A draft is to save so many times what it costs: the cost is known roughly."""


class Drafting:
    """Decides which rows of a step have a draft, and how long it is.

    A row with a draft of k tokens computes k + 1 and samples behind each of them. What is sampled
    counts as far as each token before it is the one that was drafted, so the output is the one
    without drafts, whatever is drafted.

    *Where it helps.* A token more in a step costs what it has cost of late (`DraftPace`). One that
    is right saves its row's share of a further step: less, the more rows there are. So where many
    rows share a step, drafts are short, and then there are none.
    """

    def __init__(self, kv: KVStore, sample_rows: SampleRows, counters: Counters) -> None:
        self._kv = kv
        self._count = counters
        self._sample_rows = sample_rows
        self.pace = DraftPace()
        self._price = 0.0
        """Of a drafted token in the step planned last, as a part of what a right one saves."""

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        if plan.num_tokens == len(plan.samples):  # else there are prompts, too
            self.pace.note(plan.num_rows, plan.num_tokens - plan.num_rows, seconds)

    def plan(
        self, ready: list[Sequence], builder: PlanBuilder, budget: int
    ) -> tuple[list[Sequence], int]:
        """Add the rows of `ready` that have a draft, of at most `budget` tokens in all; returns the
        others, and what is left of the budget. Each of `ready` has room for one token."""
        # Before anybody is able: who waits to be drafted for is decided by it.
        self._price = _MARGIN * self.pace.price(len(ready))
        able = [s for s in ready if s.prediction is not None and not s.pending]
        if not able:
            return ready, budget
        most = min(MAX_DRAFT, MAX_DRAFTED // len(able))
        drafting = set()
        for sequence in able:
            sequence.waits = False
            prediction = sequence.prediction
            count = 0 if prediction is None else prediction.worth(self._price)
            if count and (count := self._draft(sequence, min(count, most, budget), builder)):
                drafting.add(sequence)
                budget -= count
                self._count.drafted_tokens += count
        return [s for s in ready if s not in drafting] if drafting else ready, budget

    def waits(self, sequence: Sequence) -> bool:
        """Whether the sequence is better not planned ahead: it can be drafted for once its last
        token is known, and that is likely to find more than the token that it misses."""
        prediction = sequence.prediction
        return prediction is not None and prediction.sure and prediction.worth(self._price) > 1

    def close(self, sequence: Sequence) -> None:
        """Count the draft, of which no more can turn out to be right."""
        draft = sequence.draft
        if draft is not None:
            right = draft.agreed(sequence.tokens, sequence.length) - draft.start
            self._count.accepted_tokens += right
            sequence.accepted += right
            sequence.rejected += len(draft.tokens) - right
            sequence.draft = None
            if sequence.prediction is not None:
                sequence.prediction.drafted(len(draft.tokens), right, self._price)

    def settle(self, sequence: Sequence) -> None:
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
        if prediction is not None:
            prediction.follow(sequence.tokens, sequence.length)
            sequence.waits = self.waits(sequence)

    # ------------------------------------------------------------ inside

    def _draft(self, sequence: Sequence, most: int, builder: PlanBuilder) -> int:
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
        sequence.begin_draft(draft[:count])
        kv.grow(sequence, count + 1, builder)
        builder.add_draft(sequence, constraints)
        sequence.computed += count + 1
        return count
