"""An executor for replays: it computes nothing, and knows how long each output is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.scheduler.plan import StepPlan, StepResult
from rootlace.runtime.simulation.workload import FIRST_OUTPUT, Workload

STOP = 2**31 - 1
"""The unit that ends a request."""


@dataclass(frozen=True)
class StepWork:
    """What a step does, in tokens: chunks of prompts, and rows that decode.

    `chunk_requests` are the requests whose prompt ends here, -1 for a chunk that was cut.
    """

    chunk_requests: np.ndarray
    chunk_tokens: np.ndarray
    chunk_ends: np.ndarray
    row_requests: np.ndarray
    row_tokens: np.ndarray
    row_contexts: np.ndarray


class ReplayExecutor:
    """Samples as many units per request as its output takes, the last of them `STOP`.

    A request's number is its seed. Its first unit, sampled where the prompt ends, is one token;
    each further one is `granularity` tokens, sampled in a step that stands for as many of the
    engine's (the last one: for what is left). Unlike the engine's simulated executor this one has
    no memory and verifies nothing: its time per step does not depend on the context.
    """

    def __init__(self, workload: Workload) -> None:
        self._size = workload.granularity
        self._outputs = workload.outputs
        units = 1 + -(-(workload.outputs - 1) // self._size)
        self.most_units = int(units.max())
        self._last: list[int] = (units - 1).tolist()

    def run(self, plan: StepPlan) -> tuple[StepResult, StepWork]:
        last = self._last
        requests = [sample.params.seed or 0 for sample in plan.samples]
        made = [len(sample.token_ids) - sample.prompt_len for sample in plan.samples]
        found = [
            STOP if before == last[number] else FIRST_OUTPUT + number
            for number, before in zip(requests, made, strict=True)
        ]
        result = StepResult(np.array(found, np.int32), [None] * len(found), [])
        numbers, outputs = np.array(requests, np.int64), np.array(made, np.int64)
        if plan.num_tokens == len(found) == plan.num_rows and outputs.all():
            none = numbers[:0]
            return result, self._work(plan, none, none, none, numbers, outputs, slice(None))

        counts = np.diff(plan.row_start).astype(np.int64)
        sampled = np.array([sample.row for sample in plan.samples], np.int64)
        number_of = np.full(len(counts), -1, np.int64)
        number_of[sampled] = numbers
        made_of = np.zeros(len(counts), np.int64)
        made_of[sampled] = outputs
        # A sequence that comes back after a retraction has outputs and is prefilled all the same.
        decodes = (made_of > 0) & (counts == 1)
        chunks = ~decodes
        work = self._work(
            plan,
            number_of[chunks],
            counts[chunks],
            plan.context_len[chunks].astype(np.int64),
            number_of[decodes],
            made_of[decodes],
            decodes,
        )
        return result, work

    def _work(
        self,
        plan: StepPlan,
        chunk_requests: np.ndarray,
        chunk_units: np.ndarray,
        chunk_ends: np.ndarray,
        row_requests: np.ndarray,
        row_made: np.ndarray,
        rows: np.ndarray | slice,
    ) -> StepWork:
        size = self._size
        return StepWork(
            chunk_requests=chunk_requests,
            chunk_tokens=chunk_units * size,
            chunk_ends=chunk_ends * size,
            row_requests=row_requests,
            row_tokens=np.minimum(self._outputs[row_requests] - 1 - (row_made - 1) * size, size),
            row_contexts=plan.context_len[rows].astype(np.int64) * size,
        )
