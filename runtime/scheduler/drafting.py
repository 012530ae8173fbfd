"""Drafts: tokens that are expected next, computed in the step of the one before them."""

from __future__ import annotations

from rootlace.runtime.contracts.plan import MAX_DRAFTED, StepPlan
from rootlace.runtime.scheduler.counters import Counters
from rootlace.runtime.scheduler.kv import KVStore
from rootlace.runtime.scheduler.pace import PromptPace
from rootlace.runtime.scheduler.plan_builder import PlanBuilder
from rootlace.runtime.scheduler.prediction import MAX_DRAFT
from rootlace.runtime.scheduler.sample_rows import SampleRows
from rootlace.runtime.scheduler.sequence import Sequence

_MARGIN = 1.2
"""A draft is to save so many times what it costs: the cost is known roughly."""
_LEARNT = 0.2
"""How much one more step says of the next."""
_TOKENS_OF_A_STEP = 16
"""So many tokens of a prompt are believed to take as long as a step, while it is not known."""


class Drafting:
    """Decides which rows of a step have a draft, and how long it is.

    A row with a draft of k tokens computes k + 1 and samples behind each of them. What is sampled
    counts as far as each token before it is the one that was drafted, so the output is the one
    without drafts, whatever is drafted.

    *Where it helps.* A token more in a step costs what a token of a prompt has cost of late. One
    that is right saves its row's share of a further step: less, the more rows there are. So where
    many rows share a step, drafts are short, and then there are none.
    """

    def __init__(
        self, kv: KVStore, sample_rows: SampleRows, counters: Counters, pace: PromptPace
    ) -> None:
        self._kv = kv
        self._count = counters
        self._sample_rows = sample_rows
        self._pace = pace
        self._seconds = 0.0
        """Of a step without prompts and drafts; 0 while nothing is known."""
        self._price = 0.0
        """Of a drafted token in the step planned last, as a part of what a right one saves."""

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        rows, samples = plan.num_rows, len(plan.samples)
        if plan.num_tokens > samples or not samples:
            return
        drafted = self._pace.seconds(samples - rows)
        own = max(seconds - drafted, seconds * rows / samples)
        self._seconds += (_LEARNT if self._seconds else 1.0) * (own - self._seconds)

    def plan(
        self, ready: list[Sequence], builder: PlanBuilder, budget: int
    ) -> tuple[list[Sequence], int]:
        """Add the rows of `ready` that have a draft, of at most `budget` tokens in all; returns the
        others, and what is left of the budget. Each of `ready` has room for one token."""
        able = [s for s in ready if s.prediction is not None and not s.pending]
        if not able:
            return ready, budget
        self._price = self._priced(len(ready))
        most = min(MAX_DRAFT, MAX_DRAFTED // len(able))
        drafting = set()
        for sequence in able:
            sequence.waits = False
            count = self._draft(sequence, min(most, budget), builder)
            if count:
                drafting.add(sequence)
                budget -= count
                self._count.drafted_tokens += count
        return [s for s in ready if s not in drafting], budget

    def waits(self, sequence: Sequence) -> bool:
        """Whether the sequence is better not planned ahead: it can be drafted for once its last
        token is known, and that is likely to find more than the token that it misses."""
        prediction = sequence.prediction
        return (
            prediction is not None and prediction.rate > 0.5 and prediction.worth(self._price) > 1
        )

    def close(self, sequence: Sequence) -> None:
        """Count the draft, of which no more can turn out to be right."""
        draft = sequence.draft
        if draft is not None:
            right = draft.agreed(sequence.tokens, sequence.length) - draft.start
            self._count.accepted_tokens += right
            sequence.accepted += right
            sequence.rejected += len(draft.tokens) - right
            sequence.draft = None

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

    def _priced(self, rows: int) -> float:
        token = self._pace.seconds(1)
        known = token and self._seconds
        return _MARGIN * rows * (token / self._seconds if known else 1 / _TOKENS_OF_A_STEP)

    def _draft(self, sequence: Sequence, most: int, builder: PlanBuilder) -> int:
        """Plan the sequence's row with a draft of at most `most` tokens; returns how many."""
        prediction, kv = sequence.prediction, self._kv
        assert prediction is not None
        # A block is left for a prompt that needs one to go on.
        blocks = sequence.table_len + max(kv.pool.available - 1, 0)
        room = blocks * kv.block_size - sequence.computed - 1
        most = min(most, prediction.worth(self._price), sequence.full - sequence.length - 1, room)
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
