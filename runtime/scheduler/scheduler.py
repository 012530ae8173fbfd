"""Iteration-level scheduling over the radix tree.

loop:  plan = scheduler.plan()               running decodes, then prefill chunks, then admissions
       result = executor.execute(plan)       the next plan may precede this commit
       updates = scheduler.commit(plan, result)
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from operator import add

from msgspec.structs import replace

from rootlace.runtime.cache.suffix_index import SuffixIndex
from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.contracts.plan import DraftModel, SampleRow, StepPlan, StepResult
from rootlace.runtime.scheduler import output
from rootlace.runtime.scheduler.admission import (
    BY_ORDER,
    Headroom,
    Prefill,
    RunningSet,
    StepBudget,
    Turns,
)
from rootlace.runtime.scheduler.batch import PlanBuilder, depth_first
from rootlace.runtime.scheduler.draft_model import ModelSource
from rootlace.runtime.scheduler.inspection import CacheControl, CacheView
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.masks import SampleRows, StepMasks, dead_row
from rootlace.runtime.scheduler.offload.levels import Tiers, as_measured
from rootlace.runtime.scheduler.output import Rollback, Suspects, TokenIntake, Verdict
from rootlace.runtime.scheduler.pacing import MeasuredCost, PromptPace, ServicePace
from rootlace.runtime.scheduler.queue import WaitingQueue
from rootlace.runtime.scheduler.request import Counters, Ending, InFlightStep, Limits, RequestState
from rootlace.runtime.scheduler.speculation import Drafting
from rootlace.wire.errors import (
    DeadlineImpossible,
    InvalidRequest,
    Overloaded,
    PinRefused,
    RootlaceError,
)

MARGIN = 1.5
"""Safety factor on expected times."""
MAX_FLIGHTS = 2
"""Steps planned and not committed: a running step, and the step behind it."""


class Scheduler:
    """Scheduler of steps. See "Scheduler" and "Overlap" in docs/internals.md.

    The caller alternates `plan` and `commit` (or `fail`), or plans one step ahead of the commit. A
    step planned ahead feeds on tokens that the step before will sample. `add` and `abort` may come
    at any time between. `take_updates` returns updates made without a step, and so does the next
    `commit` or `fail`.

    A step costs O(rows) Python work and memory copies for the block tables. Nothing else in a
    decode step grows with the context.

    *Progress.* Sequences are numbered at first admission. The running sequence with the lowest
    number is never preempted. That sequence gets its blocks first, in the end all blocks
    (`isolate`), and gains a token in every step, so it ends. Preempted sequences return in order of
    their numbers, before any new request, so each one is the lowest some day.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        context_length: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        vocab_size: int = 0,
        masks: StepMasks | None = None,
        automata: bool = False,
        headroom: Headroom | None = None,
        labels: int | None = None,
        adapters: tuple[str, ...] = (),
        tiers: Tiers | None = None,
        index_key: bytes = b"",
        draft_model: DraftModel | None = None,
    ) -> None:
        """Make a scheduler. `vocab_size` bounds token ids (0: any); constrained requests require
        it.

        `masks` makes constraint masks; by default the plan fills masks itself. With `automata` a
        row carries its automaton's state instead, if there is one. `headroom` is for callers that
        count in units other than tokens. `labels`, `adapters`: see `Ready`. `tiers`: the offload
        levels. `index_key`: see `SuffixIndex`. `draft_model`: drafts beside the texts.
        """
        self.config = config
        self._checks = config.check_invariants
        self.pace = pace = PromptPace()
        self.cost = MeasuredCost(config.max_step_tokens)
        self._step_seconds = config.step_seconds or 0.0
        self._turns = Turns(self._step_seconds, self.cost) if self._step_seconds else None
        if tiers is not None and tiers.prefill_seconds is as_measured:
            tiers = replace(tiers, prefill_seconds=pace.seconds)
        indexed = config.speculation_tokens
        self.kv = KVStore(cache, clock, tiers, SuffixIndex(indexed, index_key) if indexed else None)
        self._clock = clock
        self._limits = Limits(context_length, self.kv.capacity, vocab_size, labels, adapters)
        # Every running sequence can have one token in every step.
        self._max_rows = min(config.max_running, config.max_step_tokens)
        self._waiting = WaitingQueue(config, self.kv.estimate)
        self._running = RunningSet(self.kv, headroom or Headroom())
        self.view = CacheView(self.kv, self._running, clock, pace)
        self._service = ServicePace()
        self._sample_rows = SampleRows(masks or StepMasks(vocab_size), automata)
        self._builder = PlanBuilder(self.kv.pool, self._sample_rows, adapters=bool(adapters))
        self._intake = TokenIntake()
        self.by_rid: dict[int, RequestState] = {}
        """Map from request id to unfinished request."""
        self.cache = CacheControl(self.kv, self.by_rid, self._check_if_asked)
        self._updates: list[EngineOutput] = []
        self._flights: deque[InFlightStep] = deque()
        self._suspects = Suspects()
        self._committed = 0.0
        """Time of the last commit."""
        self._arrivals = 0
        self.streams = 0
        """Count of requests that emit at intervals."""
        self._count = Counters()
        model = None
        if draft_model is not None:
            model = ModelSource(draft_model, config.max_step_tokens)
        self._drafting = Drafting(self.kv, self._sample_rows, self._count, model)
        self._prefill = Prefill(
            self.kv,
            self._running,
            self._waiting,
            self._flights,
            self._count,
            max_rows=self._max_rows,
            clock=clock,
            pace=pace,
            complete=lambda sequence: self._updates.append(self._finish(sequence)),
            longest=self._longest,
        )

    # ------------------------------------------------------------ requests

    def add(
        self,
        request: EngineRequest,
        matcher: Matcher | None = None,
        *,
        jump_forward: bool = False,
        waited: float = 0.0,
    ) -> None:
        """Queue a request.

        `matcher` is the constraint, which has taken in the request's `output_ids`. With
        `jump_forward`, forced tokens are appended without sampling. `waited`: seconds that the
        request waited before, which count as queued.

        Raises InvalidRequest; ContextLengthExceeded if not even one token fits; Overloaded if the
        queue is full; PinRefused if a pin cannot be met;
        ConstraintNotMet if a forced text fails its check. After an error nothing has changed.
        """
        try:
            if request.rid in self.by_rid:
                raise InvalidRequest(f"request id {request.rid} is in use")
            limits, retention = self._limits, self.kv.retention
            if retention.pins.blocks:
                retention.expire()
                limits = limits.beside(retention.pins.blocks * self.kv.block_size)
            limits.check(request, constrained=matcher is not None)
            sequence = RequestState(
                request,
                matcher,
                self._arrivals,
                jumps=jump_forward,
                arrived=self._clock() - waited,
                max_length=limits.longest(request, self.kv.block_size),
                adapter=limits.adapter(request) if request.adapter else -1,
            )
            limit = self.config.max_waiting
            if not request.resumed and self._waiting.crowds_out(sequence.place, limit):
                raise Overloaded(f"at most {limit} requests may wait")
            if not sequence.pinned:
                retention.check_pin(sequence, self._longest())
            self._intake.begin(sequence)
        except RootlaceError:
            self._count.requests_refused += 1
            raise
        if request.program:
            sequence.program = self.kv.tree.programs.open(request.program)
        self._arrivals += 1
        self._count.requests_added += 1
        self._count.prompt_tokens += sequence.prompt_len
        self.by_rid[request.rid] = sequence
        self.streams += request.emit_seconds > 0
        self._drafting.added(sequence)
        self._waiting.add(sequence)
        if self.kv.tiering.active:
            self.kv.tiering.fetching.arrived(sequence)
        if request.suspected:
            self._suspects.add(sequence, max(request.suspected, sequence.length))

    def abort(self, rid: int) -> EngineOutput | None:
        """End a request now, with the tokens not yet emitted; None if the id is unknown. Computed
        tokens stay cached."""
        sequence = self.by_rid.get(rid)
        if sequence is None:
            return None
        if sequence.order < 0:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        update = output.next_update(sequence, self._clock(), held_back=True) or EngineOutput(rid)
        update.finish = "abort"
        update = self._end(sequence, update)
        if self._checks:
            self.check()
        return update

    @property
    def has_work(self) -> bool:
        """Whether there is a request, an update or a step in flight."""
        return bool(self.by_rid or self._updates or self._flights)

    def take_updates(self) -> list[EngineOutput]:
        """Return the updates that no `commit` has returned yet."""
        updates, self._updates = self._updates, []
        return updates

    def held_back(self, plan: StepPlan) -> list[EngineOutput]:
        """Return updates delayed by `emit_seconds`, to be sent before waiting for `plan`.

        If `plan` has prefill, which may take long, these are updates of all requests. Otherwise
        they are updates of preempted requests.
        """
        sequences = self._running.preempted
        if len(plan.token_ids) > len(plan.samples):
            sequences = [*self._running.sequences, *sequences]
        now = self._clock()
        updates: list[EngineOutput] = []
        for sequence in sequences:
            if sequence.announced and sequence.request.emit_seconds:
                update = output.next_update(sequence, now, held_back=True)
                if update is not None:
                    updates.append(update)
        return updates

    # ------------------------------------------------------------ the step

    def plan(self) -> StepPlan | None:
        """Return the next step; None if no step is possible, or none before the step in flight is
        committed."""
        if len(self._flights) == MAX_FLIGHTS:
            raise RuntimeError("two plans are under way that were neither committed nor failed")
        now = self._clock()
        if now >= self.kv.retention.due:
            self.kv.retention.expire()
        if self.kv.tiering.active:
            self.kv.tiering.poll()
        running, builder = self._running, self._builder
        others = self._waiting.count and running.sequences
        for sequence in self._waiting.late(now, self._duration) if others else ():
            late = DeadlineImpossible("others come first, for longer than its timeout allows")
            update = EngineOutput(sequence.rid, finish="error", code=late.code, error=str(late))
            self._updates.append(self._end(sequence, update))
        if not self.by_rid or (self._flights and self._suspects.queue):
            return None
        # An attempt without rows evicted or preempted. The bound turns a mistake into an error
        # instead of a hang.
        for _ in range(3 * len(self.by_rid) + 3):
            alone = self._suspects.first() if self._suspects.queue else None
            cleared = False
            if alone is not None:
                running.stand_back(alone, self._max_rows)
                cleared = self._suspects.turn(alone, running.sequences)
            ready = running.secure(
                alone,
                others=cleared,
                may_preempt=not self._flights,
                turns=self._turns,
                waiting=self._waiting.count > 0,
            )
            if ready is not None:  # otherwise the step in flight may free the missing blocks
                prefilling = running.prefilling or running.preempted or self._waiting.count
                budget = self.config.max_step_tokens - len(ready)
                if ready:
                    draft_budget = budget // 2  # the other half is for prefill
                    ready, left = self._drafting.plan(ready, builder, draft_budget)
                    budget -= draft_budget - left
                builder.decoding = ready
                for sequence in ready:
                    sequence.computed += 1
                if prefilling and not cleared:
                    bounded = StepBudget.of(budget, self._step_seconds, self.cost, ready)
                    self._prefill.plan(builder, bounded, alone)
                if ready or builder.chunks:
                    break
            if self._flights or not running.sequences:
                if self._checks:
                    self.check()
                return None
        else:
            raise RuntimeError(f"no progress with {len(running.sequences)} running sequences")
        if self._flights:
            self._drafting.launched(running.sequences)
        if running.ordered is None:
            running.ordered = depth_first(running.sequences)
        flight = builder.build(
            self._count.steps, running.ordered, self.kv.version, feeding=bool(self._flights)
        )
        flight.begun = self._clock()
        flight.work, flight.plan.forecast = self.cost.forecast(flight.plan)
        if self.kv.tiering.active:
            self.kv.tiering.saving.launched()
        self._flights.append(flight)
        running.reserve = max(running.headroom.decay * running.reserve, running.headroom.least)
        self._count.steps += 1
        self._count.copies += len(flight.plan.copies)
        if self._checks:
            self.check()
        return flight.plan

    def late_samples(self, plan: StepPlan) -> list[SampleRow]:
        """Return the samples of a late plan after the commit of the step before; none is late any
        more. Waits for the samples' masks. Samples no longer needed are included."""
        for flight in self._flights:
            if flight.plan is plan:
                live = {at: s for at, s in flight.wanted() if plan.samples[at].late}
                return self._sample_rows.final(plan.samples, live)
        return [dead_row(sample) for sample in plan.samples]

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in a step's results; return the updates."""
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError("this plan is not the oldest one under way")
        flight = self._flights.popleft()
        if self.kv.tiering.active:
            self.kv.tiering.saving.committed()
        for (sequence, _, stop), scores in zip(flight.scored, result.prompt_scores, strict=True):
            sequence.take_scores(scores, stop)
        for (sequence, _), states in zip(flight.pooled, result.pooled, strict=True):
            output.take_states(sequence, states)
        updates, self._updates = self._updates, []
        for sequence in flight.complete:
            if not sequence.finished:
                updates.append(self._finish(sequence))
        intake, now = self._intake, self._clock()
        spacing = self.streams / self.config.stream_rate
        seconds = now - max(flight.begun, self._committed)
        self._committed = now
        self.cost.note(flight.work, seconds)
        if len(plan.token_ids) > len(plan.samples):
            self.pace.note(len(plan.token_ids), len(plan.samples), seconds)
        if now >= self.view.ticks.due:
            self.view.ticks.note(self.kv.tree.tick, now)
        self._drafting.note(plan, seconds)
        dropped = 0
        for (sequence, epoch), sample, token, scored in zip(
            flight.sampled, plan.samples, result.token_ids.tolist(), result.scores, strict=True
        ):
            if sequence.epoch != epoch or sequence.finished:
                dropped += 1
                continue
            if sequence.draft is not None and len(sample.token_ids) < sequence.length:
                dropped += 1  # a forced token took the place
                continue
            length = sequence.length
            verdict = intake.take(sequence, token, scored)
            sequence.pending -= 1
            update = None
            if verdict is not None or sequence.length > length + 1:
                update = self._turn(sequence, length, verdict)
            elif sequence.drafter is not None or sequence.draft is not None:
                self._drafting.settle(sequence)
            if update is None and sequence.draft is None:
                update = output.next_update(sequence, now, spacing)
            if update is not None:
                updates.append(update)
        self._count.dropped_samples += dropped
        self._count.output_tokens += len(flight.sampled) - dropped
        if self._checks:
            self.check()
        return updates

    def _turn(self, sequence: RequestState, start: int, verdict: Verdict) -> EngineOutput | None:
        """Apply the consequence of a token at `start`, or tokens forced behind it. Returns the last
        update if the sequence ends."""
        over = verdict is not None or sequence.score_next < sequence.score_stop
        if over:
            if sequence.draft is not None:
                self._drafting.close(sequence)
            if sequence.computed > start:
                self.kv.rewind(sequence, start)
        elif sequence.drafter is not None or sequence.draft is not None:
            self._drafting.settle(sequence)
        if over or sequence.draft is None:
            # A step planned ahead continued from this token alone, so its sample does not count.
            # The token's KV counts, unless its logits are still needed or the request is over.
            sequence.epoch += 1
            sequence.pending = 0
        if isinstance(verdict, Rollback):
            self._running.rollback(sequence, verdict.length)
            return None
        sequence.ending = verdict
        scored = sequence.score_next >= sequence.score_stop
        if verdict is not None and (verdict.finish == "error" or scored):
            return self._finish(sequence)
        if sequence.decoding and sequence.length + sequence.pending > sequence.computed + 1:
            # The appended tokens are computed as a chunk. A few forced ones stay out of the tree,
            # as decoded ones do: sharing them with other requests costs more than computing them.
            sequence.decoding = False
            sequence.jumped = sequence.length - sequence.computed <= self.kv.block_size
            if not sequence.jumped:
                self.kv.store(sequence)
                self._running.ordered = None
        return None

    def fail(self, plan: StepPlan, error: RootlaceError) -> list[EngineOutput]:
        """Forget all KV after the executor raised; end the request that is the cause.

        A step's only request is the cause. With several requests, each is computed again alone
        until it is past the failing token (`Suspects`). A step planned behind is dropped and its
        requests are computed again. Masks of an ended request may still be being filled; their
        matchers are discarded with the masks.
        """
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError("this plan is not the oldest one under way")
        flight = self._flights.popleft()
        guilty = self._suspects.accuse(flight)
        while self._flights:
            self._flights.popleft().drop()
        if self._suspects.queue:
            flight.drop()
        updates = self.take_updates()
        self.kv.reset()
        for sequence in guilty:
            self._running.forget(sequence)
            ending = Ending("error", code=error.code, error=str(error))
            updates.append(self._end(sequence, output.last_update(sequence, ending)))
        self._running.restart()
        for sequence in self.by_rid.values():
            sequence.lose_pin()
        if self._checks:
            self.check()
        return updates

    # ------------------------------------------------------------ how things stand

    def stats(self) -> dict[str, int | float]:
        """Return the counters since start, and the current state (`blocks_*`, `nodes`, `waiting`,
        …)."""
        self.kv.retention.expire()
        pool, tree = self.kv.pool, self.kv.tree
        return {
            **self._count.values(),
            "forced_tokens": self._intake.forced_tokens,
            "jumps": self._intake.jumps,
            "retreats": self._intake.rollbacks,
            "retractions": self._running.preemptions,
            "evicted_blocks": tree.evicted_blocks,
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.free,
            "blocks_used": pool.num_blocks - pool.available,
            "blocks_evictable": pool.evictable,
            "blocks_pinned": self.kv.retention.pins.blocks,
            "pins": len(self.kv.retention.pins),
            "nodes": tree.num_nodes,
            "tree_tokens": tree.num_tokens,
            "waiting": self._waiting.count + len(self._running.preempted),
            "running": len(self._running.sequences),
            "indexed_tokens": 0 if self.kv.suffixes is None else self.kv.suffixes.tokens,
            "index_bytes": 0 if self.kv.suffixes is None else self.kv.suffixes.num_bytes,
            **self.kv.tiering.stats(),
        }

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant. O(everything); not while planning."""
        running, preempted = self._running.sequences, self._running.preempted
        self.kv.check(running)
        everyone = [*running, *preempted, *self._waiting]
        assert len(everyone) == len(self.by_rid), "a sequence is in two places or in none"
        for sequence in everyone:
            assert self.by_rid[sequence.rid] is sequence and not sequence.finished
        for queue in (running, preempted):
            assert queue == sorted(queue, key=BY_ORDER), "sequences are out of order"
        for sequence in (*preempted, *self._waiting):
            assert not sequence.table_len and sequence.node is None, f"{sequence} has KV"
        assert len(running) <= self._max_rows
        pending = Counter(s.rid for flight in self._flights for _, s in flight.wanted())
        for sequence in everyone:
            assert sequence.pending == pending[sequence.rid], f"{sequence}: {sequence.pending}"
        assert self.kv.enabled or not self.kv.tree.roots, "the tree is in use"

    # ------------------------------------------------------------ inside

    def _finish(self, sequence: RequestState) -> EngineOutput:
        """End an admitted sequence that has nothing more to compute."""
        assert sequence.ending is not None
        self._running.remove(sequence)
        if not sequence.pinned and sequence.ending.finish != "error":
            self._pin_late(sequence)
        return self._end(sequence, output.last_update(sequence, sequence.ending))

    def _pin_late(self, sequence: RequestState) -> None:
        """Pin the prompt of a sequence that entered the tree only at its end."""
        try:
            self.kv.retention.check_pin(sequence, self._longest(sequence))
            if not sequence.pinned:
                self.kv.retention.pin(sequence)
        except PinRefused as error:
            sequence.ending = Ending("error", code=error.code, error=str(error))

    def _end(self, sequence: RequestState, update: EngineOutput) -> EngineOutput:
        """Forget `sequence`, and return its completed last `update`."""
        assert update.finish is not None
        if not sequence.announced:
            output.add_prompt_figures(sequence, update)
        self._drafting.ended(sequence)
        for _, source in sequence.accepted:  # right draft tokens that are never emitted
            sequence.rejected[source] += 1
        if any(sequence.rejected):
            counts = update.rejected or (0,) * len(sequence.rejected)
            update.rejected = tuple(map(add, counts, sequence.rejected))
        sequence.finished = True
        if self.kv.tiering.active:
            self.kv.tiering.let_go(sequence)
        del self.by_rid[sequence.rid]
        self.streams -= sequence.request.emit_seconds > 0
        if self._waiting.count:
            self._waiting.ended(sequence)
        if sequence.queued is not None:
            seconds = self._clock() - sequence.arrived - sequence.queued
            rows, whole = len(self._running.sequences) + 1, update.finish in ("stop", "length")
            self._service.note(seconds, rows, sequence.outputs, whole=whole)
        if self.cache.forgotten:
            self.cache.request_ended(sequence.namespace)
        self._count.by_finish[update.finish] += 1
        return update

    def _duration(self, sequence: RequestState) -> float:
        """Return the expected seconds from the admission of `sequence` to its end. 0 if the
        constraint may end the request early: a yes or no, for example."""
        if sequence.matcher is not None:
            return 0.0
        running = self._running.sequences
        rows = min(len(running) + 1, self._max_rows)
        seconds = self._service.seconds(rows, sequence.max_tokens - sequence.outputs)
        prompts = sum(one.target() - one.computed for one in running)
        pace = self.pace
        return MARGIN * (pace.seconds(prompts) + max(pace.seconds(sequence.length), seconds))

    def _longest(self, except_for: RequestState | None = None) -> int:
        """Return the maximum length of any unfinished sequence other than `except_for`."""
        return max((one.full for one in self.by_rid.values() if one is not except_for), default=0)

    def _check_if_asked(self) -> None:
        if self.config.check_invariants:
            self.check()
