"""Admission: running and preempted requests, prefill chunks, and limits.

 Limits (refuse) -> queue -> Prefill (admit, chunk) -> RunningSet (decode)
                                ^                         |
                                +-- preempt, rollback ----+

Sections: running set, prefill, limits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from rootlace.runtime.cache.radix_tree import common_prefix
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.scheduler.batch import DepthFirst, PlanBuilder
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.offload.fetching import MOST_FETCHES
from rootlace.runtime.scheduler.pacing import BY_ORDER, PromptPace, StepBudget, Turns
from rootlace.runtime.scheduler.queue import WaitingQueue, first_victim
from rootlace.runtime.scheduler.request import Counters, Ending, InFlightStep, RequestState
from rootlace.wire.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    PinRefused,
)
from rootlace.wire.protocol import CacheReport


@dataclass(frozen=True)
class Headroom:
    """Bounds of `reserve` in tokens, and the factor by which `reserve` shrinks per step."""

    least: float = 8.0
    most: float = 4096.0
    decay: float = 0.998


class RunningSet:
    """Running and preempted requests, both in order of first admission.

    *Headroom.* Each running request is promised the blocks of its remaining prompt and next
    outputs. `reserve` limits these outputs, and so does the request's own maximum. Admission
    requires that the available blocks cover all promises and the new request's. With nothing
    running, admission always succeeds. `reserve` doubles with every preemption and shrinks by 0.2 %
    per step, between 8 and 4096 tokens (`Headroom`). So preemptions stay rare although output
    lengths are unknown.

    *Preemption.* See `queue.first_victim`. The oldest request is never preempted.
    """

    def __init__(self, kv: KVStore, headroom: Headroom) -> None:
        self._kv = kv
        self.headroom = headroom
        self.sequences: list[RequestState] = []
        self.preempted: list[RequestState] = []
        self.preemptions = 0
        self.reserve = headroom.least
        self.prefilling = False
        """Whether a running sequence still had prompt to compute at the last `secure`."""
        self.ordered: DepthFirst | None = None
        """The running sequences in depth-first order; None once the order may have changed."""
        self._admissions = 0

    # ------------------------------------------------------------ coming and going

    def admit(self, sequence: RequestState) -> None:
        """Start a new or a preempted `sequence`."""
        if sequence.order < 0:
            sequence.order = self._admissions
            self._admissions += 1
            sequence.admitted()
        else:
            self.preempted.remove(sequence)
        self._kv.attach(sequence)
        insort(self.sequences, sequence, key=BY_ORDER)
        self.ordered = None

    def remove(self, sequence: RequestState) -> None:
        """End `sequence`, running or preempted; its computed tokens stay cached."""
        if sequence in self.preempted:
            self.preempted.remove(sequence)
            return
        self.sequences.remove(sequence)
        self._kv.release(sequence)
        self.ordered = None

    def preempt(self, sequence: RequestState) -> None:
        """Release the blocks of `sequence` and queue it before any new request."""
        self.remove(sequence)
        insort(self.preempted, sequence, key=BY_ORDER)
        self.preemptions += 1
        self.reserve = min(2 * self.reserve, self.headroom.most)

    def stand_back(self, alone: RequestState, max_rows: int) -> None:
        """Stop running requests so that `alone` can be computed alone: those that do not decode,
        and all if there is no room beside them, in blocks or among `max_rows`."""
        others = [one for one in self.sequences if one is not alone]
        room = alone in self.sequences or self.fits(alone, self.promises())
        for sequence in others:
            if not (room and sequence.decoding and len(others) < max_rows):
                self.remove(sequence)
                insort(self.preempted, sequence, key=BY_ORDER)

    def rollback(self, sequence: RequestState, length: int) -> None:
        """Drop the tokens of `sequence` behind `length` and queue it before any new request.

        The computed tokens are in the tree by then, so that little is computed again.
        """
        self.remove(sequence)
        sequence.shorten(length)
        insort(self.preempted, sequence, key=BY_ORDER)

    def forget(self, sequence: RequestState) -> None:
        """End `sequence` after all KV was lost."""
        (self.preempted if sequence in self.preempted else self.sequences).remove(sequence)

    def restart(self) -> None:
        """Make every running sequence compute its tokens again after all KV was lost."""
        for sequence in self.sequences:
            sequence.forget_kv()
            insort(self.preempted, sequence, key=BY_ORDER)
        self.sequences = []
        self.ordered = None

    # ------------------------------------------------------------ blocks

    def secure(
        self,
        alone: RequestState | None = None,
        *,
        others: bool = False,
        may_preempt: bool = True,
        turns: Turns | None = None,
        waiting: bool = False,
    ) -> list[RequestState] | None:
        """Give every sequence of the next decode step a slot for its next token; return these
        sequences. If `alone` is given, no other sequence is in the step, or with `others` it is
        not. With `turns`, only those are whose turn it is; `waiting`: others wait for admission.

        Preempt sequences where slots are missing; return None if `may_preempt` forbids that.
        Excluded are sequences whose pending token is the last, and sequences that wait for pending
        tokens. If the oldest sequence is still in prefill, one more block is left for it.
        """
        size = self._kv.block_size
        if alone is not None and not others:
            turns = None
        while True:
            ready: list[RequestState] = []
            self.prefilling = False
            for s in self.sequences:
                if not s.decoding:
                    self.prefilling = True
                elif alone is not None and others is (s is alone):
                    continue
                elif s.ending is None and (
                    not s.pending or (s.length + s.pending < s.full and not s.stands_by)
                ):
                    ready.append(s)
            if not self.sequences:
                return ready
            if turns is not None:
                prompts = self.prefilling or bool(self.preempted) or waiting
                ready = turns.part(ready, prompts)
            growing = [s for s in ready if s.computed == s.table_len * size]
            oldest = self.sequences[0]
            stuck = not oldest.decoding and oldest.table_len * size <= oldest.computed
            if not growing and not stuck:
                break
            if self._kv.make_room(len(growing) + stuck, growing[0] if growing else oldest):
                if growing:
                    self._kv.extend(growing)
                break
            if not may_preempt:
                return None
            victim = first_victim(self.sequences)
            if victim is not None:
                self.preempt(victim)
            elif oldest.node is not None:
                self._kv.isolate(oldest)
                self.ordered = None
            else:
                raise RuntimeError(f"{oldest} holds all blocks and wants more")  # see max_length
        if turns is None or not ready:
            return ready
        turns.last = ready[-1].order
        return sorted(ready, key=BY_ORDER)

    # ------------------------------------------------------------ headroom

    def _ahead(self, sequence: RequestState) -> int:
        """The length up to which `sequence` is promised blocks."""
        outputs = 0 if sequence.ending is not None else sequence.max_tokens - sequence.outputs
        return sequence.target() + min(outputs, int(self.reserve))

    def promise(self, sequence: RequestState) -> int:
        """Blocks promised to a running sequence and not allocated yet."""
        return max(self._kv.blocks_for(self._ahead(sequence)) - sequence.table_len, 0)

    def promises(self) -> int:
        """Blocks promised to all running sequences. O(running)."""
        return sum(map(self.promise, self.sequences))

    def fits(self, sequence: RequestState, promises: int) -> bool:
        """Whether `sequence` may be admitted beside the `promises` to running sequences."""
        return self.wanted(sequence) + promises <= self._kv.pool.available

    def wanted(self, sequence: RequestState) -> int:
        """Blocks that admitting a waiting sequence would take."""
        return self._kv.cost(sequence, self._ahead(sequence))


# Prefill ------------------------------------------------------------------------------------------


_LANES = 2
"""Prompts that may be cut at a time, where steps are short; those that one step ends go beside
these, and one that is shorter than the longest rest."""
_SPARE_ROWS = 16
"""One of so many rows is kept for clients that have no row."""
MOST_LOOKED_AT = 64
"""Waiting requests that a step passes over; to look at thousands would take longer than it."""


class Prefill:
    """Chooses the prefill chunks that fill the budget left by decode rows.

    The order is: sequences in prefill by admission, preempted sequences, waiting sequences. A chunk
    cut by blocks or budget ends the phase. The next sequence might need the tokens behind the cut
    and would compute them a second time.

    Where steps are bounded in time, a long prompt takes many, so it shares them: each of the
    sequences in prefill gets an equal part, and so do all others together. These others are those
    that one step ends, and few of other clients that will be cut, too. Whoever needs the tokens
    behind a cut waits for them.
    """

    def __init__(
        self,
        kv: KVStore,
        running: RunningSet,
        waiting: WaitingQueue,
        flights: deque[InFlightStep],
        counters: Counters,
        *,
        max_rows: int,
        clock: Callable[[], float],
        pace: PromptPace,
        complete: Callable[[RequestState], None],
        longest: Callable[[RequestState], int],
    ) -> None:
        """`flights`: planned steps without a commit.

        `complete` ends an admitted sequence that needs no computation. `longest`: see
        `Retention.check_pin`.
        """
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

    def plan(
        self, builder: PlanBuilder, budget: StepBudget, alone: RequestState | None = None
    ) -> None:
        """Add chunks within `budget`; if `alone` is given, admit no other sequence."""
        running = self._running
        begun: list[RequestState] = []
        for one in running.sequences if running.prefilling else ():
            if not one.decoding and (alone is None or one is alone):
                begun.append(one)
        may_admit = running.preempted or self._waiting.count
        if not may_admit or alone in running.sequences:
            self._go_on(begun, budget, builder)
            return
        if not begun or budget.cost is None:
            if not begun or self._go_on(begun, budget, builder):
                self._admit(builder, budget, alone, [])
            return
        long = [
            one
            for one in begun
            if one.target() - one.computed > budget.room(one, one.computed) // (len(begun) + 1)
        ]
        if self._go_on([one for one in begun if one not in long], budget, builder):
            part = budget.split(len(long) + 1)
            self._admit(builder, part, alone, long)
            budget.give_back(part)
            self._go_on(long, budget, builder)

    def _go_on(self, begun: list[RequestState], budget: StepBudget, builder: PlanBuilder) -> bool:
        """Plan chunks of sequences in prefill; return whether others may follow.

        Where steps are bounded in time, they share the budget.
        """
        for at, sequence in enumerate(begun):
            if not budget.open or sequence.finished:
                continue
            parts = 1 if budget.cost is None else len(begun) - at
            part = budget if parts == 1 else budget.split(parts)
            room = self._chunk(sequence, part, builder)
            if parts > 1:
                budget.give_back(part)
            if not room:
                return False
        return budget.open

    def _admit(
        self,
        builder: PlanBuilder,
        budget: StepBudget,
        alone: RequestState | None,
        long: list[RequestState],
    ) -> None:
        """Admit sequences until budget, rows or blocks run out; `long` ones are in prefill.

        Later ones are admitted while others are deferred: sequences whose blocks are being read,
        with their room reserved, and those of which `_waits` says so.
        """
        if self._waiting.count > 1:
            self._waiting.refresh()
        deferred: list[RequestState] = []
        running, preempted = self._running, self._running.preempted
        promises = running.promises()
        while budget.open and len(running.sequences) < self._max_rows:
            following, newcomer = alone or (preempted[0] if preempted else None), False
            if following is None:
                following, newcomer = self._peek(budget)
            if following is None:
                break
            beside = running.sequences or promises  # otherwise there is always room
            if beside and not running.fits(following, promises):
                break
            if following.order >= 0 and self._awaits(following):
                break
            bounded = budget.cost is not None and alone is None and running.sequences
            if bounded and self._waits(following, budget, long):
                if newcomer or following.order >= 0 or len(deferred) >= MOST_LOOKED_AT:
                    break
                if len(deferred) >= MOST_FETCHES:
                    self._waiting.hold(following)
                else:
                    self._waiting.defer(following)
                deferred.append(following)
                continue
            tiering = self._kv.tiering
            if tiering.active and tiering.fetching.holds_back(following):
                if alone is not None or following.order >= 0 or len(deferred) >= MOST_FETCHES:
                    break
                self._waiting.defer(following)
                deferred.append(following)
                promises += running.wanted(following)
                continue
            if following.order < 0:
                self._waiting.take(following, in_turn=not newcomer)
                following.newcomer = newcomer
                following.queued = self._clock() - following.arrived
            running.admit(following)
            room = self._chunk(following, budget, builder)
            if tiering.active:
                tiering.let_go(following)
            if alone is not None or not room:
                break
            if not (following.decoding or following.finished):  # cut
                break
            if not preempted and not self._waiting.count:
                break
            if not following.finished:
                promises += running.promise(following)
        if deferred:
            self._waiting.restore(deferred)

    def _peek(self, budget: StepBudget) -> tuple[RequestState | None, bool]:
        """The waiting request to admit next, and whether it gets a row that is kept for newcomers.

        Where steps are bounded in time, the last rows are kept for clients that have no row: half
        of them for connections, the others for keys and addresses. As many fewer are kept as
        clients have such a row alone.
        """
        running = self._running.sequences
        kept = spare = self._max_rows // _SPARE_ROWS
        free = self._max_rows - len(running)
        if free <= kept:
            had = {one.place for one in running if not one.newcomer}
            kept -= len({one.place for one in running if one.newcomer} - had)
        if budget.cost is None or free > kept:
            return self._waiting.peek(), False
        levels = 3 if kept > spare // 2 else 1
        return self._waiting.peek_beside({one.place[:levels] for one in running}, levels), True

    def _waits(self, following: RequestState, budget: StepBudget, long: list[RequestState]) -> bool:
        """Whether `following` should let others go first, where steps are bounded in time."""
        if not long:
            return False
        start = following.computed if following.order >= 0 else self._kv.estimate(following)
        for one in long:
            if one.namespace == following.namespace:
                limit = min(following.match_limit(), one.length)
                shared = common_prefix(following.tokens[:limit], one.tokens[:limit])
                if shared > max(one.computed, start):
                    return True
        rest = following.target() - start
        if rest <= budget.room(following, start):
            return False
        if any(one.place == following.place for one in long):
            return True
        if len(long) < _LANES:
            return False
        return len(long) > _LANES or rest > max(one.target() - one.computed for one in long)

    def _chunk(self, sequence: RequestState, budget: StepBudget, builder: PlanBuilder) -> bool:
        """Plan tokens of `sequence` within `budget`; False if blocks are lacking."""
        forced = sequence.jumped
        if sequence.request.report and sequence.report is None:
            self._explain(sequence)
        if not forced:  # of which the prompt is computed
            if self._kv.rematch(sequence):
                self._running.ordered = None
            self._count.cached_tokens += sequence.count_prompt(cached=True)
        target = sequence.target()
        wanted = target - sequence.computed
        if not wanted:  # every token is cached
            if not self._awaits(sequence) and self._may_pin(sequence, 0):
                self.pin(sequence)
                self._complete(sequence)
            return True
        within = budget.room(sequence, sequence.computed)
        room = self._kv.room(sequence)
        count = min(wanted, within, room)
        if count <= 0:
            return False
        if not sequence.pinned and not self._may_pin(sequence, count):
            return True
        self._kv.grow(sequence, count, builder)
        end = sequence.computed + count
        complete = end == target
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
        if forced:
            sequence.jumped = not complete
        else:
            self._kv.store(sequence, builder)
            if not sequence.pinned:
                self.pin(sequence)
            if complete and self._waiting.count:
                self._waiting.computed(sequence)
            self._running.ordered = None
            sequence.count_prompt(cached=False)
        self._count.computed_tokens += count
        budget.spend(end - count, count, max(scores[1] - scores[0], 0))
        return complete or count < room

    def pin(self, sequence: RequestState) -> None:
        """Pin the prompt of `sequence`, if requested and the whole prompt is in the tree."""
        if not sequence.pinned and sequence.tree_len >= sequence.prompt_len:
            sequence.pinned = True
            self._kv.retention.pin(sequence)

    def _may_pin(self, sequence: RequestState, count: int) -> bool:
        """Whether the prompt can be pinned if `count` more tokens complete it.

        A pin can become impossible after the request was accepted; the request then ends.
        """
        if sequence.pinned or sequence.computed + count < sequence.prompt_len:
            return True
        try:
            self._kv.retention.check_pin(sequence, self._longest(sequence))
        except PinRefused as error:
            sequence.ending = Ending("error", code=error.code, error=str(error))
            self._complete(sequence)
            return False
        return True

    def _explain(self, sequence: RequestState) -> None:
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

    def _awaits(self, sequence: RequestState) -> bool:
        """Whether planned steps still return something for `sequence`."""
        return bool(sequence.pending) or any(flight.awaits(sequence) for flight in self._flights)


# Limits -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Which requests the engine can serve at all.

    `capacity`: tokens the KV pool holds. `vocab_size`: 0 allows any token id. `labels`, `adapters`:
    see `Ready`. `pinned`: tokens of the pool that are unavailable now, which no error tells: the
    pins are of all clients.
    """

    context_length: int
    capacity: int
    vocab_size: int
    labels: int | None = None
    adapters: tuple[str, ...] = ()
    pinned: int = 0
    max_length: int = field(init=False)
    """Maximum length of a sequence; the last token needs no KV, as no token attends to it."""

    def __post_init__(self) -> None:
        free = self.capacity - self.pinned
        object.__setattr__(self, "max_length", min(self.context_length, free + 1))

    def beside(self, pinned: int) -> Limits:
        """The limits while `pinned` more tokens of the pool are unavailable."""
        return replace(self, pinned=self.pinned + pinned) if pinned else self

    def longest(self, request: EngineRequest, block_size: int) -> int:
        """Maximum length of a checked `request`.

        A pinned prompt that ends within a block needs room for a copy of that block: the pin holds
        the tree's block.
        """
        prompt = len(request.token_ids)
        if not request.handling.cache.pin or not prompt % block_size:
            return self.max_length
        return max(self.beside(block_size).max_length, prompt + len(request.output_ids) + 1)

    def check(self, request: EngineRequest, *, constrained: bool) -> None:
        """Check a request against the limits.

        Raises InvalidRequest, or ContextLengthExceeded if not even one token fits.
        """
        params = request.params
        if not len(request.token_ids):
            raise InvalidRequest("the prompt is empty")
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens must be a number here")
        # The model has to support the request's kind of output.
        if request.pooling == "none":
            if self.labels is not None:
                head = f"its head scores {self.labels} labels" if self.labels else "it has no head"
                raise InvalidRequest(f"this model does not generate text: {head}")
        elif params.max_tokens or params.prompt_logprobs_from is not None:
            raise InvalidRequest("a request for a vector neither samples nor scores tokens")
        elif request.pooling == "labels" and not self.labels:
            raise InvalidRequest("this model has no head that scores labels")
        for name, ids in (
            ("prompt", request.token_ids),
            ("output", request.output_ids),
            ("prediction", request.prediction),
        ):
            # A single bad id would make the executor fail the whole step.
            bad = len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size)
            if bad and self.vocab_size:
                raise InvalidRequest(f"the {name} has ids outside 0..{self.vocab_size - 1}")
        if constrained and not self.vocab_size:
            raise InvalidRequest("constrained requests need a scheduler that knows vocab_size")
        outputs = len(request.output_ids)
        length = len(request.token_ids) + outputs
        window = self.context_length - int(outputs < params.max_tokens)
        room = min(window, self.capacity)
        if length > room:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens; at most {room} fit into the context window and "
                f"the KV cache ({self.capacity} tokens)"
            )
        if length > self.capacity - self.pinned:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens, for which the KV cache ({self.capacity} tokens) "
                "has no room beside the pinned prompts"
            )

    def adapter(self, request: EngineRequest) -> int:
        """Index of the request's adapter. Raises InvalidRequest."""
        if request.adapter not in self.adapters:
            known = f"there are {', '.join(self.adapters)}" if self.adapters else "there are none"
            raise InvalidRequest(f"the adapter {request.adapter!r} is not loaded: {known}")
        return self.adapters.index(request.adapter)
