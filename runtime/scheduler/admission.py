"""The sequences that have KV, and what happens when there are not enough blocks for them."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import msgspec

from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.scheduler.batch import PlanBuilder
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.offload.fetching import MOST_FETCHES
from rootlace.runtime.scheduler.pacing import PromptPace, ServicePace
from rootlace.runtime.scheduler.queue import PriorityQueues, PromptWork
from rootlace.runtime.scheduler.request import Counters, Ending, InFlightStep, RequestState
from rootlace.runtime.scheduler.rows import DepthFirst, depth_first
from rootlace.wire.errors import (
    ContextLengthExceeded,
    DeadlineImpossible,
    InvalidRequest,
    PinRefused,
)
from rootlace.wire.protocol import CacheReport


@dataclass(frozen=True)
class Headroom:
    """Bounds of `reserve` in tokens, and the factor by which it shrinks per step."""

    least: float = 8.0
    most: float = 4096.0
    decay: float = 0.998


def by_order(sequence: RequestState) -> int:
    return sequence.order


class RunningSet:
    """Running and retracted sequences, both in order of first admission.

    *Headroom.* Every running sequence is promised the blocks of its remaining prompt and of its
    next `reserve` output tokens (fewer if it may not generate as many). A request is admitted if
    the available blocks cover those promises and the same for itself; with nothing running it
    always is. `reserve` doubles with every retraction and shrinks by 0.2 % per step, between 8 and
    4096 tokens (`Headroom`): so retractions stay rare without knowing how long outputs get.

    *Retraction.* The victim is, among those of the lowest priority, the sequence that would have to
    compute the fewest tokens again if all it does not share with other running ones were evicted;
    of equals the youngest. Never the oldest.
    """

    def __init__(self, kv: KVStore, headroom: Headroom) -> None:
        self._kv = kv
        self._headroom = headroom
        self.sequences: list[RequestState] = []
        self.retracted: list[RequestState] = []
        self.retractions = 0
        self.reserve = headroom.least
        self.most: int | None = None
        """How many ran when there was no room for more; None if there was for all who waited."""
        self._ordered: DepthFirst | None = None
        self._admissions = 0

    # ------------------------------------------------------------ coming and going

    def admit(self, sequence: RequestState) -> None:
        """Start `sequence`, or start it again if it was retracted."""
        if sequence.order < 0:
            sequence.order = self._admissions
            self._admissions += 1
            sequence.admitted()
        else:
            self.retracted.remove(sequence)
        self._kv.attach(sequence)
        insort(self.sequences, sequence, key=by_order)
        self._ordered = None

    def remove(self, sequence: RequestState) -> None:
        """`sequence` ends, running or retracted; what it computed stays cached."""
        if sequence in self.retracted:
            self.retracted.remove(sequence)
        else:
            self.leave(sequence)

    def leave(self, sequence: RequestState) -> None:
        """`sequence` stops running; what it computed stays cached."""
        self.sequences.remove(sequence)
        self._kv.release(sequence)
        self._ordered = None

    def retract(self, sequence: RequestState) -> None:
        """Take the sequence's blocks; it is admitted again before any new request."""
        self.leave(sequence)
        insort(self.retracted, sequence, key=by_order)
        self.retractions += 1
        self.reserve = min(2 * self.reserve, self._headroom.most)

    def stand_back(self, alone: RequestState) -> None:
        """All others stop running for a while, so that `alone` is computed alone."""
        for sequence in [one for one in self.sequences if one is not alone]:
            self.leave(sequence)
            insort(self.retracted, sequence, key=by_order)

    def jumped(self, sequence: RequestState) -> None:
        """Tokens were appended to a decoding sequence that are to be computed as a chunk.

        A few of them stay the sequence's own, as those that it decodes: to share them with others
        that come to the same costs more than computing them.
        """
        sequence.decoding = False
        sequence.jumped = sequence.length - sequence.computed <= self._kv.block_size
        if not sequence.jumped:
            self._kv.store(sequence)
            self._ordered = None

    def retreat(self, sequence: RequestState, length: int) -> None:
        """Forget the sequence's tokens behind `length`; it is admitted again before any new one.

        What it computed is in the tree then, so that little is computed again.
        """
        self.remove(sequence)
        sequence.shorten(length)
        insort(self.retracted, sequence, key=by_order)

    def forget(self, sequence: RequestState) -> None:
        """`sequence` ends, all KV being lost."""
        (self.retracted if sequence in self.retracted else self.sequences).remove(sequence)

    def restart(self) -> None:
        """All KV is lost: every sequence computes again what it had."""
        for sequence in self.sequences:
            sequence.forget_kv()
            insort(self.retracted, sequence, key=by_order)
        self.sequences = []
        self._ordered = None

    # ------------------------------------------------------------ order

    def moved(self) -> None:
        """A handle moved, so the order must be computed anew."""
        self._ordered = None

    def depth_first(self) -> DepthFirst:
        """The running sequences; a new object whenever the order may have changed."""
        if self._ordered is None:
            self._ordered = depth_first(self.sequences)
        return self._ordered

    # ------------------------------------------------------------ blocks

    def secure(self, *, may_retract: bool = True) -> list[RequestState] | None:
        """Give every sequence that decodes in the next step a slot for its next token; returns
        these. Retracts where there is none; None if that would be needed and is not allowed.
        A sequence whose pending token is its last one is not among them, nor one that waits for
        its pending tokens.

        If the oldest sequence is still in prefill, one more block is left for it.
        """
        size = self._kv.block_size
        while True:
            ready = [
                s
                for s in self.sequences
                if s.decoding
                and s.ending is None
                and (not s.pending or (s.length + s.pending < s.full and not s.stands_by))
            ]
            if not self.sequences:
                return ready
            growing = [s for s in ready if s.computed == s.table_len * size]
            oldest = self.sequences[0]
            stuck = not oldest.decoding and oldest.table_len * size <= oldest.computed
            if self._kv.make_room(len(growing) + stuck, growing[0] if growing else oldest):
                if growing:
                    self._kv.extend(growing)
                return ready
            if not may_retract:
                return None
            victim = min(self.sequences[1:], key=self._rank, default=None)
            if victim is not None:
                self.retract(victim)
            elif oldest.node is not None:
                self._kv.isolate(oldest)
                self._ordered = None
            else:
                raise RuntimeError(f"{oldest} holds all blocks and wants more")  # see max_length

    def _rank(self, sequence: RequestState) -> tuple[bool, int, int, int]:
        """Of victims, the lowest first. Retracting one helps that holds blocks of its own or wants
        one."""
        priority, loss = sequence.request.handling.priority, _loss(sequence)
        return not (loss > 0 or sequence.decoding), priority, loss, -sequence.order

    # ------------------------------------------------------------ headroom

    def relax(self) -> None:
        """Lower the reserve a little, once per step."""
        self.reserve = max(self._headroom.decay * self.reserve, self._headroom.least)

    def _ahead(self, sequence: RequestState) -> int:
        """The length up to which `sequence` is promised blocks."""
        outputs = 0 if sequence.ending is not None else sequence.max_tokens - sequence.outputs
        return sequence.target() + min(outputs, int(self.reserve))

    def promise(self, sequence: RequestState) -> int:
        """Blocks that a running sequence does not have yet and is promised."""
        return max(self._kv.blocks_for(self._ahead(sequence)) - sequence.table_len, 0)

    def promises(self) -> int:
        """Blocks promised to all running sequences. O(running)."""
        return sum(map(self.promise, self.sequences))

    def fits(self, sequence: RequestState, promises: int) -> bool:
        """Whether `sequence` may be admitted beside the `promises` to others."""
        if not self.sequences and not promises:
            return True
        return self.wanted(sequence) + promises <= self._kv.pool.available

    def wanted(self, sequence: RequestState) -> int:
        """Blocks that a waiting sequence would take, were it admitted."""
        return self._kv.cost(sequence, self._ahead(sequence))


def _loss(sequence: RequestState) -> int:
    """Computed tokens that no other running sequence shares."""
    node = sequence.node
    if node is None:
        return sequence.computed
    while node.locks == 1 and node.parent is not None:
        node = node.parent
    return sequence.computed - node.end


# Prefill ------------------------------------------------------------------------------------------
#
# Which chunks of prompts a step computes, and who is admitted for them.


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
        flights: deque[InFlightStep],
        counters: Counters,
        *,
        max_rows: int,
        clock: Callable[[], float],
        pace: PromptPace,
        complete: Callable[[RequestState], None],
        longest: Callable[[RequestState], int],
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

    def plan(self, builder: PlanBuilder, budget: int, alone: RequestState | None = None) -> None:
        """Add chunks of at most `budget` tokens in all; nobody but `alone` is admitted."""
        running, retracted = self._running, self._running.retracted
        for sequence in list(running.sequences):
            if budget and not sequence.decoding:
                budget -= self._chunk(sequence, budget, builder)
        if not budget or not (retracted or len(self._waiting)) or alone in running.sequences:
            return
        self._waiting.refresh()
        aside: list[RequestState] = []
        self._admit(builder, budget, alone, aside)
        for sequence in aside:
            self._waiting.bring_back(sequence)

    def _admit(
        self,
        builder: PlanBuilder,
        budget: int,
        alone: RequestState | None,
        aside: list[RequestState],
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

    def _chunk(self, sequence: RequestState, budget: int, builder: PlanBuilder) -> int:
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

    def pin(self, sequence: RequestState) -> None:
        """Pin the sequence's prompt, if that is asked for and all of it is in the tree."""
        if not sequence.pinned and sequence.tree_len >= sequence.prompt_len:
            sequence.pinned = True
            self._kv.retention.pin(sequence)

    def _may_pin(self, sequence: RequestState, count: int) -> bool:
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
        """Whether steps under way find something for `sequence`."""
        return bool(sequence.pending) or any(flight.awaits(sequence) for flight in self._flights)


# Limits -------------------------------------------------------------------------------------------
#
# Which requests can be served at all.


@dataclass(frozen=True)
class Limits:
    """`capacity` is what the KV pool holds, in tokens; `vocab_size` 0 allows any token id. `labels`
    and `adapters` are those of `Ready`."""

    context_length: int
    capacity: int
    vocab_size: int
    labels: int | None = None
    adapters: tuple[str, ...] = ()

    def beside(self, pinned: int) -> Limits:
        """The limits while `pinned` tokens of the pool are not to be had."""
        return replace(self, capacity=self.capacity - pinned) if pinned else self

    @property
    def max_length(self) -> int:
        """A sequence of this many tokens ends; the last needs no KV, as nothing attends to it."""
        return min(self.context_length, self.capacity + 1)

    def longest(self, request: EngineRequest, block_size: int) -> int:
        """At this length a sequence of `request`, which was checked, ends. Who pins a prompt that
        ends within a block leaves room for a copy of that block: the pin holds the one that is in
        the tree."""
        prompt = len(request.token_ids)
        if not request.handling.cache.pin or not prompt % block_size:
            return self.max_length
        return max(self.beside(block_size).max_length, prompt + len(request.output_ids) + 1)

    def check(self, request: EngineRequest, *, constrained: bool) -> None:
        """Raises InvalidRequest, or ContextLengthExceeded if not even one token fits."""
        params = request.params
        if not len(request.token_ids):
            raise InvalidRequest("the prompt is empty")
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens must be a number here")
        self._check_kind(request)
        for name, ids in (
            ("prompt", request.token_ids),
            ("output", request.output_ids),
            ("prediction", request.prediction),
        ):
            # One bad id would make the executor fail the whole step.
            bad = len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size)
            if bad and self.vocab_size:
                raise InvalidRequest(f"the {name} has ids outside 0..{self.vocab_size - 1}")
        if constrained and not self.vocab_size:
            raise InvalidRequest("constrained requests need a scheduler that knows vocab_size")
        outputs = len(request.output_ids)
        length = len(request.token_ids) + outputs
        cached = min(self.context_length, self.capacity)
        room = self.max_length - 1 if outputs < params.max_tokens else cached
        if length > room:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens; at most {room} fit into the context window and "
                f"the KV cache ({self.capacity} tokens)"
            )

    def adapter(self, request: EngineRequest) -> int:
        """The number of a request's adapter, -1 where it has none. Raises InvalidRequest."""
        if not request.adapter:
            return -1
        if request.adapter not in self.adapters:
            known = f"there are {', '.join(self.adapters)}" if self.adapters else "there are none"
            raise InvalidRequest(f"the adapter {request.adapter!r} is not loaded: {known}")
        return self.adapters.index(request.adapter)

    def _check_kind(self, request: EngineRequest) -> None:
        """Whether the model has what is asked for."""
        if request.pooling == "none":
            if self.labels is not None:
                head = f"its head scores {self.labels} labels" if self.labels else "it has no head"
                raise InvalidRequest(f"this model does not generate text: {head}")
        elif request.params.max_tokens or request.params.prompt_logprobs_from is not None:
            raise InvalidRequest("a request for a vector neither samples nor scores tokens")
        elif request.pooling == "labels" and not self.labels:
            raise InvalidRequest("this model has no head that scores labels")


# Deadline -----------------------------------------------------------------------------------------
#
# Whether requests can be done by their deadlines: refused are those that hardly would be.


MARGIN = 1.25
"""What is expected is taken to be off by so much: times of requests that have ended are older than
the queue. `benchmarks/overload` shows what that is worth."""
SPARE = 64
"""So many sequences that do not wait are remembered at least."""
CONSIDERED = 256
"""Of only so many requests it is looked up how much of their prompts is to be computed; the others
are taken to be like them."""


class Deadlines:
    """Refuses what would be late, when it comes and where it waits.

    Without that, more requests than can be done are all begun late, and none is done in time. What
    is expected follows from the pace of prompts and from how long requests took, and beside how
    many others, that have just ended (`ServicePace`). A request alone is never refused.
    """

    def __init__(
        self,
        waiting: PriorityQueues,
        running: RunningSet,
        cached: Callable[[RequestState], int],
        pace: PromptPace,
        max_rows: int,
    ) -> None:
        """`cached`: how many leading tokens of a sequence need not be computed."""
        self._waiting = waiting
        self._running = running
        self._work = PromptWork(cached)
        self._pace = pace
        self._service = ServicePace()
        self._max_rows = max_rows
        self._heap: list[tuple[float, int, RequestState]] = []
        """Deadlines of those that wait, and of some that do not any more."""

    def check(self, sequence: RequestState, now: float) -> None:
        """A request comes. Raises DeadlineImpossible if it is expected to be late."""
        timeout = sequence.request.handling.timeout
        if timeout is None:
            return
        ahead = self._waiting.ahead(sequence)
        queued = [*self._running.retracted, *islice(ahead, CONSIDERED)]
        count = len(queued) + sum(1 for _ in ahead)
        seconds = self._until_done(sequence, queued, count, now)
        left = sequence.arrived + timeout - now
        if seconds * MARGIN > left:
            raise DeadlineImpossible(
                f"{count} requests come first; with them this one takes about {seconds:.3g} s, "
                f"and its timeout leaves {max(left, 0):.3g} s"
            )

    def add(self, sequence: RequestState) -> None:
        """It was queued."""
        timeout = sequence.request.handling.timeout
        if timeout is None:
            return
        heapq.heappush(self._heap, (sequence.arrived + timeout, sequence.number, sequence))
        if len(self._heap) > 2 * len(self._waiting) + SPARE:
            # Those that do not wait any more would stay until their deadlines.
            self._heap = [entry for entry in self._heap if _waits(entry[2])]
            heapq.heapify(self._heap)

    def ended(self, sequence: RequestState, now: float, *, whole: bool) -> None:
        """An admitted sequence ended; `whole`: by itself."""
        assert sequence.queued is not None
        seconds = now - sequence.arrived - sequence.queued
        rows = len(self._running.sequences) + 1
        self._service.note(seconds, rows, sequence.outputs, whole=whole)

    def late(self, now: float) -> Iterator[RequestState]:
        """Those that wait and are expected to be late even if they were admitted now."""
        heap, running = self._heap, self._running.sequences
        if not len(self._waiting):
            self._work.forget()
        while heap and running and heap[0][0] < now + self._service.seconds(self._rows(0)):
            deadline, _, sequence = heapq.heappop(heap)
            if _waits(sequence) and deadline < now + self._own(sequence, self._rows(0)):
                yield sequence

    # ------------------------------------------------------------ what is expected

    def _until_done(
        self, sequence: RequestState, queued: list[RequestState], count: int, now: float
    ) -> float:
        """Seconds. `count` requests come first, of which `queued` are the first ones."""
        running = self._running.sequences
        if not count and not running:
            return 0.0  # what is known is of requests that had company
        computed = sum(one.target() - one.computed for one in running)
        before = self._work.of_waiting(queued, now) * count // max(len(queued), 1)
        own = self._work.of_next(sequence)
        rows = self._rows(count)
        # They are admitted as the prompts before them are computed, or as rows become free.
        excess = max(len(running) + count + 1 - self._most, 0)
        wait = max(
            self._pace.seconds(computed + before),
            self._service.seconds(rows) * excess / self._most,
        )
        return wait + max(self._pace.seconds(own), self._own(sequence, rows))

    def _own(self, sequence: RequestState, rows: int) -> float:
        """Seconds from its admission on, beside so many others; 0 where others say nothing of it: a
        constraint, a yes or no, say, may end it soon."""
        if sequence.matcher is not None:
            return 0.0
        return self._service.seconds(rows, sequence.max_tokens - sequence.outputs)

    def _rows(self, count: int) -> int:
        """How many run together with a request before which `count` others come."""
        return min(len(self._running.sequences) + count + 1, self._most)

    @property
    def _most(self) -> int:
        """How many rows there is room for."""
        return min(self._running.most or self._max_rows, self._max_rows)


def _waits(sequence: RequestState) -> bool:
    return sequence.order < 0 and not sequence.finished
