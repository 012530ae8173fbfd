"""Least frequently used first, with dynamic aging, within tiers."""

from __future__ import annotations

from rootlace.runtime.cache.node import Node, Programs


class Policy:
    """LFU-DA: least frequently used with dynamic aging.

    Source: Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating Content Management Techniques for
    Web Proxy Caches, ACM SIGMETRICS Performance Evaluation Review 27(4), 2000.

    On use a node's worth becomes its use count plus the cache's age, the worth of the last evicted
    node. So prefixes in use overtake a prefix that was popular once. And a burst of unique prompts
    does not evict frequent prefixes. Ties go least recently used first.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._age = 0.0

    def used(self, node: Node) -> None:
        node.worth = self._age + node.uses

    def rank(self, node: Node) -> tuple[float, ...]:
        return self._programs.tier(node), node.worth, node.last_use

    def evicted(self, node: Node) -> None:
        # Tiers may evict a worthier node before others.
        self._age = max(self._age, node.worth)

    def reset(self) -> None:
        self._age = 0.0
