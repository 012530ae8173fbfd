"""Plans of decode steps where the tokens of the step before are not known yet."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from rootlace.runtime.contracts.plan import AutomatonState, SampleRow, StepPlan, StepResult
from rootlace.wire.protocol import SamplingParams
from tests.model.plans import Row, Work, make_plan

UNKNOWN = 0
"""Stands where a token is not known; nothing may come of it."""


def first_plan(rows: Sequence[Row], params: Sequence[SamplingParams]) -> StepPlan:
    """Prefill of all rows."""
    return make_plan([Work(row, params=p) for row, p in zip(rows, params, strict=True)])


def next_plan(rows: Sequence[Row], params: Sequence[SamplingParams]) -> StepPlan:
    """Return a plan of one token of each row, found by the plan before, with samples in the order
    of `rows`."""
    for row in rows:
        row.token_ids.append(UNKNOWN)
    plan = make_plan([Work(row, params=p) for row, p in zip(rows, params, strict=True)])
    samples = [
        replace(sample, token_ids=sample.token_ids[:-1], source=i)
        for i, sample in enumerate(plan.samples)
    ]
    feeds = np.array([(i, i) for i in range(len(rows))], np.int32)
    return replace(plan, samples=samples, feeds=feeds)


def late(plan: StepPlan, which: Sequence[int]) -> StepPlan:
    samples = [replace(s, late=i in which) for i, s in enumerate(plan.samples)]
    return replace(plan, samples=samples)


def final(plan: StepPlan, before: StepResult) -> list[SampleRow]:
    """The samples of a late plan once the step before is known: the late ones have no source."""
    return [
        replace(
            sample,
            token_ids=np.append(sample.token_ids, before.token_ids[sample.source]),
            source=-1,
            late=False,
        )
        if sample.late
        else sample
        for sample in plan.samples
    ]


def run_plain(
    executor: Any, rows: Sequence[Row], params: Sequence[SamplingParams], steps: int
) -> list[StepResult]:
    """Each step is collected before the next one is planned."""
    results = [executor.run(first_plan(rows, params))]
    for _ in range(steps):
        for row, token in zip(rows, results[-1].token_ids.tolist(), strict=True):
            row.token_ids.append(token)
        work = [Work(row, params=p) for row, p in zip(rows, params, strict=True)]
        results.append(executor.run(make_plan(work)))
    return results


def run_ahead(
    executor: Any,
    rows: Sequence[Row],
    params: Sequence[SamplingParams],
    steps: int,
    late_rows: Callable[[int], Sequence[int]] = lambda step: (),
) -> list[StepResult]:
    """Each step is launched while the one before is under way."""
    before = executor.launch(first_plan(rows, params))
    results = []
    for step in range(steps):
        plan = late(next_plan(rows, params), late_rows(step))
        launched = executor.launch(plan)
        results.append(executor.collect(before))
        take_behind(rows, results[-1])
        if plan.late:
            executor.sample(launched, final(plan, results[-1]))
        before = launched
    return [*results, executor.collect(before)]


def take_behind(rows: Sequence[Row], result: StepResult) -> None:
    """Fill in the last token of each row, which a launched plan already computes."""
    for row, token in zip(rows, result.token_ids.tolist(), strict=True):
        assert row.token_ids[-1] == UNKNOWN and row.computed == len(row.token_ids)
        row.token_ids[-1] = token


def with_automata(plan: StepPlan, states: Sequence[AutomatonState | None]) -> StepPlan:
    samples = [replace(s, automaton=a) for s, a in zip(plan.samples, states, strict=True)]
    return replace(plan, samples=samples)
