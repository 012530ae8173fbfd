"""Speculative drafts: expected tokens, computed in the step of the token before them.

row    last d1 d2 d3        one known token and a draft of 3
samples  s1 s2 s3 s4        s2 counts if s1 == d1, s3 if s2 == d2 too, and so on

Sections: cost of drafts (measured), drafts.
"""

from __future__ import annotations

import hashlib
from weakref import WeakValueDictionary

import msgspec

from rootlace.runtime.cache.suffix_index import IndexedText
from rootlace.runtime.contracts.messages import NO_TOKENS
from rootlace.runtime.contracts.plan import MAX_DRAFTED, StepPlan
from rootlace.runtime.scheduler.batch import PlanBuilder
from rootlace.runtime.scheduler.draft_model import TRIED, ModelSource
from rootlace.runtime.scheduler.drafter import MAX_DRAFT, MODEL, Drafter, PredictedText, Recalled
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.masks import SampleRows
from rootlace.runtime.scheduler.request import Counters, RequestState

# Cost of drafts -----------------------------------------------------------------------------------


_KEPT = 0.9
"""Weight of the older steps beside the next one."""
_DRAFTED_PER_STEP = 16
"""Prior: drafted tokens that take as long as a step."""
_MOST_PER_STEP = 64
"""Upper bound of the prior on drafted tokens per step time."""
_BELIEVED = 0.25
"""Weight of the prior, in steps with a drafted token."""
_LEARNT, _LEARNT_LONGER = 0.2, 0.05
"""Weight of a step without drafts beside earlier steps, and of a step that took longer. Another
request's prefill or work before the step may have slowed the longer one."""
_DRAFTED_STEPS = 24
"""Steps with drafts before one step without drafts is measured."""
_REMEMBERED = 0.99
"""Share of the drafts' measured cost that remains after a step without drafts."""
_HELD_UP = 3.0
"""Upper bound of a step's duration, as a multiple of the expected one."""


class DraftPace:
    """Extra time of drafts in recent steps: a fixed part and a part per draft token.

    A step much slower than expected was delayed by other work, so its time is bounded. A delayed
    step without drafts makes drafts look free. Drafts that look too expensive are not made, so no
    step would correct the estimate: the estimate therefore decays. If every step has drafts, one
    step now and then runs without, to measure its time.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        """Map from number of rows to seconds of a step without drafts."""
        self._drafted_steps = 0
        """Steps since the last one without drafts, or since one was requested."""
        self._sums = [0.0] * 5
        """Decaying sums over steps with drafts: 1, draft tokens, squared draft tokens, extra
        seconds, product. The product is extra seconds times draft tokens."""

    def note(self, rows: int, drafted: int, seconds: float) -> float:
        """Record a step of `rows` rows with `drafted` draft tokens; return actual over expected
        draft cost."""
        if not rows or seconds <= 0:
            return 1.0
        usual = self._steps.get(rows)
        if usual is None:
            usual = seconds * _DRAFTED_PER_STEP / (_DRAFTED_PER_STEP + drafted)
            self._steps[rows] = usual
        if drafted:
            self._drafted_steps += 1
            step, token = self._costs(usual)
            expected = max(step + drafted * token, 1e-9)
            longest = max(expected * _HELD_UP, usual)
            took = min(max(seconds - usual, expected / _HELD_UP), longest)
            seen = (1, drafted, drafted * drafted, took, drafted * took)
            self._sums = [_KEPT * old + new for old, new in zip(self._sums, seen, strict=True)]
            return took / expected
        self._drafted_steps = 0
        learnt = _LEARNT if seconds < usual else _LEARNT_LONGER
        self._steps[rows] += learnt * (min(seconds, _HELD_UP * usual) - usual)
        for at, old in enumerate(self._sums):
            self._sums[at] = _REMEMBERED * old
        return 1.0

    def wants_none(self) -> bool:
        """Return whether the next step should have no drafts, to measure its time.

        True once per request: a step with prefill measures nothing, and drafts must not wait for
        the end of a prefill.
        """
        if self._drafted_steps < _DRAFTED_STEPS:
            return False
        self._drafted_steps = 0
        return True

    def price(self, rows: int) -> tuple[float, float]:
        """Return the fixed cost of drafts, and of one draft token, as parts of a row's share of a
        step."""
        share = self.share(rows)
        if not share:
            return 0.0, rows / _DRAFTED_PER_STEP
        step, token = self._costs(share * rows)
        return step / share, token / share

    def share(self, rows: int) -> float:
        """Return the seconds of a row's share of a step without drafts; 0 before the first
        measurement."""
        if not self._steps:
            return 0.0
        nearest = rows
        if rows not in self._steps:
            nearest = min(self._steps, key=lambda known: abs(known - rows))
        return max(self._steps[nearest], 1e-9) / rows

    def _costs(self, usual: float) -> tuple[float, float]:
        """Return the fixed seconds of drafts, and seconds per token: a line through measurements
        and prior.

        The prior has a fixed cost of 0, since drafts of one length cannot separate the two parts.
        """
        n, d, dd, y, dy = self._sums
        n += _BELIEVED
        dd += _BELIEVED
        dy += _BELIEVED * usual / _DRAFTED_PER_STEP
        least = usual / _MOST_PER_STEP
        token = max((n * dy - d * y) / (n * dd - d * d), least)
        step = (y - token * d) / n
        return (step, token) if step > 0 else (0.0, max(dy / dd, least))


# Drafts -------------------------------------------------------------------------------------------


DOUBT = 0.15
"""Reduction of a draft token's expected saving, in tokens: estimates of right tokens are too high.
"""
_MOST_RESTED = 8
"""Most steps without drafts in a row while drafts are not worth their cost."""
_HOPELESS = 0.9
"""Price, with the doubt, from which hardly any draft is worth its cost. Below this price the next
repetition may be worth a draft."""
_DOUBTFUL = 0.5
"""Price, with the doubt, from which searches in texts must pay for themselves."""
_LOOK = 0.01
"""Cost of a search in texts, in tokens, per row and step."""
_MOST_EARNED = 4.0
"""Most tokens, saved by drafts beyond all costs, that further searches may cost."""
LEARNT_AT_ONCE = 32
"""Number of output tokens that the index takes at a time."""


class Drafting:
    """Policy that chooses the rows with drafts in a step, and the length of each draft.

    A row with a draft of k tokens computes k + 1 tokens and samples behind each. A sample counts as
    long as every token before it equals the draft, so drafts never change the output.

    *When drafts pay.* The cost is measured (`DraftPace`): a fixed part per step with drafts, and a
    part per token. A right token saves its row's share of a step, which shrinks with the number of
    rows. So with many rows drafts get short, then absent. Drafts are also absent if all rows
    together would save less than the fixed part. Following texts costs time too. If drafts are
    possible but not worth their cost, following pauses for ever more steps. It also pauses if two
    things hold: a draft token costs a third of its saving or more, as in a batch of a few rows; and
    drafts saved less of late than following cost.

    *Overlap.* A sequence whose next token is planned ahead has no draft, as its last token is
    unknown. A row with a draft is in no step planned meanwhile. A sequence with a right prediction
    may skip a step to get a draft. Each skipped step counts as a token lost.
    """

    def __init__(
        self,
        kv: KVStore,
        sample_rows: SampleRows,
        counters: Counters,
        model: ModelSource | None = None,
    ) -> None:
        """Make the policy. `model`: the draft model, for rows without a better draft from texts."""
        self._kv = kv
        self._model = model
        self._count = counters
        self._sample_rows = sample_rows
        index = kv.suffixes
        self._recalled = None if index is None else Recalled(index)
        self._texts: WeakValueDictionary[bytes, PredictedText] = WeakValueDictionary()
        """Map from digest to predicted text, shared by requests."""
        self.pace = DraftPace()
        self.requests = 0
        """Count of requests with a prediction."""
        self._fixed = self._price = 0.0
        """Fixed cost of drafts in the step planned last, and cost of a token, as parts of a right
        token's saving."""
        self._times = 1.0
        """Actual over expected cost of the drafts of the last recorded step."""
        self._rests, self._rest = 0, 0
        """Length of the current pause in steps, and steps left of the pause."""
        self._earned = _MOST_EARNED
        """Balance of texts, in tokens: saved by drafts, minus the costs of drafts and searches."""
        self._awaited: RequestState | None = None
        """Sequence that was the last to begin standing by."""
        self._drafters = 0
        """Running sequences that may get drafts, at the last step planned ahead; 0: none is planned
        ahead."""

    def added(self, sequence: RequestState) -> None:
        """Register a request; requests share equal predicted texts."""
        if self._recalled is not None and sequence.max_tokens > 1 and not sequence.held:
            sequence.recalled = self._recalled
        ids = sequence.request.prediction
        if not len(ids):
            return
        # A checked constraint may roll back drafted tokens that were emitted already, so none are
        # drafted.
        if not sequence.held:
            digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
            sequence.predicted = self._texts.setdefault(digest, PredictedText(ids))
            ids = sequence.predicted.ids
            self.requests += 1
            self._rests = self._rest = 0
        prediction = NO_TOKENS if sequence.predicted is None else ids
        sequence.request = msgspec.structs.replace(sequence.request, prediction=prediction)

    def ended(self, sequence: RequestState) -> None:
        """Close the draft of an ended request."""
        self.requests -= sequence.predicted is not None
        if sequence is self._awaited:
            self._awaited = None
        if sequence.draft is not None:
            self.close(sequence)
        recalled, drafter, owner = self._recalled, sequence.drafter, sequence.text_owner
        if recalled is None:
            return
        if owner != sequence.namespace:
            recalled.index.forget(owner)
        elif drafter is not None and drafter.indexed is not None:
            self._learn(sequence, drafter.indexed)
        elif sequence.held and sequence.outputs:  # no rollback can follow any more
            recalled.index.open(owner, sequence.tokens[: sequence.length])

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step that is about to be committed."""
        self._times = 1.0
        tokens, rows = len(plan.token_ids), len(plan.context_len)
        # Otherwise there are no drafts, or the step includes prefill.
        drafting = self.requests or self._recalled is not None or self._model is not None
        if drafting and tokens == len(plan.samples):
            self._times = self.pace.note(rows, tokens - rows, seconds)
            if self._model is not None:
                self._model.pass_time(seconds)

    def plan(
        self, ready: list[RequestState], builder: PlanBuilder, budget: int
    ) -> tuple[list[RequestState], int]:
        """Add the rows of `ready` (at least one) with a draft, of at most `budget` tokens in all.

        Returns the other sequences, and the budget left. Each of `ready` has room for one token.
        """
        for sequence in ready:  # without a draft to follow, waiting would miss steps
            sequence.stands_by = False
        follows = bool(self.requests or self._recalled is not None)
        if self._rest:
            self._rest -= 1
            follows = False
        model = self._model
        if not follows and model is None:
            return ready, budget
        near: list[tuple[RequestState, Drafter]] = []
        for sequence in ready if follows else ():
            drafter = sequence.drafter
            if drafter is not None and drafter.at >= 0 and sequence.full - sequence.length > 1:
                near.append((sequence, drafter))
        # Before the budget is checked: the price decides which sequences skip a step.
        self._fixed, price = self.pace.price(len(ready))
        self._price = price + DOUBT
        if follows:
            self._earned = max(self._earned - _LOOK * len(ready), 0.0)
        # A prediction is probably right soon, with any success of other texts.
        earning = self._price < _DOUBTFUL or self._earned or self.requests
        # Nor is it vain while a sequence waits for its last token to get a draft.
        awaited = self._awaited is not None and self._awaited.stands_by and self._awaited.pending
        vain = not awaited and (self._price > _HOPELESS or not earning)
        if follows and not near and vain:  # a search is not worth its cost either
            self._pause()
        if not (near or model) or self.pace.wants_none():
            return ready, budget
        wanted = self._wanted(ready, near)
        if not wanted:
            if follows and (self._recalled is None or vain):
                self._pause()
            return ready, budget
        self._rests = 0
        max_draft = min(MAX_DRAFT, MAX_DRAFTED // len(wanted))
        self._sample_rows.masks.begin_drafts()
        rows: list[tuple[RequestState, int]] = []
        for sequence, (count, by_model) in wanted.items():
            count = self._fitting(sequence, min(count, max_draft, budget))
            if count < 1:
                continue
            if by_model:
                self._kv.grow(sequence, count + 1, builder)
                rows.append((sequence, count))
            else:
                drafter = sequence.drafter
                assert drafter is not None
                count = self._begin(sequence, drafter.draft(count), drafter.source, builder)
            budget -= count
        if model is not None and rows:
            for (sequence, count), draft in zip(rows, model.draft(rows), strict=True):
                written = [*draft]
                begun = self._begin(sequence, draft, MODEL, builder)
                budget += count - begun
                self._give_back(sequence)
                if begun < len(written) and written[begun] not in sequence.stops:
                    model.settled(sequence, 0, 1)  # refused by the constraint
        drafting = {sequence for sequence in wanted if sequence.draft is not None}
        for sequence in drafting:
            assert sequence.draft is not None
            sequence.draft.cost += self._fixed / len(drafting)
        return [s for s in ready if s not in drafting] if drafting else ready, budget

    def launched(self, running: list[RequestState]) -> None:
        """Record a launched step, missed by sequences that skip the step with a pending token."""
        self._drafters = 0
        for sequence in running:
            drafter = sequence.drafter
            if drafter is not None:
                self._drafters += 1
                drafter.missed += sequence.stands_by and sequence.pending > 0

    def close(self, sequence: RequestState) -> None:
        """Count the right tokens of the draft; their number is final."""
        draft, right = sequence.draft, sequence.close_draft()
        assert draft is not None
        self._count.accepted[draft.source] += right
        if draft.source == MODEL:
            sequence.stands_by = False
            if self._model is not None:
                self._model.settled(sequence, right, draft.planned)
        elif sequence.drafter is not None:
            cost = draft.cost * self._times
            sequence.drafter.drafted(right, cost)
            self._earned = min(max(self._earned + right - cost, 0.0), _MOST_EARNED)

    def settle(self, sequence: RequestState) -> None:
        """Take in the tokens sampled behind draft tokens; drop the computed draft behind a
        difference."""
        draft, drafter = sequence.draft, sequence.drafter
        if draft is not None:
            right = draft.agreed(sequence.tokens, sequence.length)
            if right == sequence.length:
                sequence.pending = sequence.computed + 1 - right
                return
            self.close(sequence)
            sequence.drop_pending()
            if sequence.computed > (end := min(right, sequence.length - 1)):
                self._kv.rewind(sequence, end)
        if drafter is not None and sequence.length >= drafter.until and not self._rest:
            drafter.follow(sequence.tokens, sequence.length)
            sequence.stands_by = self._drafters > 0 and self._should_stand_by(drafter)
            if sequence.stands_by:
                self._awaited = sequence
            indexed, number = drafter.indexed, sequence.number
            # Each row at another step: all rows of a batch at once would hold the step up.
            if indexed is not None and (sequence.length + number) // LEARNT_AT_ONCE > (
                (indexed.known + number) // LEARNT_AT_ONCE
            ):
                self._learn(sequence, indexed)
                if not indexed.number:
                    drafter.indexed = None

    # ------------------------------------------------------------ inside

    def _pause(self) -> None:
        self._rests = self._rest = min(2 * self._rests + 1, _MOST_RESTED)

    def _learn(self, sequence: RequestState, indexed: IndexedText) -> None:
        assert self._recalled is not None
        self._recalled.index.learn(indexed, sequence.tokens[indexed.known : sequence.length])

    def _should_stand_by(self, drafter: Drafter) -> bool:
        """Return whether to skip a step, to get a draft once the last token is known. True if the
        expected saving exceeds the skipped token."""
        saves = drafter.worth(self._price)[1] if drafter.sure else 0.0
        return saves - self._fixed / self._drafters > 1

    def _wanted(
        self, ready: list[RequestState], near: list[tuple[RequestState, Drafter]]
    ) -> dict[RequestState, tuple[int, bool]]:
        """Return the lengths of drafts worth their cost, and whether the draft model makes each.

        Each row takes the source that saves more: texts or draft model. A row with a pending last
        token gets no draft, since the tokens before the draft are unknown.
        """
        best: dict[RequestState, tuple[int, float, bool]] = {}
        for sequence, drafter in near:
            if sequence.pending:
                continue
            count, saves = drafter.worth(self._price)
            if count:
                best[sequence] = count, saves, False
        model, share = self._model, self.pace.share(len(ready))
        others = model.ready(ready) if model is not None and share else []
        for sequence in others:
            assert model is not None
            count, saves = model.worth(sequence, len(others), self._price, share)
            if count and (sequence not in best or saves > best[sequence][1]):
                best[sequence] = count, saves, True
        lost = self._fixed - sum(saves for _, saves, _ in best.values())
        # Other programs may inflate a fixed cost; another step then shows a smaller one.
        tries = model is not None and bool(best) and model.affords(lost * share)
        if lost < 0 or tries:
            return {sequence: (count, by) for sequence, (count, _, by) in best.items()}
        tried = None if model is None else model.trial(others, self._price, share)
        return {} if tried is None else {tried: (TRIED, True)}

    def _fitting(self, sequence: RequestState, count: int) -> int:
        """Return how many of `count` draft tokens fit for the sequence."""
        kv = self._kv
        # A block is left for a prefill that needs one to go on.
        blocks = sequence.table_len + max(kv.pool.available - 1, 0)
        free = blocks * kv.block_size - sequence.computed - 1
        return min(count, sequence.full - sequence.length - 1, free)

    def _begin(
        self, sequence: RequestState, draft: list[int], source: int, builder: PlanBuilder
    ) -> int:
        """Plan as much of a draft for the sequence as stop tokens and its constraint allow; return
        the length."""
        for at, token in enumerate(draft):
            if token in sequence.stops:
                del draft[at:]
                break
        constraints = self._sample_rows.along(sequence, draft) if draft else []
        count = len(constraints) - 1
        if count < 1:
            return 0
        del draft[count:]
        sequence.begin_draft(draft, self._price * count, source)
        self._kv.grow(sequence, count + 1, builder)
        builder.add_draft(sequence, constraints)
        sequence.computed += count + 1
        self._count.drafted[source] += count
        return count

    def _give_back(self, sequence: RequestState) -> None:
        """Drop blocks that were reserved for a longer draft. The next token keeps its own block."""
        kv, computed = self._kv, sequence.computed
        used = computed if sequence.draft is not None else computed + 1
        if sequence.table_len > kv.blocks_for(used):
            kv.rewind(sequence, used)
            sequence.computed = computed
