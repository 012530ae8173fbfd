"""What lies below the pool, for others to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rootlace.runtime.contracts.messages import Below
from rootlace.runtime.scheduler.tiers.levels import Level


class LevelJournals:
    """Collects which blocks of `levels` can be read, until that is taken."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = levels
        self._told = [False] * len(levels)
        """Whether anything was read there when it was taken last."""
        for level in levels:
            level.tier.journal = {}

    def take(self, all_of_it: bool) -> tuple[Below, ...]:
        """What changed since this was asked last, or `all_of_it`: of each level where anything
        did."""
        found = []
        for at, level in enumerate(self._levels):
            tier, working = level.tier, level.store.working
            if not (tier.journal or all_of_it or working != self._told[at]):
                continue
            changed, tier.journal, self._told[at] = tier.journal or {}, {}, working
            if all_of_it:
                changed = {one.label.key: True for one in tier.entries() if one.whole}
            added = _array(key for key, held in changed.items() if held)
            removed = _array(key for key, held in changed.items() if not held)
            seconds = level.block_seconds if working else math.inf
            found.append(Below(at, tier.num_slots, seconds, added, removed))
        return tuple(found)


def _array(keys: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(key[:8] for key in keys), np.uint64)
