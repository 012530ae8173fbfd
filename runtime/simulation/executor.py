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
        size, last = self._size, self._last
        rows, requests, made, found = [], [], [], []
        for sample in plan.samples:
            number = sample.params.seed
            assert number is not None
            before = len(sample.token_ids) - sample.prompt_len
            rows.append(sample.row)
            requests.append(number)
            made.append(before)
            found.append(STOP if before == last[number] else FIRST_OUTPUT + number)
        result = StepResult(np.array(found, np.int32), [None] * len(found), [])

        counts = np.diff(plan.row_start)
        sampled = np.array(rows, np.int64)
        number_of = np.full(len(counts), -1, np.int64)
        number_of[sampled] = requests
        made_of = np.zeros(len(counts), np.int64)
        made_of[sampled] = made
        # A sequence that comes back after a retraction has outputs and is prefilled all the same.
        decodes = (made_of > 0) & (counts == 1)
        decoding = number_of[decodes]
        left = self._outputs[decoding] - 1 - (made_of[decodes] - 1) * size
        chunks = ~decodes
        work = StepWork(
            chunk_requests=number_of[chunks],
            chunk_tokens=counts[chunks].astype(np.int64) * size,
            chunk_ends=plan.context_len[chunks].astype(np.int64) * size,
            row_requests=decoding,
            row_tokens=np.minimum(left, size),
            row_contexts=plan.context_len[decodes].astype(np.int64) * size,
        )
        return result, work
