"""In which order cached prefixes are given up: the seam, and the queue behind it."""

from __future__ import annotations

import heapq
from typing import Protocol

from rootlace.runtime.cache.node import Node

_SMALL_HEAP = 1024


class EvictionPolicy(Protocol):
    """Ranks unlocked leaves; the one of the lowest rank is evicted first.

    A node carries what all policies build on: `last_use`, `uses`, its programs, and `worth`, which
    is the policy's own. A rank may change when the node is used or when a program is closed, and at
    no other time.
    """

    def used(self, node: Node) -> None:
        """A request matched or added `node`, which is locked now."""

    def rank(self, node: Node) -> tuple[float, ...]:
        """The node's rank: tuples of one length. Of equal ranks the older node goes first."""

    def evicted(self, node: Node) -> None:
        """`node` is about to lose blocks, or all of them."""

    def reset(self) -> None:
        """The tree is gone."""


class EvictionQueue:
    """Unlocked leaves by rank: a heap with lazy deletion.

    Stale entries are skipped when met, and thrown out when they outnumber the others (a leaf leaves
    one behind each time it is used, and with enough memory nobody ever pops). A push or pop costs
    O(log n); nothing ever scans the tree.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], Node]] = []
        self._compact_at = _SMALL_HEAP

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """`node` is an unlocked leaf; replaces its earlier entry."""
        key = self._key(node)
        if node.key != key:
            node.key = key
            heapq.heappush(self._heap, (key, node))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> Node | None:
        """The leaf to evict next, taken out of the queue; None if there is none."""
        while self._heap:
            key, node = heapq.heappop(self._heap)
            if node.key != key:
                continue
            node.key = None
            if not node.is_evictable:
                continue
            if self._key(node) != key:  # it counts for more since
                self.push(node)
                continue
            return node
        return None

    def reset(self) -> None:
        """The tree is gone."""
        self._heap = []

    def _key(self, node: Node) -> tuple[float, ...]:
        return (*self._policy.rank(node), node.uid)

    def _compact(self) -> None:
        """Throw stale entries out. Due when they may be half of all, so it costs a push O(1)."""
        kept = []
        for entry in self._heap:
            key, node = entry
            if node.key == key:
                if node.is_evictable:
                    kept.append(entry)
                else:
                    node.key = None
        heapq.heapify(kept)
        self._heap = kept
        self._compact_at = max(2 * len(kept), _SMALL_HEAP)

    def check(self, leaves: set[Node]) -> None:
        """Raise AssertionError unless every unlocked leaf has a valid entry, none too late."""
        valid = {node for key, node in self._heap if node.key == key and node.is_evictable}
        assert valid == leaves, f"unlocked leaves without an entry: {leaves - valid}"
        for node in leaves:
            due = self._key(node)
            assert node.key is not None and node.key <= due, (
                f"{node} is queued at {node.key}, due at {due}"
            )
