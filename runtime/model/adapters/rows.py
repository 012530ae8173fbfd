"""Which tokens of a step belong to which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.contracts.plan import StepPlan


@dataclass(frozen=True)
class AdaptedTokens:
    """The tokens that go through one adapter, by its number: flat ones, and which of the step's
    wanted ones they are; int64."""

    adapter: int
    tokens: np.ndarray
    wanted: np.ndarray


def adapter_of_tokens(plan: StepPlan) -> np.ndarray:
    """int32 [T]: -1 for a token without adapter."""
    return np.repeat(plan.adapters, np.diff(plan.row_start))


def adapted_tokens(plan: StepPlan, wanted: np.ndarray) -> Sequence[AdaptedTokens]:
    """The groups of a step, none where nobody asks for an adapter. `wanted`: flat tokens."""
    if not len(plan.adapters):
        return ()
    of_token = adapter_of_tokens(plan)
    of_wanted = of_token[wanted]
    return [
        AdaptedTokens(
            number, np.flatnonzero(of_token == number), np.flatnonzero(of_wanted == number)
        )
        for number in np.unique(of_token).tolist()
        if number >= 0
    ]
