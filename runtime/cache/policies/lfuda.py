"""Least frequently used first, with dynamic aging, within tiers."""

from __future__ import annotations

from rootlace.runtime.cache.node import Node, Programs


class Policy:
    """LFU-DA (Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating Content Management Techniques
    for Web Proxy Caches, ACM SIGMETRICS Performance Evaluation Review 27(4), 2000).

    When a node is used, its worth becomes the number of its uses plus the cache's age, which is the
    worth of what was evicted last. So a prefix that was popular once is overtaken in time by those
    that are used now, and a burst of prompts that come once does not push out what comes often.
    Equally worthy nodes go least recently used first.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._age = 0.0

    def used(self, node: Node) -> None:
        node.worth = self._age + node.uses

    def rank(self, node: Node) -> tuple[float, ...]:
        return self._programs.tier(node), node.worth, node.last_use

    def evicted(self, node: Node) -> None:
        # Tiers may have a worthier node go before others.
        self._age = max(self._age, node.worth)

    def reset(self) -> None:
        self._age = 0.0
