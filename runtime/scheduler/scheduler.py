"""Iteration-level scheduling over the radix tree."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult, TokenScores
from rootlace.runtime.scheduler import output
from rootlace.runtime.scheduler.admission import (
    Deadlines,
    Headroom,
    Limits,
    Prefill,
    RunningSet,
    by_order,
)
from rootlace.runtime.scheduler.batch import PlanBuilder
from rootlace.runtime.scheduler.inspection import CacheControl, CacheView
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.offload.levels import Tiers, as_measured
from rootlace.runtime.scheduler.output import Retreat, Suspects, TokenIntake
from rootlace.runtime.scheduler.pacing import PromptPace
from rootlace.runtime.scheduler.queue import FairQueue, PriorityQueues, WaitingQueue
from rootlace.runtime.scheduler.request import Counters, Ending, InFlightStep, RequestState
from rootlace.runtime.scheduler.rows import DecodeRows, SampleRows, StepMasks, dead_row
from rootlace.runtime.scheduler.speculation import Drafting
from rootlace.wire.errors import (
    DeadlineImpossible,
    InvalidRequest,
    Overloaded,
    PinRefused,
    RootlaceError,
)

MAX_FLIGHTS = 2
"""Steps that are planned and not committed: one that runs, and the one behind it."""


class Scheduler:
    """Decides what is computed when. See "Scheduler" and "Overlap" in docs/internals.md.

    The caller alternates `plan` and `commit` (or `fail`), or plans the next step before it commits
    the last one: then the new plan feeds on tokens that the last one is to find. `add` and `abort`
    may come at any time between. Updates that come about without a step are in `take_updates`, and
    in what the next `commit` or `fail` returns.

    A step costs O(rows) Python work and memory copies for the block tables; nothing in a decode
    step grows with the context otherwise.

    *Progress.* Sequences are numbered when first admitted, and the running one with the lowest
    number is never retracted: it gets its blocks first, in the end all there are (`isolate`), and
    a token more in every step, so it ends. Retracted sequences come back in order of their numbers
    and before any other request, so each one is the lowest some day.
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
    ) -> None:
        """`vocab_size` bounds token ids (0: any) and is needed for constrained requests.

        `masks` makes their masks; without it they are filled while a step is planned. With
        `automata`, a row carries its automaton's state instead, where there is one. `headroom`
        is for callers that count in other units than tokens. `labels` and
        `adapters` are those of `Ready`. `tiers`: what is below the KV pool.
        """
        for name in ("max_step_tokens", "max_running"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")
        self.config = config
        pace = PromptPace()
        if tiers is not None and tiers.prefill_seconds is as_measured:
            tiers = replace(tiers, prefill_seconds=pace.seconds)
        self.kv = KVStore(cache, clock, tiers)
        self._clock = clock
        self._limits = Limits(context_length, self.kv.capacity, vocab_size, labels, adapters)
        # Every running sequence can have one token in every step.
        self._max_rows = min(config.max_running, config.max_step_tokens)
        self._waiting = PriorityQueues(
            config.priority_seconds,
            lambda: FairQueue(
                lambda: WaitingQueue(
                    config.policy, config.max_overtaken, config.max_delay, self.kv.estimate
                ),
                self.kv.estimate,
            ),
        )
        self._running = RunningSet(self.kv, headroom or Headroom())
        self.view = CacheView(self.kv, self._running, clock, pace)
        self._deadlines = Deadlines(
            self._waiting, self._running, self.kv.estimate, self.view.pace, self._max_rows
        )
        self._sample_rows = SampleRows(masks or StepMasks(vocab_size), automata)
        self._decode_rows = DecodeRows(cache.block_size)
        self._intake = TokenIntake()
        self._by_rid: dict[int, RequestState] = {}
        self.cache = CacheControl(self.kv, self._by_rid, self._check_if_asked)
        self._updates: list[EngineOutput] = []
        self._flights: deque[InFlightStep] = deque()
        self._suspects = Suspects()
        self._arrivals = 0
        self._streams = 0
        """Requests that are told in pieces, at intervals."""
        self._count = Counters()
        self._drafting = Drafting(self.kv, self._sample_rows, self._count)
        self._prefill = Prefill(
            self.kv,
            self._running,
            self._waiting,
            self._flights,
            self._count,
            max_rows=self._max_rows,
            clock=clock,
            pace=self.view.pace,
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

        `matcher` is its constraint, and has taken in the request's `output_ids`. With
        `jump_forward`, tokens that it forces are appended without sampling. `waited`: seconds that
        the request waited elsewhere, which count as queued.

        Raises InvalidRequest, ContextLengthExceeded if not even one token fits, Overloaded if the
        queue is full, PinRefused and DeadlineImpossible where `Request.handling` asks for what
        cannot be, ConstraintNotMet if what the constraint forces fails its check; then nothing has
        changed.
        """
        try:
            if request.rid in self._by_rid:
                raise InvalidRequest(f"request id {request.rid} is in use")
            self.kv.retention.expire()
            limits = self._limits.beside(self.kv.retention.pins.blocks * self.kv.block_size)
            limits.check(request, constrained=matcher is not None)
            if not request.resumed and self._waiting.crowds_out(
                request.client, self.config.max_waiting
            ):
                raise Overloaded(f"{len(self._waiting)} requests are waiting already")
            sequence = RequestState(
                request,
                matcher,
                self._arrivals,
                jumps=jump_forward,
                arrived=self._clock() - waited,
                max_length=limits.longest(request, self.kv.block_size),
                adapter=limits.adapter(request),
            )
            if not sequence.pinned:
                self.kv.retention.check_pin(sequence, self._longest())
            self._deadlines.check(sequence, self._clock())
            self._intake.begin(sequence)
        except RootlaceError:
            self._count.requests_refused += 1
            raise
        sequence.program = self.kv.tree.programs.open(request.program)
        self._arrivals += 1
        self._count.requests_added += 1
        self._count.prompt_tokens += sequence.prompt_len
        self._by_rid[request.rid] = sequence
        self._streams += request.emit_seconds > 0
        self._drafting.added(sequence)
        self._waiting.add(sequence)
        self._deadlines.add(sequence)
        self.kv.tiering.fetching.arrived(sequence)
        if request.suspected:
            self._suspects.add(sequence, max(request.suspected, sequence.length))

    def abort(self, rid: int) -> EngineOutput | None:
        """End a request now; None if there is none of this id. What it computed stays cached."""
        sequence = self._by_rid.get(rid)
        if sequence is None:
            return None
        if sequence.order < 0:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        update = self._end(sequence, EngineOutput(rid, finish="abort"))
        self._check_if_asked()
        return update

    @property
    def has_work(self) -> bool:
        """Whether there is a request, an update or a step under way."""
        return bool(self._by_rid or self._updates or self._flights)

    def take_updates(self) -> list[EngineOutput]:
        """Updates that no `commit` has returned yet."""
        updates, self._updates = self._updates, []
        return updates

    def held_back(self, plan: StepPlan) -> list[EngineOutput]:
        """Updates that only wait for `Request.emit_seconds`, to be sent before waiting for `plan`:
        of all requests if it computes prompts and may take long, and always of retracted ones."""
        now = self._clock()
        sequences = self._running.retracted
        if plan.num_tokens > len(plan.samples):
            sequences = [*self._running.sequences, *sequences]
        updates = [
            output.next_update(sequence, now, held_back=True)
            for sequence in sequences
            if sequence.request.emit_seconds
        ]
        return [update for update in updates if update is not None]

    # ------------------------------------------------------------ the step

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute, or nothing before the step under way
        is committed."""
        if len(self._flights) == MAX_FLIGHTS:
            raise RuntimeError("two plans are under way that were neither committed nor failed")
        self.kv.retention.expire()
        self.kv.tiering.poll()
        for sequence in self._deadlines.late(self._clock()):
            self._waiting.remove(sequence)
            late = DeadlineImpossible("others come first, for longer than its timeout allows")
            update = EngineOutput(sequence.rid, finish="error", code=late.code, error=str(late))
            self._updates.append(self._end(sequence, update))
        if self._suspects and self._flights:
            return None
        # An attempt without rows changed something: it evicted or retracted. The bound turns a
        # mistake into an error instead of a hang.
        for _ in range(3 * len(self._by_rid) + 3):
            alone = self._suspects.first()
            if alone is not None:
                self._running.stand_back(alone)
            builder = PlanBuilder(
                self._count.steps,
                self.kv.pool,
                feeding=bool(self._flights),
                adapters=bool(self._limits.adapters),
            )
            ready = self._running.secure(may_retract=not self._flights)
            if ready is not None:  # else the step under way may give the blocks that are missing
                budget = self.config.max_step_tokens - len(ready)
                if self._drafting.requests:
                    most = budget // 2  # prompts go on, too
                    ready, left = self._drafting.plan(ready, builder, most)
                    budget -= most - left
                builder.add_decodes(ready)
                for sequence in ready:
                    sequence.computed += 1
                self._prefill.plan(builder, budget, alone)
                if builder.num_rows:
                    return self._launch(builder)
            if self._flights or not self._running.sequences:
                self._check_if_asked()
                return None
        raise RuntimeError(f"no progress with {len(self._running.sequences)} running sequences")

    def late_samples(self, plan: StepPlan) -> list[SampleRow]:
        """The samples of a late plan, the step before being committed: none is late any more.

        Returns once their masks are filled. Samples that nobody wants any more are included.
        """
        for flight in self._flights:
            if flight.plan is plan:
                live = {at: s for at, s in flight.wanted() if plan.samples[at].late}
                return self._sample_rows.final(plan.samples, live)
        return [dead_row(sample) for sample in plan.samples]

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in what the step found."""
        flight = self._land(plan)
        self.kv.tiering.saving.committed()
        for (sequence, _, stop), scores in zip(flight.scored, result.prompt_scores, strict=True):
            sequence.take_scores(scores, stop)
        for (sequence, _), states in zip(flight.pooled, result.pooled, strict=True):
            output.take_states(sequence, states)
        updates = self.take_updates()
        for sequence in flight.complete:
            if not sequence.finished:
                updates.append(self._finish(sequence))
        intake, now = self._intake, self._clock()
        spacing = self._streams / self.config.stream_rate
        seconds = self.view.note_step(flight, now)
        if self._drafting.requests:
            self._drafting.note(plan, seconds)
        dropped = 0
        for (sequence, epoch), sample, token, scored in zip(
            flight.sampled, plan.samples, result.token_ids.tolist(), result.scores, strict=True
        ):
            if sequence.epoch != epoch or sequence.finished:
                dropped += 1
                continue
            if sequence.draft is not None and sample.position < sequence.length:
                dropped += 1  # its place was forced
                continue
            if sequence.plain and intake.try_take_fast(sequence, token, scored):
                if sequence.prediction is not None:
                    self._drafting.settle(sequence)
                if sequence.draft is not None or not output.due(sequence, now, spacing):
                    continue
                update = output.next_update(sequence, now, spacing)
            else:
                update = self._take(sequence, token, scored)
                if update is None and sequence.draft is None:
                    update = output.next_update(sequence, now, spacing)
            if update is not None:
                updates.append(update)
        self._count.dropped_samples += dropped
        self._count.output_tokens += len(flight.sampled) - dropped
        self._check_if_asked()
        return updates

    def _take(
        self, sequence: RequestState, token: int, scores: TokenScores | None
    ) -> EngineOutput | None:
        """Give `sequence` its next token; returns its last update, if it ends with that."""
        sequence.pending -= 1
        start = sequence.length
        verdict = self._intake.take(sequence, token, scores)
        jumped = sequence.length > start + 1
        if verdict is not None or (jumped and sequence.scores_missing):
            self._drafting.close(sequence)
            sequence.drop_pending()
            self.kv.rewind(sequence, start)
        elif sequence.prediction is not None:
            self._drafting.settle(sequence)
        if jumped and sequence.draft is None:
            # A step planned ahead continued from this token alone, so its sample does not count.
            # The token's KV counts, unless its logits are still wanted or the request is over.
            sequence.drop_pending()
        if isinstance(verdict, Retreat):
            self._running.retreat(sequence, verdict.length)
            return None
        sequence.ending = verdict
        if verdict is not None and (verdict.finish == "error" or not sequence.scores_missing):
            return self._finish(sequence)
        if sequence.decoding and sequence.length + sequence.pending > sequence.computed + 1:
            self._running.jumped(sequence)
        return None

    def fail(self, plan: StepPlan, error: RootlaceError) -> list[EngineOutput]:
        """The executor raised: forget all KV, end the request that made it raise.

        That is the only one of this step. Of several, each is computed again alone until it is past
        this place (`Suspects`). A step planned behind is dropped; its requests are computed again.
        Masks of a request that ends may still be under way; their matchers go with it.
        """
        flight = self._land(plan)
        guilty = self._suspects.accuse(flight)
        while self._flights:
            self._flights.popleft().drop()
        if self._suspects:
            flight.drop()
        updates = self.take_updates()
        self.kv.reset()
        for sequence in guilty:
            self._running.forget(sequence)
            ending = Ending("error", code=error.code, error=str(error))
            updates.append(self._end(sequence, output.last_update(sequence, ending)))
        self._running.restart()
        for sequence in self._by_rid.values():
            sequence.lose_pin()
        self._check_if_asked()
        return updates

    # ------------------------------------------------------------ how things stand

    def stats(self) -> dict[str, int | float]:
        """Counters since start, and how things stand (`blocks_*`, `nodes`, `waiting`, …)."""
        self.kv.retention.expire()
        pool, tree = self.kv.pool, self.kv.tree
        return {
            **self._count.values(),
            "forced_tokens": self._intake.forced_tokens,
            "jumps": self._intake.jumps,
            "retreats": self._intake.retreats,
            "retractions": self._running.retractions,
            "evicted_blocks": tree.evicted_blocks,
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.free,
            "blocks_used": pool.num_blocks - pool.available,
            "blocks_evictable": pool.evictable,
            "blocks_pinned": self.kv.retention.pins.blocks,
            "pins": len(self.kv.retention.pins),
            "nodes": tree.num_nodes,
            "tree_tokens": tree.num_tokens,
            "waiting": len(self._waiting) + len(self._running.retracted),
            "running": len(self._running.sequences),
            **self.kv.tiering.stats(),
        }

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant. O(everything); not while planning."""
        running, retracted = self._running.sequences, self._running.retracted
        self.kv.check(running)
        everyone = [*running, *retracted, *self._waiting]
        assert len(everyone) == len(self._by_rid), "a sequence is in two places or in none"
        for sequence in everyone:
            assert self._by_rid[sequence.rid] is sequence and not sequence.finished
        for queue in (running, retracted):
            assert queue == sorted(queue, key=by_order), "sequences are out of order"
        for sequence in (*retracted, *self._waiting):
            assert not sequence.table_len and sequence.node is None, f"{sequence} has KV"
        assert len(running) <= self._max_rows
        pending = Counter(s.rid for flight in self._flights for _, s in flight.wanted())
        for sequence in everyone:
            assert sequence.pending == pending[sequence.rid], f"{sequence}: {sequence.pending}"
        assert self.kv.enabled or not self.kv.tree.roots, "the tree is in use"

    # ------------------------------------------------------------ planning

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        if self._flights and self._drafting.requests:
            self._drafting.launched(self._running.sequences)
        order, version = self._running.depth_first(), self.kv.version
        flight = builder.build(
            order, self._sample_rows, lambda ready: self._decode_rows.lay_out(ready, order, version)
        )
        flight.begun = self._clock()
        self.kv.tiering.saving.launched()
        self._flights.append(flight)
        self._running.relax()
        self._count.steps += 1
        self._count.copies += len(flight.plan.copies)
        self._check_if_asked()
        return flight.plan

    def _land(self, plan: StepPlan) -> InFlightStep:
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError("this plan is not the oldest one under way")
        return self._flights.popleft()

    # ------------------------------------------------------------ inside

    def _finish(self, sequence: RequestState) -> EngineOutput:
        """End an admitted sequence that has nothing more to compute."""
        assert sequence.ending is not None
        self._running.remove(sequence)
        if not sequence.pinned and sequence.ending.finish != "error":
            self._pin_late(sequence)
        return self._end(sequence, output.last_update(sequence, sequence.ending))

    def _pin_late(self, sequence: RequestState) -> None:
        """Pin the prompt of a sequence that had no part in the tree before it ended."""
        try:
            self.kv.retention.check_pin(sequence, self._longest(sequence))
            if not sequence.pinned:
                self.kv.retention.pin(sequence)
        except PinRefused as error:
            sequence.ending = Ending("error", code=error.code, error=str(error))

    def _end(self, sequence: RequestState, update: EngineOutput) -> EngineOutput:
        """Forget `sequence`; `update` is the last there is of it."""
        assert update.finish is not None
        output.add_prompt_figures(sequence, update)
        self._drafting.ended(sequence)
        output.add_lost_drafts(sequence, update)
        sequence.finished = True
        self.kv.tiering.let_go(sequence)
        del self._by_rid[sequence.rid]
        self._streams -= sequence.request.emit_seconds > 0
        self._waiting.ended(sequence)
        if sequence.queued is not None:
            whole = update.finish in ("stop", "length")
            self._deadlines.ended(sequence, self._clock(), whole=whole)
        self.cache.request_ended(sequence.namespace)
        self._count.by_finish[update.finish] += 1
        return update

    def _longest(self, but: RequestState | None = None) -> int:
        """The most tokens that a sequence that is here may come to, but for one."""
        return max((one.full for one in self._by_rid.values() if one is not but), default=0)

    def _check_if_asked(self) -> None:
        if self.config.check_invariants:
            self.check()
