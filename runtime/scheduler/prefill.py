"""Which chunks of prompts a step computes, and who is admitted for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from rootlace.runtime.scheduler.counters import Counters
from rootlace.runtime.scheduler.flight import Flight
from rootlace.runtime.scheduler.kv import KVStore
from rootlace.runtime.scheduler.pace import PromptPace
from rootlace.runtime.scheduler.plan_builder import PlanBuilder
from rootlace.runtime.scheduler.priorities import PriorityQueues
from rootlace.runtime.scheduler.running import RunningSet
from rootlace.runtime.scheduler.sequence import Ending, Sequence
from rootlace.runtime.scheduler.tiers.fetching import MOST_FETCHES
from rootlace.wire.cache_report import CacheReport
from rootlace.wire.errors import PinRefused


class Prefill:
    """Fills what decode rows leave of a step's budget.

    Sequences in prefill go first, in order of admission; then retracted ones; then those that wait.
    A chunk that is cut ends the phase, by blocks or by budget: whoever comes next might need the
    very tokens behind the cut, and would compute them a second time.
    """

    def __init__(
        self,
        kv: KVStore,
        running: RunningSet,
        waiting: PriorityQueues,
        flights: deque[Flight],
        counters: Counters,
        *,
        max_rows: int,
        clock: Callable[[], float],
        pace: PromptPace,
        complete: Callable[[Sequence], None],
        longest: Callable[[Sequence], int],
    ) -> None:
        """`flights` are the steps under way. `complete` is told of an admitted sequence that ends
        without computing anything. `longest`: see `Retention.check_pin`."""
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._flights = flights
        self._count = counters
        self._max_rows = max_rows
        self._clock = clock
        self._pace = pace
        self._complete = complete
        self._longest = longest

    def plan(self, builder: PlanBuilder, budget: int, alone: Sequence | None = None) -> None:
        """Add chunks of at most `budget` tokens in all; nobody but `alone` is admitted."""
        running, retracted = self._running, self._running.retracted
        for sequence in list(running.sequences):
            if budget and not sequence.decoding:
                budget -= self._chunk(sequence, budget, builder)
        if not budget or not (retracted or len(self._waiting)) or alone in running.sequences:
            return
        self._waiting.refresh()
        aside: list[Sequence] = []
        self._admit(builder, budget, alone, aside)
        for sequence in aside:
            self._waiting.bring_back(sequence)

    def _admit(
        self, builder: PlanBuilder, budget: int, alone: Sequence | None, aside: list[Sequence]
    ) -> None:
        """Whose blocks are being read is put `aside`, with the room that it will need, and others
        are admitted meanwhile."""
        running, retracted = self._running, self._running.retracted
        promises = running.promises()
        while budget and len(running.sequences) < self._max_rows:
            following = alone or (retracted[0] if retracted else self._waiting.peek())
            if following is None:
                running.most = running.most if aside else None
                return
            if not running.fits(following, promises):
                running.most = len(running.sequences)
                return
            if following.order >= 0 and self._awaits(following):
                return
            if alone is None and self._kv.tiering.fetching.holds_back(following):
                if following.order >= 0 or len(aside) == MOST_FETCHES:
                    return
                self._waiting.set_aside(following)
                aside.append(following)
                promises += running.wanted(following)
                continue
            if following.order < 0:
                self._waiting.take(following)
                following.queued = self._clock() - following.arrived
            running.admit(following)
            budget -= self._chunk(following, budget, builder)
            self._kv.tiering.let_go(following)
            if alone is not None:
                return
            if not following.finished:
                promises += running.promise(following)

    def _chunk(self, sequence: Sequence, budget: int, builder: PlanBuilder) -> int:
        """Plan up to `budget` tokens of `sequence`; returns what it took of the budget (all of it
        if blocks ran out)."""
        own = sequence.jumped
        if sequence.request.report and sequence.report is None:
            self._explain(sequence)
        if not own and self._kv.rematch(sequence):
            self._running.moved()
        self._count.cached_tokens += sequence.count_prompt(cached=True)
        wanted = sequence.target() - sequence.computed
        if not wanted:  # nothing has to be computed
            if not self._awaits(sequence) and self._may_pin(sequence, 0):
                self.pin(sequence)
                self._complete(sequence)
            return 0
        count = min(wanted, budget, self._kv.room(sequence))
        if count <= 0:
            return budget
        if not self._may_pin(sequence, count):
            return 0
        self._kv.grow(sequence, count, builder)
        end = sequence.computed + count
        complete = end == sequence.target()
        scores = (
            max(sequence.score_next, sequence.computed + 1),
            min(end + 1, sequence.score_stop),
        )
        pool = sequence.pool
        pooled = (0, 0) if pool is None else pool.plan(sequence.computed, end)
        builder.add_chunk(sequence, count, complete=complete, scores=scores, pooled=pooled)
        sequence.score_next = max(scores)
        sequence.computed = end
        sequence.decoding = complete
        if own:
            sequence.jumped = not complete
        else:
            self._kv.store(sequence, builder)
            self.pin(sequence)
            if complete:
                self._waiting.computed(sequence)
            self._running.moved()
        sequence.count_prompt(cached=False)
        self._count.computed_tokens += count
        return count if complete else budget

    def pin(self, sequence: Sequence) -> None:
        """Pin the sequence's prompt, if that is asked for and all of it is in the tree."""
        if not sequence.pinned and sequence.tree_len >= sequence.prompt_len:
            sequence.pinned = True
            self._kv.retention.pin(sequence)

    def _may_pin(self, sequence: Sequence, count: int) -> bool:
        """Whether the prompt can be pinned, should `count` tokens more complete it. If not, which
        was not to be seen when the request came, the request ends."""
        if sequence.pinned or sequence.computed + count < sequence.prompt_len:
            return True
        try:
            self._kv.retention.check_pin(sequence, self._longest(sequence))
        except PinRefused as error:
            sequence.ending = Ending("error", code=error.code, error=str(error))
            self._complete(sequence)
            return False
        return True

    def _explain(self, sequence: Sequence) -> None:
        scope = sequence.request.report
        assert scope
        last = sequence.prompt_len - 1
        limit = min(sequence.match_limit(), sequence.prompt_len)
        report = self._kv.explain(sequence.namespace, sequence.tokens, limit, scope)
        if report.reason == "whole" and limit < last:
            report = CacheReport(report.matched, last, "scored")
        saved = self._pace.seconds(report.matched)
        restored = min(sequence.restored, report.matched)
        sequence.report = msgspec.structs.replace(report, saved_seconds=saved, from_disk=restored)

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether steps under way find something for `sequence`."""
        return bool(sequence.pending) or any(flight.awaits(sequence) for flight in self._flights)
