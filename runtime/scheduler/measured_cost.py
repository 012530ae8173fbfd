"""What an engine's steps cost, by those that it ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.contracts.step_cost import PRIOR, StepCost

_KEPT = 0.99
"""What an older step counts beside the next one."""
_PRIOR_WEIGHT = 1e-3
"""How much the prior, scaled to what steps take, counts beside them."""


class MeasuredCost:
    """Least squares over the steps of late, each weighed by its length (an error of a tenth counts
    the same in a short step as in a long one), with coefficients that are not negative;
    where they do not tell things apart, the `PRIOR` does."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        prior = PRIOR
        self._units = np.array([prior.step, prior.prefill, prior.decode, prior.context, prior.pair])
        self._products = np.zeros((5, 5))
        self._sums = np.zeros(5)
        self.steps = 0

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self.steps += 1
        parts = _work(plan) * self._units / max(seconds, 1e-6)
        self._products = _KEPT * self._products + np.outer(parts, parts)
        self._sums = _KEPT * self._sums + parts

    def cost(self) -> StepCost:
        if not self.steps:
            return replace(PRIOR, max_step_tokens=self._max_step_tokens)
        # As a whole, the prior is so many times too cheap.
        scale = self._sums.sum() / self._products.sum()
        weights = _PRIOR_WEIGHT * np.maximum(np.diag(self._products), 1e-12)
        products = self._products + np.diag(weights)
        sums = self._sums + weights * scale
        found, known = np.zeros(5), np.ones(5, bool)
        while known.any():
            found[:] = 0.0
            found[known] = np.linalg.solve(products[np.ix_(known, known)], sums[known])
            if (found >= 0).all():
                break
            known &= found > 0
        if not found[:2].any():
            found[0] = 1.0
        step, prefill, decode, context, pair = (found * self._units).tolist()
        return StepCost(
            step, prefill, decode, context, pair, self._max_step_tokens, "measured as it runs"
        )


def _work(plan: StepPlan) -> np.ndarray:
    """What `StepCost` multiplies: float64 [5], one for the step itself."""
    counts = np.diff(plan.row_start)
    prompts = counts > 1
    chunks, ends = counts[prompts].astype(np.float64), plan.context_len[prompts]
    return np.array(
        [
            1.0,
            chunks.sum(),
            len(counts) - len(chunks),
            plan.context_len[~prompts].sum(),
            np.dot(chunks, ends - chunks / 2),
        ]
    )
