"""Scheduler over the simulated executor with verified memory, and the expected outputs."""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rootlace.runtime.cache.tier import HourlyBytes
from rootlace.runtime.config import CacheConfig, Eviction, SchedulerConfig
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest, Pooling
from rootlace.runtime.contracts.plan import SampleRow, StepPlan
from rootlace.runtime.scheduler.admission import Headroom
from rootlace.runtime.scheduler.masks import MaskThreads, StepMasks
from rootlace.runtime.scheduler.offload.levels import Level, Tiers
from rootlace.runtime.scheduler.request import RequestState
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import SamplingParams
from rootlace.wire.sampling import PLAIN, Handling
from tests.simulated_executor import (
    SimulatedExecutor,
    SimulatedStep,
    history_hash,
    made_up_logprobs,
)
from tests.simulated_store import SimulatedStore


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams
    namespace: str
    constrain: Callable[[], Matcher] | None = None
    jump: bool = False
    adapter: int = -1
    max_length: int = 0
    updates: list[EngineOutput] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def finish(self) -> str | None:
        return self.updates[-1].finish if self.updates else None

    @property
    def cached(self) -> int | None:
        values = [u.facts.cached_tokens for u in self.updates if u.facts is not None]
        assert len(set(values)) <= 1, "cached_tokens changed"
        return values[0] if values else None

    @property
    def forced(self) -> list[int]:
        """Which outputs were told to be forced, as indices."""
        found, start = [], 0
        for update in self.updates:
            assert all(0 <= at < len(update.token_ids) for at in update.forced)
            found += [start + at for at in update.forced]
            start += len(update.token_ids)
        return found

    @property
    def logprobs(self) -> list[float]:
        parts = [u.scores.logprobs.tolist() for u in self.updates if u.scores is not None]
        return [value for part in parts for value in part]

    @property
    def prompt_targets(self) -> list[int]:
        """The prompt tokens that were asked about, all with the first update. Each has a score but
        the prompt's first one."""
        assert all(update.prompt_targets is None for update in self.updates[1:])
        scores = self.updates[0].prompt_token_scores()
        assert all(
            (score.logprob is None) == (at == 0 == self.params.prompt_logprobs_from)
            for at, score in enumerate(scores)
        )
        return [score.token_id for score in scores]

    def fails(self) -> bool:
        """Return whether the job ended with an error of its own, not an injected one."""
        return self.finish == "error" and self.updates[-1].error != "injected"


@dataclass
class Cold:
    output: list[int]
    finish: str
    forced: list[int] = field(default_factory=list)
    code: str = ""


class World:
    """Every invariant is checked after every action, every plan by the executor's memory.

    With `overlap`, `step` plans and launches a step and commits the one before it.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        context_length: int = 1000,
        vocab_size: int = 100,
        enabled: bool = True,
        eviction: Eviction = "lru",
        max_pinned: float = 0.5,
        filler: MaskThreads | None = None,
        overlap: bool = False,
        automata: bool = False,
        headroom: Headroom | None = None,
        stores: tuple[SimulatedStore, ...] = (),
        hourly_bytes: int | None = None,
        eager: bool = False,
        spot_seconds: float = 0.0,
        draft_seconds: float = math.inf,
        **config: Any,
    ) -> None:
        """Build the world. `stores` are below the pool, with blocks of one byte."""
        self.overlap = overlap
        self.flights: deque[SimulatedStep] = deque()
        self.late_rows = 0
        self.executor = SimulatedExecutor(
            num_blocks, block_size, context_length, vocab_size, verify=True
        )
        self.executor.stores = list(stores)
        clock = self.executor.clock
        wear = None if hourly_bytes is None else HourlyBytes(hourly_bytes, clock)
        levels = [
            Level(s.name, s.tier, s, wear, 1, s.name == "disk", eager and not at)
            for at, s in enumerate(stores)
        ]
        self.scheduler = Scheduler(
            SchedulerConfig(check_invariants=True, **config),
            CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                enabled=enabled,
                eviction=eviction,
                max_pinned=max_pinned,
            ),
            context_length,
            self.executor.clock,
            vocab_size=vocab_size,
            masks=StepMasks(vocab_size, filler, spot_seconds, draft_seconds),
            automata=automata,
            headroom=headroom,
            adapters=("one", "two"),
            tiers=Tiers(tuple(levels)) if levels else None,
        )
        if levels:
            self.scheduler.pace.begin(1, 1.0)  # reading is faster than that
        self.max_length = min(context_length, num_blocks * block_size + 1)
        self.jobs: dict[int, Job] = {}
        self.released: list[tuple[Hashable, list[int]]] = []
        """Tokens that sequences had computed at their release, by namespace: these are cached then.
        """
        self._release = self.scheduler.kv.release
        self.scheduler.kv.release = self._note_release  # type: ignore[method-assign]

    def _note_release(self, sequence: RequestState) -> None:
        tokens = sequence.tokens[: min(sequence.computed, sequence.length)].tolist()
        self.released.append((sequence.namespace, tokens))
        self._release(sequence)

    # ------------------------------------------------------------ doing

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        namespace: str = "",
        program: str = "",
        adapter: str = "",
        constrain: Callable[[], Matcher] | None = None,
        jump: bool = True,
        output: list[int] | None = None,
        emit_every: int = 1,
        emit_seconds: float = 0.0,
        pooling: Pooling = "none",
        handling: Handling = PLAIN,
        client: str = "",
        max_pins: int | None = None,
        suspected: int = 0,
        predict: Callable[[list[int]], list[int]] | None = None,
        **params: Any,
    ) -> int:
        """Submit a request. `predict` makes the prediction of its output."""
        rid = len(self.jobs)
        matcher = None if constrain is None else constrain()
        for token in output or () if matcher is not None else ():
            assert matcher is not None and matcher.advance(token)
        wanted = SamplingParams(max_tokens=max_tokens, seed=0, **params)
        predicted: list[int] = []
        if predict is not None:
            number = ("one", "two").index(adapter) if adapter else -1
            predicted = predict(self.cold(prompt, wanted, constrain, number).output)
        ids = np.array(prompt, np.int32)
        request = EngineRequest(
            rid,
            ids,
            wanted,
            np.array(output or [], np.int32),
            namespace=namespace,
            program=program,
            adapter=adapter,
            emit_every=emit_every,
            emit_seconds=emit_seconds,
            pooling=pooling,
            handling=handling,
            client=client,
            max_pins=max_pins,
            suspected=suspected,
            resumed=suspected > 0,
            prediction=np.array(predicted, np.int32),
        )
        self.scheduler.add(request, matcher, jump_forward=jump)
        block_size = self.scheduler.kv.block_size
        pinned = self.scheduler.kv.retention.pins.blocks * block_size
        self.jobs[rid] = Job(
            list(prompt),
            wanted,
            namespace,
            constrain,
            jump,
            self.scheduler._limits.adapter(request) if request.adapter else -1,
            self.scheduler._limits.beside(pinned).longest(request, block_size),
        )
        return rid

    def step(self) -> StepPlan | None:
        if self.overlap:
            plan = self.launch() if len(self.flights) < 2 else None
            if plan is None or len(self.flights) == 2:
                self.land()
            return plan
        plan = self.plan()
        self.take(self.scheduler.take_updates())
        if plan is not None:
            self.take(self.scheduler.held_back(plan))
            self.take(self.scheduler.commit(plan, self.executor.run(plan)))
        return plan

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.executor.move(self.scheduler.kv.tiering.moves.take())
        if plan is None:  # it may wait for them
            for store in self.executor.stores:
                store.go_on()
        return plan

    def launch(self) -> StepPlan | None:
        plan = self.plan()
        self.take(self.scheduler.take_updates())
        if plan is not None:
            self.flights.append(self.executor.launch(plan))
            assert not plan.late or len(self.flights) == 2
        return plan

    def land(self) -> None:
        """Commit the oldest step under way, if there is one."""
        if not self.flights:
            return
        step = self.flights.popleft()
        self.take(self.scheduler.held_back(step.plan))
        self.take(self.scheduler.commit(step.plan, self.executor.collect(step)))
        self.sample_late()

    def sample_late(self) -> None:
        for step in self.flights:
            if step.plan.late:
                self.late_rows += sum(sample.late for sample in step.plan.samples)
                self.executor.sample(step, self.scheduler.late_samples(step.plan))

    def land_all(self) -> None:
        while self.flights:
            self.land()

    def fail(self, error: RootlaceError) -> StepPlan | None:
        """The oldest step under way fails, or a new one."""
        if self.flights or self.overlap:
            if not self.flights:
                self.launch()
            if not self.flights:
                return None
            step = self.flights.popleft()
            self.executor.collect(step)  # nobody hears of it
            self.take(self.scheduler.fail(step.plan, error))
            self.sample_late()
            while self.flights:
                self.executor.collect(self.flights.popleft())
            return step.plan
        plan = self.plan()
        self.take(self.scheduler.take_updates())
        if plan is not None:
            self.take(self.scheduler.fail(plan, error))
        return plan

    def abort(self, rid: int) -> None:
        update = self.scheduler.abort(rid)
        if update is not None:
            self.take([update])

    def take(self, updates: list[EngineOutput]) -> None:
        for update in updates:
            job = self.jobs[update.rid]
            assert job.finish is None, "an update after the last one"
            job.updates.append(update)

    def drain(self, limit: int = 20000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end")

    def run(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> Job:
        """Run one request, alone or not, to its end."""
        rid = self.submit(prompt, max_tokens, **more)
        while self.jobs[rid].finish is None:
            self.step()
        return self.jobs[rid]

    # ------------------------------------------------------------ asking

    @property
    def stats(self) -> dict[str, int | float]:
        return self.scheduler.stats()

    def open_rids(self) -> list[int]:
        return [rid for rid, job in self.jobs.items() if job.finish is None]

    def match(self, tokens: list[int], namespace: str = "") -> int:
        return self.scheduler.kv.tree.match(namespace, np.array(tokens, np.int32))

    def expect_cold(self, *jobs: Job) -> None:
        """Check that each request's output is that of a run alone, token by token."""
        for job in jobs:
            self._expect_cold(job)

    def _expect_cold(self, job: Job) -> None:
        cold = self.cold(job.prompt, job.params, job.constrain, job.adapter, job.max_length)
        assert job.finish == cold.finish, job
        if cold.finish == "error":
            assert job.updates[-1].code == cold.code
            return
        assert job.output == cold.output
        assert job.forced == (cold.forced if job.jump else [])
        matched = job.updates[-1].matched
        assert matched is None or job.updates[-1].token_ids[-1:] == (matched,)
        first = job.params.prompt_logprobs_from
        assert job.prompt_targets == ([] if first is None else job.prompt[first:])
        if job.params.logprobs:
            tokens = np.array(job.prompt + job.output)
            before = history_hash(tokens, job.adapter)[len(job.prompt) - 1 : -1]
            wanted = made_up_logprobs(before, tokens[len(job.prompt) :])
            assert job.logprobs == wanted.tolist()

    def cold(
        self,
        prompt: list[int],
        params: SamplingParams,
        constrain: Callable[[], Matcher] | None = None,
        adapter: int = -1,
        max_length: int | None = None,
    ) -> Cold:
        """Return the expected output, from the definition of the simulated model alone.

        Every token is sampled here, including forced ones. A token is forced if it is the only
        allowed token, unless it is drawn to replace a refused one.
        """
        tokens = list(prompt)
        matcher = None if constrain is None else constrain()
        held = matcher is not None and matcher.can_rollback
        forced: list[int] = []
        if params.max_tokens and matcher is not None and matcher.is_finished():
            return Cold([], "stop")
        again = False
        while (output := len(tokens) - len(prompt)) < (params.max_tokens or 0):
            if output and len(tokens) >= (max_length or self.max_length):
                break
            banned = params.stop_token_ids if output < params.min_tokens else ()
            mask = None
            if matcher is not None:
                mask = np.zeros(-(-self.executor.vocab_size // 32), np.int32)
                matcher.fill_bitmask(mask)
            row = SampleRow(0, params, np.array(tokens), len(prompt), mask, banned)
            token = self.executor.next_token(int(history_hash(np.array(tokens), adapter)[-1]), row)
            if token < 0:
                return Cold(
                    [], "error", code="internal" if matcher is None else "constraint_not_met"
                )
            stops = token in params.stop_token_ids and not banned
            only = mask is not None and int(np.unpackbits(mask.view(np.uint8)).sum()) == 1
            if matcher is not None and (held or not stops) and not matcher.advance(token):
                undone = matcher.rollback_refused() if held else None
                if undone is None:
                    return Cold([], "error", code="constraint_not_met")
                del tokens[len(tokens) - undone :]
                forced = [at for at in forced if at < len(tokens) - len(prompt)]
                again = True
                continue
            if only and not again:
                forced.append(output)
            again = False
            tokens.append(token)
            if stops or (matcher is not None and matcher.is_finished()):
                return Cold(tokens[len(prompt) :], "stop", forced)
        return Cold(tokens[len(prompt) :], "length", forced)

    def expect_empty(self) -> None:
        """Check that a flush frees every block if nothing runs or is pinned."""
        self.land_all()
        assert not self.scheduler.has_work
        for pin in self.scheduler.kv.retention.pins.all():
            assert self.scheduler.cache.unpin(pin.id)
        self.scheduler.cache.flush()
        stats = self.stats
        assert stats["blocks_free"] == stats["blocks_total"]
        assert stats["nodes"] == 0 and stats["tree_tokens"] == 0
