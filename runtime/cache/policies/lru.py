"""Least recently used first, within tiers."""

from __future__ import annotations

from rootlace.runtime.cache.node import Node, Programs


class Policy:
    """By tier (see `Programs`), then by last use."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def used(self, node: Node) -> None:
        pass

    def rank(self, node: Node) -> tuple[float, ...]:
        return self._programs.tier(node), node.last_use

    def evicted(self, node: Node) -> None:
        pass

    def reset(self) -> None:
        pass
