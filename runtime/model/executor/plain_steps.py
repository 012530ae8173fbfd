"""Compute steps at their launch: a CPU has nothing to overlap with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from rootlace.kernels.interface import HostSampling
from rootlace.runtime.contracts.plan import (
    AutomatonState,
    ExecutorLost,
    PromptScoreRow,
    SampleRow,
    StepPlan,
    StepResult,
    TokenScores,
)
from rootlace.runtime.model import sampler
from rootlace.runtime.model.automaton_table import HostMasks, Mask
from rootlace.runtime.model.decoder.interface import Forward, Hidden
from rootlace.runtime.model.executor.steps import Steps
from rootlace.runtime.model.sampler import Sampler

# Sources ------------------------------------------------------------------------------------------
#
# Fill in tokens of the step before, once that step's tokens are on the host.


def fed(plan: StepPlan, before: np.ndarray) -> StepPlan:
    """Return the plan with its fed tokens filled in. `before`: int32, tokens of the plan launched
    before. For a failed row (-1) any token will do."""
    token_ids = plan.token_ids.copy()
    token_ids[plan.feeds[:, 0]] = np.maximum(before[plan.feeds[:, 1]], 0)
    return replace(plan, token_ids=token_ids)


def _resolved(row: SampleRow, before: np.ndarray) -> SampleRow:
    """Return the row without a source, and with a mask in place of an automaton's state."""
    token_ids, mask, token = row.token_ids, row.mask, None
    if row.source >= 0:
        token = int(before[row.source])
        token_ids = np.append(token_ids, np.int32(token))
    if mask is None and row.automaton is not None:
        mask = _mask(row.automaton, token)
    return replace(row, token_ids=token_ids, mask=mask, source=-1, automaton=None)


def _mask(at: AutomatonState, token: int | None) -> np.ndarray:
    """Return the mask, int32 [words], once the automaton has taken `token` (None: no token)."""
    automaton, state = at.automaton, at.state
    if token is not None and state >= 0:
        known = 0 <= token < len(automaton.token_class)
        state = int(automaton.next_state[state, automaton.token_class[token]]) if known else -1
    if state < 0:
        return np.zeros(automaton.masks.shape[1], np.int32)
    mask: np.ndarray = automaton.masks[automaton.mask_of[state]]
    return mask


# Plain steps --------------------------------------------------------------------------------------


_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class PlainStep:
    """Step whose forward pass is done. `before`: the tokens of the step launched before."""

    plan: StepPlan
    before: np.ndarray
    hidden: Hidden | None = None
    result: StepResult | None = None
    error: Exception | None = None


class PlainSteps(Steps):
    """Steps on a CPU: see `Executor`. `launch` computes, `collect` hands over. Not thread-safe."""

    def __init__(
        self, forward: Forward, kernels: HostSampling, damage: threading.Event | None = None
    ) -> None:
        """`kernels` sample and score. `damage`: set when the weights turn out to be damaged."""
        self._damage = damage
        self._forward = forward
        self._score = kernels.score_tokens
        self._masks = HostMasks(forward.vocab_size)
        self._sampler = Sampler(forward.vocab_size, kernels, self._masks)
        self._last: PlainStep | None = None

    def launch(self, plan: StepPlan) -> PlainStep:
        """Compute the step, a late plan's only up to sampling. `collect` raises errors."""
        step = PlainStep(plan, _NO_TOKENS)
        last, self._last = self._last, step
        try:
            if last is not None:
                step.before = _NO_TOKENS if last.result is None else last.result.token_ids
                if last.result is None:
                    _check_unneeded(last, plan)
            if len(plan.token_ids) or len(plan.copies):
                known = fed(plan, step.before) if len(plan.feeds) else plan
                step.hidden = self._forward.run(known)
            self._finish(step, plan.samples)
        except Exception as error:
            step.error = error
        return step

    def sample(self, step: PlainStep, samples: Sequence[SampleRow]) -> None:
        """End the step of a late plan. `collect` raises errors."""
        if step.error is not None:
            return
        try:
            self._finish(step, samples)
        except Exception as error:
            step.error = error

    def collect(self, step: PlainStep) -> StepResult:
        if self._damage is not None and self._damage.is_set():
            raise ExecutorLost("the weights in memory are damaged")
        if step.error is None and step.result is None:
            step.error = RuntimeError("a late plan is to be sampled before its result is collected")
        if step.error is not None:
            raise step.error
        assert step.result is not None
        return step.result

    # ------------------------------------------------------------ parts of a step

    def _finish(self, step: PlainStep, samples: Sequence[SampleRow]) -> None:
        """Sample, score and pool, unless a row is late: `sample` then brings the final rows."""
        plan, hidden = step.plan, step.hidden
        if hidden is None:
            step.result = StepResult(_NO_TOKENS, [], [])
            return
        known = plain = True
        masked = False
        masks: list[Mask] = []
        for row in samples:
            if row.late:
                return
            if row.source >= 0 or row.automaton is not None:
                known = False
            if not row.simple or row.banned or row.params.logprobs:
                plain = False
            if row.mask is not None:
                masked = True
            masks.append(row.mask)
        if plan.wait_for_masks is not None:
            plan.wait_for_masks()
        step.hidden = None
        if plain and known and 0 < len(samples) == len(hidden):
            best = self._forward.best(hidden, masks if masked else ())
            if best is not None:
                step.result = StepResult(best, [None] * len(best), [])
                return
        if not known:
            samples = [_resolved(row, step.before) for row in samples]
        token_ids, found = self._sample(hidden[: len(samples)], samples)
        pooling = len(hidden) - sum(row.count for row in plan.pooled)
        prompt_scores = self._score_prompts(hidden[len(samples) : pooling], plan.prompt_scores)
        vectors = []
        for one in plan.pooled:
            part, pooling = hidden[pooling : pooling + one.count], pooling + one.count
            scored = self._forward.logits(part).copy() if one.labels else None
            vectors.append(self._forward.vectors(part) if scored is None else scored)
        step.result = StepResult(token_ids, found, prompt_scores, vectors)

    def _sample(
        self, hidden: Hidden, rows: Sequence[SampleRow]
    ) -> tuple[np.ndarray, list[TokenScores | None]]:
        if not rows:
            return _NO_TOKENS, []
        masks = [self._masks.of(row) for row in rows]
        if self._sampler.takes_best(rows):
            best = self._forward.best(hidden, masks)
            if best is not None:
                return best, [None] * len(rows)
        # Without scores, logits that a row's mask excludes are never read.
        chosen_from = [
            None if row.params.logprobs else mask for row, mask in zip(rows, masks, strict=True)
        ]
        logits = self._forward.logits(hidden, chosen_from)
        # The masks have the bans already.
        masked = [
            replace(row, mask=mask, banned=()) if row.banned else row
            for row, mask in zip(rows, masks, strict=True)
        ]
        token_ids = self._sampler.sample(logits, masked)
        return token_ids, score_samples(self._score, logits, token_ids, rows)

    def _score_prompts(self, hidden: Hidden, rows: Sequence[PromptScoreRow]) -> list[TokenScores]:
        """Score the rows' targets, from the hidden states before them."""
        if not rows:
            return []
        found = sampler.score_in_parts(
            self._score,
            lambda part: self._forward.logits(hidden[part]),
            np.concatenate([row.targets for row in rows]),
            max(row.top_logprobs for row in rows),
            self._forward.vocab_size,
        )
        return sampler.of_prompts(rows, *found)


def score_samples(
    score: Callable[..., Any], logits: np.ndarray, token_ids: np.ndarray, rows: Sequence[SampleRow]
) -> list[TokenScores | None]:
    """Score the sampled tokens of the rows that ask for scores. logits float32 [S, V]."""
    found: list[TokenScores | None] = [None] * len(rows)
    picks = [i for i, row in enumerate(rows) if row.params.logprobs]
    if picks:
        top = max(rows[i].params.top_logprobs for i in picks)
        if len(picks) < len(rows):
            logits = logits[picks]
        parts = score(logits, token_ids[picks], top)
        for i, one in zip(picks, sampler.of_samples([rows[i] for i in picks], *parts), strict=True):
            found[i] = one
    return found


def _check_unneeded(last: PlainStep, plan: StepPlan) -> None:
    """Raise RuntimeError if `plan` needs the tokens of a step without a result."""
    if last.error is None:
        raise RuntimeError("a late plan is to be sampled before the next one is launched")
    if len(plan.feeds) or any(row.source >= 0 for row in plan.samples):
        raise RuntimeError("the step before failed, or there was none: its tokens are unknown")
