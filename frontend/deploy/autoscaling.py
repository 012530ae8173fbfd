"""How many engines there should be, by their queues and their KV pools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SHRINK = 0.5
"""Below this part of both bounds there are too many engines."""


class ByQueueAndKV:
    """An autoscaling policy of Ray Serve, which applies the bounds and delays of its
    `AutoscalingConfig` to what this says."""

    def __init__(self, waiting: float, kv: float) -> None:
        """How many requests may wait at an engine, and which part of its pool may be in use, on
        average."""
        self._waiting = waiting
        self._kv = kv

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        found = context.aggregated_metrics or {}
        current = max(context.target_num_replicas, 1)
        return self.wanted(current, found.get("waiting", {}), found.get("kv", {})), {}

    def wanted(self, current: int, waiting: Mapping[Any, float], kv: Mapping[Any, float]) -> int:
        """Of `current` engines each says how many requests wait there and which part of its pool is
        in use. As many as bring the means down to the bounds, at most twice as many; one fewer when
        both are well below the bounds, and would be below without it, too."""
        if not waiting or not kv:
            return current
        load = max(
            sum(waiting.values()) / len(waiting) / self._waiting,
            sum(kv.values()) / len(kv) / self._kv,
        )
        if load > 1:
            return math.ceil(current * min(load, 2.0))
        if load < SHRINK and load * current < current - 1:
            return current - 1
        return current
