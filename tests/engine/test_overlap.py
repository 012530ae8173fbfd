"""Embedded model with forced overlap: the same results as without, in float32."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.engine.core import STEPS, Steps
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.masks import MaskThreads
from rootlace.wire.protocol import SamplingParams
from tests.engine.demo import CONSTRAINTS
from tests.engine.harness import Harness, greedy
from tests.waiting import eventually

BLOCK_SIZE = 16


def compare(first: Harness, second: Harness) -> None:
    for rid, one in first.outcomes.items():
        other = second.outcomes[rid]
        assert one.finish in ("stop", "length"), one
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        assert (one.forced, one.error) == (other.forced, other.error)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [ids for ids, _ in one.top] == [ids for ids, _ in other.top]


def both(
    runner: ModelRunner, fill: Any, *, automata: bool = False, **options: Any
) -> tuple[Harness, Harness]:
    """`fill(harness)` adds requests, and takes steps between."""
    harnesses = [
        Harness(
            runner,
            block_size=BLOCK_SIZE,
            max_step_tokens=128,
            overlap=overlap,
            automata=automata and overlap,
            **options,
        )
        for overlap in (False, True)
    ]
    for harness in harnesses:
        fill(harness)
        harness.finish()
        harness.scheduler.cache.flush()
        assert harness.scheduler.stats()["blocks_free"] == 256
    compare(*harnesses)
    return harnesses[0], harnesses[1]


@pytest.mark.parametrize("automata", [False, True])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constrained(runner, compiler, prompts, name, automata) -> None:
    grammar = compiler.compile(**CONSTRAINTS[name])
    filler = MaskThreads(1)

    def fill(harness: Harness) -> None:
        for i, prompt in enumerate(prompts):
            harness.add(prompt, greedy(60), matcher=grammar.matcher(), jump=bool(i % 2))
            harness.step()
        harness.add(prompts[0], greedy(40, stop_token_ids=(2,)))
        params = greedy(40, logprobs=True, top_logprobs=2)
        harness.add(prompts[3], params, matcher=grammar.matcher(), jump=True)

    try:
        off, on = both(runner, fill, automata=automata, filler=filler)
    finally:
        filler.close()
    assert any(outcome.forced for outcome in on.outcomes.values())
    steps = on.scheduler.stats()["steps"] - off.scheduler.stats()["steps"]
    assert steps <= 12 + on.scheduler.stats()["jumps"]


@pytest.mark.parametrize("name", ["regex", "choices", "schema"])
def test_rows_on_whole_automata_never_wait_for_the_host(runner, compiler, prompts, name) -> None:
    grammar = compiler.compile(**CONSTRAINTS[name])
    # It is made on another thread.
    eventually(lambda: grammar.matcher().automaton() is not None)
    late, stepped = [], []

    def fill(harness: Harness) -> None:
        plan = harness.scheduler.plan

        def noted() -> StepPlan | None:
            planned = plan()
            if planned is not None:
                late.append(planned.late)
                stepped.extend(row.automaton is not None for row in planned.samples)
            return planned

        if harness.steps is not None:
            harness.scheduler.plan = noted  # type: ignore[method-assign]
        for prompt in prompts:
            harness.add(prompt, greedy(40), matcher=grammar.matcher(), jump=name == "schema")

    both(runner, fill, automata=True)
    assert stepped and all(stepped) and not any(late)


def test_sampled_penalised_scored_and_stopped(runner, prompts) -> None:
    def fill(harness: Harness) -> None:
        for i, prompt in enumerate(prompts):
            for params in (
                {"temperature": 0.9, "top_p": 0.9},
                {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3},
                {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
                {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": (1, 2, 3, 300)},
                {"temperature": 1.2, "logit_bias": {17: 3.0}, "prompt_logprobs_from": 5},
            ):
                wanted = {"logprobs": bool(i % 2), "top_logprobs": 2 * (i % 2)}
                harness.add(prompt, SamplingParams(max_tokens=20 + i, seed=i, **params, **wanted))
            harness.step()

    both(runner, fill)


def test_forks_and_turns(runner, prompts) -> None:
    """Branches off a running generation, and turns that continue it."""

    def fill(harness: Harness) -> None:
        stem = harness.add(prompts[0], greedy(24), program="p")
        for _ in range(9):
            harness.step()
        for i in range(6):
            harness.add([*prompts[0], 40 + i, 50 + i], greedy(16), program="p")
        harness.finish()
        told = harness.outcomes[stem].token_ids
        for i in range(4):
            harness.add([*prompts[0], *told[: 8 * i + 5], 60 + i], greedy(16), program="p")
        harness.finish()

    off, on = both(runner, fill)
    last = [[h.outcomes[rid].cached_tokens for rid in range(7, 11)] for h in (off, on)]
    assert last[0] == last[1]


def test_a_pool_too_small_for_all(runner, prompts) -> None:
    def fill(harness: Harness) -> None:
        harness.scheduler._running.reserve = 0.0
        for i, prompt in enumerate(prompts * 2):
            harness.add([*prompt[:20], i], greedy(90))

    harnesses = []
    for overlap in (False, True):
        harness = Harness(
            runner, block_size=BLOCK_SIZE, num_blocks=24, max_step_tokens=128, overlap=overlap
        )
        fill(harness)
        harness.finish()
        assert harness.scheduler.stats()["retractions"] > 0
        harnesses.append(harness)
    compare(*harnesses)


def test_a_step_whose_late_samples_fail_is_over_once() -> None:
    plan = SimpleNamespace(step=1, num_rows=1, rids=(5,), context_len=(9,), forecast=0.5, late=True)
    record = np.full((STEPS + 1, 3), 7)
    collected: list[Any] = []

    def sample(*_: Any) -> None:
        raise RuntimeError("no mask")

    scheduler: Any = SimpleNamespace(
        plan=lambda: plan,
        take_updates=list,
        late_samples=lambda _: (),
        fail=lambda _, reason: [str(reason)],
    )
    executor: Any = SimpleNamespace(
        launch=lambda plan: SimpleNamespace(plan=plan), sample=sample, collect=collected.append
    )
    steps = Steps(scheduler, executor, True, [].append, record)
    (said,) = steps.step()
    assert "no mask" in str(said) and len(collected) == 1
    assert steps.count == 1 and not record[1, 0]
    assert steps.finish() == []
