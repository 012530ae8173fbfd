"""An executor for replays: it computes nothing, and ends each output at its length in the trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.contracts.plan import StepPlan, StepResult
from rootlace.runtime.simulation.workload import FIRST_OUTPUT, Workload

STOP = 2**31 - 1
"""The unit that ends a request."""

_NONE = np.empty(0, np.int64)


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
    engine's (the last one: for what is left). There is no KV memory and nothing is verified, so
    simulating a step takes no longer where contexts are long.
    """

    def __init__(self, workload: Workload) -> None:
        self._size = workload.granularity
        self._outputs = workload.outputs
        self._last: np.ndarray = workload.output_units - 1
        self._rows: _DecodingRows | None = None

    def run(self, plan: StepPlan) -> tuple[StepResult, StepWork]:
        """The step's samples, and what the engine would have computed for them."""
        rows = self._rows
        if rows is not None and rows.common is plan.common_blocks is not None:
            # The same rows as in the step before, and none of them has ended.
            rows.made += 1
            rows.left -= 1
            return self._decode(plan, rows)
        self._rows = None
        samples = plan.samples
        requests = np.array([sample.params.seed for sample in samples], np.int64)
        made = np.array([len(sample.token_ids) - sample.prompt_len for sample in samples], np.int64)
        left = self._last[requests] - made
        if plan.num_tokens == len(samples) == plan.num_rows and made.all():
            rows = self._rows = _DecodingRows(
                plan.common_blocks,
                requests,
                made,
                int(left.min()),
                StepResult((FIRST_OUTPUT + requests).astype(np.int32), [None] * len(samples), []),
                np.full(len(samples), self._size),
            )
            return self._decode(plan, rows)
        result = self._result(requests, left)
        counts = np.diff(plan.row_start).astype(np.int64)
        sampled = np.array([sample.row for sample in samples], np.int64)
        number_of = np.full(len(counts), -1, np.int64)
        number_of[sampled] = requests
        made_of = np.zeros(len(counts), np.int64)
        made_of[sampled] = made
        # A sequence that comes back after a retraction has outputs and is prefilled all the same.
        decodes = (made_of > 0) & (counts == 1)
        chunks = ~decodes
        contexts = np.multiply(plan.context_len, self._size, dtype=np.int64)
        return result, StepWork(
            chunk_requests=number_of[chunks],
            chunk_tokens=counts[chunks] * self._size,
            chunk_ends=contexts[chunks],
            row_requests=number_of[decodes],
            row_tokens=self._row_tokens(number_of[decodes], made_of[decodes]),
            row_contexts=contexts[decodes],
        )

    def _decode(self, plan: StepPlan, rows: _DecodingRows) -> tuple[StepResult, StepWork]:
        result, tokens = rows.result, rows.tokens
        if not rows.left:  # somebody ends, and the next step has other rows
            self._rows = None
            result = self._result(rows.requests, self._last[rows.requests] - rows.made)
            tokens = self._row_tokens(rows.requests, rows.made)
        contexts = np.multiply(plan.context_len, self._size, dtype=np.int64)
        return result, StepWork(_NONE, _NONE, _NONE, rows.requests, tokens, contexts)

    def _result(self, requests: np.ndarray, left: np.ndarray) -> StepResult:
        """`left`: how many units each of `requests` makes after this one."""
        found = np.where(left == 0, STOP, FIRST_OUTPUT + requests)
        return StepResult(found.astype(np.int32), [None] * len(found), [])

    def _row_tokens(self, requests: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Tokens in the next unit of `requests`, which have `made` that many units."""
        tokens: np.ndarray = self._outputs[requests] - 1 - (made - 1) * self._size
        return np.minimum(tokens, self._size)


@dataclass(slots=True)
class _DecodingRows:
    """The rows of a run of steps in which the same requests decode.

    Before this step they have `made` that many units each, and none ends within `left` more steps.
    `common` is the plans' (see `StepPlan.common_blocks`); `result` and `tokens` are those of a step
    in which nobody ends.
    """

    common: np.ndarray | None
    requests: np.ndarray
    made: np.ndarray
    left: int
    result: StepResult
    tokens: np.ndarray
