"""Steps computed where they are launched: what a CPU does, which has nothing to overlap with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import (
    MaskRow,
    PromptScoreRow,
    SampleRow,
    StepPlan,
    StepResult,
    TokenScores,
)
from rootlace.runtime.model.decoder.forward import Forward
from rootlace.runtime.model.executor.sources import fed, resolved
from rootlace.runtime.model.sampling.logit_edits import only_masked
from rootlace.runtime.model.sampling.mask_tables import MaskTables
from rootlace.runtime.model.sampling.sampler import sample
from rootlace.runtime.model.sampling.scores import concatenate, score_tokens

LOGITS_BYTES = 64 << 20
"""Logits of scored prompt tokens held at once; a long prompt is scored in parts of this size."""

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class PlainStep:
    """A step, its forward pass done. `before`: the tokens of the step launched before."""

    plan: StepPlan
    before: np.ndarray
    hidden: torch.Tensor | None = None
    result: StepResult | None = None
    error: Exception | None = None


class PlainSteps:
    """See `Executor`: `launch` computes, `collect` hands over. Not thread-safe."""

    def __init__(
        self,
        forward: Forward,
        kernels: KernelSet,
        masks: MaskTables,
    ) -> None:
        """`kernels` edit logits."""
        self._forward = forward
        self._kernels = kernels
        self._masks = masks
        self._last: PlainStep | None = None

    overlaps = False

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PlainStep:
        """Compute the step; a late plan's up to sampling. What that raises, `collect` raises."""
        step = PlainStep(plan, _NO_TOKENS)
        last, self._last = self._last, step
        try:
            if last is not None:
                step.before = _tokens_of(last, plan)
            if plan.num_tokens or len(plan.copies):
                step.hidden = self._forward.run(fed(plan, step.before))
            if not plan.late:
                self._finish(step, plan.samples)
        except Exception as error:
            step.error = error
        return step

    @torch.inference_mode()
    def sample(self, step: PlainStep, samples: Sequence[SampleRow]) -> None:
        """End the step of a late plan. What that raises, `collect` raises."""
        if step.error is not None:
            return
        try:
            self._finish(step, samples)
        except Exception as error:
            step.error = error

    def collect(self, step: PlainStep) -> StepResult:
        if step.error is None and step.result is None:
            step.error = RuntimeError("a late plan is to be sampled before its result is collected")
        if step.error is not None:
            raise step.error
        assert step.result is not None
        return step.result

    def prepare(self) -> bool:
        return False

    def stats(self) -> dict[str, int | float]:
        return {}

    # ------------------------------------------------------------ parts of a step

    def _finish(self, step: PlainStep, samples: Sequence[SampleRow]) -> None:
        plan, hidden = step.plan, step.hidden
        if hidden is None:
            step.result = StepResult(_NO_TOKENS, [], [])
            return
        if plan.wait_for_masks is not None:
            plan.wait_for_masks()
        token_ids, scores = self._sample(hidden[: len(samples)], resolved(samples, step.before))
        prompt_scores = []
        start = len(samples)
        for row in plan.prompt_scores:
            stop = start + len(row.targets)
            prompt_scores.append(score_prompt(self._forward, hidden[start:stop], row))
            start = stop
        step.hidden = None
        step.result = StepResult(token_ids, scores, prompt_scores)

    def _sample(
        self, hidden: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[np.ndarray, list[TokenScores | None]]:
        if not rows:
            return _NO_TOKENS, []
        if all(row.simple and not row.params.logprobs for row in rows):
            return self._forward.best(hidden, [row.mask for row in rows]), [None] * len(rows)
        logits = self._forward.logits(hidden, [_chosen_from(row) for row in rows])
        token_ids = sample(logits, rows, self._kernels, self._masks, self._forward.pick)
        return token_ids, score_samples(logits, token_ids, rows)


def _chosen_from(row: SampleRow) -> np.ndarray | MaskRow | None:
    """The mask of a row of which nothing is asked but one of the tokens it allows."""
    return row.mask if only_masked(row) and not row.params.logprobs else None


def score_samples(
    logits: torch.Tensor, token_ids: np.ndarray, rows: Sequence[SampleRow]
) -> list[TokenScores | None]:
    """Scores of the sampled tokens of those rows that ask for them. logits float32 [S, V]."""
    scores: list[TokenScores | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.params.logprobs]
    if asked:
        most = max(rows[i].params.top_logprobs for i in asked)
        if len(asked) < len(rows):
            logits = logits.index_select(0, torch.tensor(asked, device=logits.device))
        found = score_tokens(logits, token_ids[asked], most)
        for j, i in enumerate(asked):
            top = rows[i].params.top_logprobs
            scores[i] = TokenScores(
                found.logprobs[j : j + 1],
                found.top_ids[j : j + 1, :top],
                found.top_logprobs[j : j + 1, :top],
            )
    return scores


def score_prompt(forward: Forward, hidden: torch.Tensor, row: PromptScoreRow) -> TokenScores:
    """Scores of `row`'s targets, from the hidden states before them. In parts, so that memory does
    not grow with the prompt."""
    vocab_size = forward.vocab_size
    size = max(LOGITS_BYTES // (4 * vocab_size), 1)
    parts = [
        score_tokens(
            forward.logits(hidden[start : start + size]),
            row.targets[start : start + size],
            row.top_logprobs,
        )
        for start in range(0, len(row.targets), size)
    ]
    return concatenate(parts, row.top_logprobs)


def _tokens_of(last: PlainStep, plan: StepPlan) -> np.ndarray:
    """What the step before `plan`'s found, if it is known or needed."""
    if last.result is not None:
        return last.result.token_ids
    if last.error is None and last.plan.late:
        raise RuntimeError("a late plan is to be sampled before the next one is launched")
    if len(plan.feeds) or any(row.source >= 0 for row in plan.samples):
        raise RuntimeError("the step before failed, or there was none: its tokens are unknown")
    return _NO_TOKENS
