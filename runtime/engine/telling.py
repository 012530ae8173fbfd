"""What an engine says of itself to who chooses among several."""

from __future__ import annotations

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.messages import CacheChanged, CostMeasured, FromEngine
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.scheduler.cache_control import CacheControl
from rootlace.runtime.scheduler.measured_cost import MeasuredCost

_NONE = np.empty(0, np.uint64)
_STEPS = 256
"""Costs are told after 2, 4, 8 and so on steps, and then after each so many more."""


class Telling:
    """What its cache holds, as it changes, and what its steps take."""

    def __init__(self, cache: CacheControl, max_step_tokens: int, digest_key: bytes = b"") -> None:
        cache.keep_journal(digest_key)
        self._cache = cache
        self._cost = MeasuredCost(max_step_tokens)
        self._next_cost = 2
        self._number = 0
        self._all_of_it = False

    def tell_all(self) -> None:
        """Say all that is held, next."""
        self._all_of_it = True

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self._cost.note(plan, seconds)

    def take(self) -> list[FromEngine]:
        """What is to be told now; often nothing."""
        said: list[FromEngine] = []
        change = self._cache.changes(self._all_of_it)
        below = self._cache.changes_below(change is not None and change.fresh)
        if change is not None or below:
            change = change or Change(_NONE, _NONE)
            self._all_of_it = False
            self._number += 1
            said.append(
                CacheChanged(self._number, change.added, change.removed, change.fresh, below)
            )
        if self._cost.steps >= self._next_cost:
            self._next_cost = self._cost.steps + min(self._cost.steps, _STEPS)
            said.append(CostMeasured(self._cost.cost()))
        return said
