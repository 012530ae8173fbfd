"""The order of eviction: its policies, and the queue of unlocked leaves."""

from __future__ import annotations

import heapq

from rootlace.runtime.cache.node import Node, Programs

_SMALL_HEAP = 1024


class EvictionPolicy:
    """Ranks unlocked leaves, the lowest first to go: by tier (see `Programs`), then by last use.

    A node carries what policies build on: `last_use`, `uses`, its programs, and `worth`, a value of
    the policy. A rank may change only when the node is used or a program is closed.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def used(self, node: Node) -> None:
        """Note that a request matched or added `node`, which is locked now."""

    def rank(self, node: Node) -> tuple[float, ...]:
        """The node's rank: tuples of one length. Of equal ranks the older node goes first."""
        return self._programs.tier(node), node.last_use

    def evicted(self, node: Node) -> None:
        """Note that `node` is about to lose some or all of its blocks."""

    def reset(self) -> None:
        """Forget all state after the tree was lost."""


class LeastFrequentlyUsed(EvictionPolicy):
    """LFU-DA: least frequently used with dynamic aging.

    Source: Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating Content Management Techniques for
    Web Proxy Caches, ACM SIGMETRICS Performance Evaluation Review 27(4), 2000.

    On use a node's worth becomes its use count plus the cache's age, the worth of the last evicted
    node. So prefixes in use overtake a prefix that was popular once. And a burst of unique prompts
    does not evict frequent prefixes. Ties go least recently used first.
    """

    def __init__(self, programs: Programs) -> None:
        super().__init__(programs)
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


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": EvictionPolicy,
    "lfuda": LeastFrequentlyUsed,
}
"""The policies that `config.Eviction` names."""


class EvictionQueue:
    """Unlocked leaves by rank: a heap with lazy deletion.

    Stale entries are skipped on pop, and removed when they outnumber valid entries. A leaf leaves
    one stale entry behind per use, and with enough memory nothing pops. A push or pop costs O(log
    n); no operation scans the tree.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], Node]] = []
        self._compact_at = _SMALL_HEAP

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Queue the unlocked leaf `node`, replacing its earlier entry."""
        key = self._key(node)
        if node.key != key:
            node.key = key
            heapq.heappush(self._heap, (key, node))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> Node | None:
        """Take out the leaf to evict next; None if the queue is empty."""
        while self._heap:
            key, node = heapq.heappop(self._heap)
            if node.key != key:
                continue
            node.key = None
            if not node.is_evictable:
                continue
            if self._key(node) != key:  # the rank has risen since
                self.push(node)
                continue
            return node
        return None

    def reset(self) -> None:
        """Forget all entries after the tree was lost."""
        self._heap = []

    def _key(self, node: Node) -> tuple[float, ...]:
        return (*self._policy.rank(node), node.uid)

    def _compact(self) -> None:
        """Remove stale entries, once they may be half of all: O(1) per push."""
        valid = []
        for entry in self._heap:
            key, node = entry
            if node.key == key:
                if node.is_evictable:
                    valid.append(entry)
                else:
                    node.key = None
        heapq.heapify(valid)
        self._heap = valid
        self._compact_at = max(2 * len(valid), _SMALL_HEAP)

    def check(self, leaves: set[Node]) -> None:
        """Raise AssertionError unless every unlocked leaf has a valid entry in time."""
        valid = {node for key, node in self._heap if node.key == key and node.is_evictable}
        assert valid == leaves, f"unlocked leaves without an entry: {leaves - valid}"
        for node in leaves:
            due = self._key(node)
            assert node.key is not None and node.key <= due, (
                f"{node} is queued at {node.key}, due at {due}"
            )
