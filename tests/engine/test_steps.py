"""Steps of the engine with overlap: order of calls, faults of the executor, what is told when."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.contracts.plan import ExecutorLost, SampleRow, StepPlan, StepResult
from rootlace.runtime.engine.core import TRUSTED_STEPS, Steps
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import Overloaded
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness, Outcome
from tests.scheduler.matchers import Script, Stepped
from tests.simulated_executor import CostModel, SimulatedExecutor, SimulatedStep

VOCAB = 50


class Logged(SimulatedExecutor):
    """Executor that records its calls, and raises at the calls named in `faults`, a number per
    method."""

    def __init__(self, **faults: int) -> None:
        super().__init__(64, 4, 1000, VOCAB, verify=True, overlaps=True)
        self.calls: list[tuple[str, int]] = []
        self.faults = faults
        self.sampled = 0
        self.raised = 0

    def note(self, what: str, step: int) -> None:
        self.calls.append((what, step))
        if sum(name == what for name, _ in self.calls) == self.faults.get(what):
            self.raised += 1
            raise Overloaded("injected") if what == "launch" else RuntimeError("injected")

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self.note("launch", plan.step)
        return super().launch(plan)

    def sample(self, launched: SimulatedStep, samples: Sequence[SampleRow]) -> None:
        super().sample(launched, samples)
        self.note("sample", launched.plan.step)

    def collect(self, launched: SimulatedStep) -> StepResult:
        result = super().collect(launched)
        self.note("collect", launched.plan.step)
        return result


def harness(executor: SimulatedExecutor, overlap: bool = True) -> Harness:
    return Harness(executor, block_size=4, overlap=overlap, automata=True)


def submit(harness: Harness) -> list[int]:
    """Submit one request of each kind; they end at different steps."""
    rids = []
    for i, matcher in enumerate(
        [
            None,
            partial(Script, 1, 9, VOCAB, 4),
            partial(Stepped, 2, 12, VOCAB, 2),
            partial(Script, 3, 9, VOCAB, 4, True),
            None,
        ]
    ):
        params = SamplingParams(
            max_tokens=7 + 2 * i,
            seed=0,
            logprobs=i % 2 == 0,
            presence_penalty=0.1 if i == 4 else 0.0,
            prompt_logprobs_from=0 if i == 0 else None,
        )
        made = None if matcher is None else matcher()
        rids.append(harness.add([1, 2, 3, i], params, matcher=made, jump=True))
    return rids


def run(executor: SimulatedExecutor, overlap: bool = True) -> dict[int, Outcome]:
    harnessed = harness(executor, overlap)
    submit(harnessed)
    harnessed.finish()
    return harnessed.outcomes


def test_each_step_is_launched_before_the_one_before_it_is_collected() -> None:
    executor = Logged()
    outcomes = run(executor)
    calls = executor.calls
    steps = max(step for _, step in calls)
    for step in range(1, steps + 1):
        if calls.index(("launch", step)) < calls.index(("collect", step - 1)):
            continue
        assert step > steps - 3, "only where nothing could be planned ahead"
    for what, step in calls:
        if what == "sample":
            at = calls.index((what, step))
            assert calls[at - 1] == ("collect", step - 1)
    assert any(what == "sample" for what, _ in calls)
    assert outcomes == run(Logged(), overlap=False)


@pytest.mark.parametrize("what", ["launch", "sample", "collect"])
@pytest.mark.parametrize("when", [1, 2, 3, 5, 8])
def test_a_fault_that_does_not_come_back_ends_nobody_in_company(what, when) -> None:
    executor = Logged(**{what: when})
    harnessed = harness(executor)
    first = submit(harnessed)
    for _ in range(3):
        harnessed.step()
    second = submit(harnessed)
    harnessed.finish()  # `Outcome.add` sees to it that nobody ends twice
    wanted = list(run(Logged(), overlap=False).values())
    for rids in (first, second):
        for rid, outcome in zip(rids, wanted, strict=True):
            mine = harnessed.outcomes[rid]
            assert mine.token_ids == outcome.token_ids and mine.finish == outcome.finish
            assert mine.logprobs == outcome.logprobs
    assert executor.raised == 1
    harnessed.scheduler.cache.flush()
    assert harnessed.scheduler.stats()["blocks_free"] == 64


@pytest.mark.parametrize("what", ["launch", "sample", "collect"])
def test_an_executor_that_is_lost_ends_the_engine(what) -> None:
    """The supervisor starts the engine again; requests get no error."""

    class Lost(Logged):
        def note(self, name: str, step: int) -> None:
            self.calls.append((name, step))
            if name == what and step >= 2:
                raise ExecutorLost("the device is gone")

    harnessed = harness(Lost())
    rids = submit(harnessed)
    with pytest.raises(ExecutorLost):
        harnessed.finish()
    assert not any(harnessed.outcomes[rid].finish for rid in rids)


def test_a_token_is_told_as_soon_as_its_step_is_done() -> None:
    executor = Logged()
    harnessed = harness(executor)
    harnessed.add([1, 2, 3], SamplingParams(max_tokens=3, seed=0))
    told = []
    while harnessed.scheduler.has_work:
        harnessed.step()
        told.append((len(harnessed.outcomes[0].token_ids), executor.calls[-1]))
    # The prompt's step is launched at once; then every step tells what the one before found.
    assert told[0] == (0, ("launch", 0))
    assert told[1:] == [(1, ("collect", 0)), (2, ("collect", 1)), (3, ("collect", 2))]
    assert executor.calls[1:3] == [("launch", 1), ("collect", 0)]


def test_a_step_under_way_is_finished_when_the_engine_stops() -> None:
    executor = Logged()
    scheduler = Scheduler(
        SchedulerConfig(check_invariants=True), CacheConfig(block_size=4, num_blocks=64), 1000
    )
    harnessed = harness(executor)
    steps = Steps(scheduler, executor, True, harnessed.take)
    assert steps.step() == [] and steps.finish() == []
    harnessed.scheduler, harnessed.steps = scheduler, steps
    harnessed.add([1, 2, 3], SamplingParams(max_tokens=9, seed=0))
    harnessed.step()
    (update,) = steps.finish()
    assert len(update.token_ids) == 1 and steps.finish() == []
    assert steps.count == 1 and steps.busy > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_held_back_is_told_before_a_prompt_is_computed(overlap: bool) -> None:
    """A stream that is told once an hour, and a prompt that comes in between."""
    executor = SimulatedExecutor(256, 4, 1000, 100, verify=True, overlaps=overlap)
    scheduler = Scheduler(
        SchedulerConfig(check_invariants=True), CacheConfig(block_size=4, num_blocks=256), 1000
    )
    told: list[EngineOutput] = []
    steps = Steps(scheduler, executor, overlap, told.extend)
    params = SamplingParams(max_tokens=40, seed=0)
    stream = EngineRequest(0, np.array([1, 2, 3], np.int32), params, emit_seconds=3600.0)
    scheduler.add(stream)
    landed: list[EngineOutput] = []
    for _ in range(10):
        landed += steps.step()
    assert [len(update.token_ids) for update in landed] == [1] and not told
    scheduler.add(EngineRequest(1, np.array([7, 8, 9], np.int32), params))
    for _ in range(3):
        landed += steps.step()
    (early,) = told
    assert early.rid == 0 and early.finish is None
    known = 1 + len(early.token_ids)
    assert known >= 8, "all that was known by then"
    while scheduler.has_work:
        landed += steps.step()
    rest = [update for update in landed if update.rid == 0]
    assert [len(update.token_ids) for update in rest] == [1, 40 - known]
    assert rest[-1].finish == "length"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_held_back_tokens_come_with_their_scores(overlap: bool, seed: int) -> None:
    """Scores of forced tokens come with the step that computes them; prompts run in between."""

    def told(emit_seconds: float) -> list[tuple[list[int], list[float], list[int]]]:
        executor = SimulatedExecutor(512, 4, 1000, 100, verify=True, overlaps=overlap)
        scheduler = Scheduler(
            SchedulerConfig(max_step_tokens=16, check_invariants=True),
            CacheConfig(block_size=4, num_blocks=512),
            1000,
            executor.clock,
            vocab_size=100,
        )
        outcomes = [Outcome() for _ in range(12)]

        def take(updates: list[EngineOutput]) -> None:
            for update in updates:
                outcomes[update.rid].add(update)

        steps = Steps(scheduler, executor, overlap, take)
        for rid in range(len(outcomes)):
            params = SamplingParams(max_tokens=25, seed=rid, logprobs=True)
            request = EngineRequest(
                rid,
                np.arange(3 + 2 * rid, dtype=np.int32),
                params,
                emit_seconds=emit_seconds,
            )
            matcher = Script(seed + rid, 18, 100, forcing=6) if rid % 3 else None
            scheduler.add(request, matcher, jump_forward=True)
            for _ in range(3):
                take(steps.step())
        while scheduler.has_work:
            take(steps.step())
        return [(o.token_ids, o.logprobs, o.forced) for o in outcomes]

    at_once = told(0.0)
    assert any(forced for _, _, forced in at_once)
    assert all(len(tokens) == len(scores) for tokens, scores, _ in at_once)
    assert told(0.02) == at_once


@pytest.mark.parametrize("slower", [1.0, 10.0])
def test_a_step_under_way_is_forecast_by_those_before(slower: float) -> None:
    """Nothing is said of the first ones, and a slow machine's steps are expected to be slow."""
    cost = CostModel(step=0.05 * slower, token=0.01 * slower, context=0.0)
    executor = SimulatedExecutor(64, 4, 200, 100, cost)
    scheduler = Scheduler(
        SchedulerConfig(), CacheConfig(4, 64), 200, executor.clock, vocab_size=100
    )
    seen: list[float] = []

    class Looks(SimulatedExecutor):
        def launch(self, plan: StepPlan) -> SimulatedStep:
            seen.append(steps.forecast)
            return executor.launch(plan)

        def collect(self, launched: SimulatedStep) -> StepResult:
            return executor.collect(launched)

    steps = Steps(scheduler, Looks(64, 4, 200, 100), False, lambda updates: None)
    scheduler.add(
        EngineRequest(1, np.array([1, 2], np.int32), SamplingParams(max_tokens=30, seed=0))
    )
    while scheduler.has_work:
        steps.step()
    assert set(seen[:TRUSTED_STEPS]) == {-1.0} and steps.forecast == 0.0
    assert seen[TRUSTED_STEPS:] == pytest.approx([0.06 * slower] * (30 - TRUSTED_STEPS), rel=0.05)
