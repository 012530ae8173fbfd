"""Nodes of the radix tree, the programs that use the nodes, and the order of eviction. Sections:
node, programs, eviction policies, eviction queue."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge of tokens and the blocks with their KV.

     edge    start ........................ end
     blocks  | start // block_size | ... | (end - 1) // block_size |     int32

    The edge covers positions `start` to `end` of every sequence through the node. `locks` counts
    the handles that end at this node or below it.

    `programs`: the last few programs that used the node, most recent first. `shared`: further
    programs or other requests used the node, too.
    """

    uid: int
    parent: Node | None
    start: int
    end: int
    tokens: np.ndarray
    blocks: np.ndarray
    children: dict[int, Node] = field(default_factory=dict)
    locks: int = 0
    last_use: int = 0
    uses: int = 0
    """Count of requests that matched or added the node."""
    worth: float = 0.0
    """`uses`, plus the age of the eviction policy at the last use."""
    programs: tuple[int, ...] = ()
    shared: bool = False
    digest: int | None = None
    """Digest of all tokens up to `end`, once computed: see `PrefixDigests`."""
    alive: bool = True
    """False once evicted (`parent` stays) or merged (`parent` is then the merged node)."""
    key: tuple[float, ...] | None = None
    """Key of the node's valid entry in the eviction queue, if any."""
    namespace: Hashable | None = None
    """Set on roots only."""
    is_root: bool = False

    @classmethod
    def root(cls, uid: int, namespace: Hashable) -> Node:
        return cls(uid, None, 0, 0, _NO_TOKENS, _NO_TOKENS, namespace=namespace, is_root=True)

    @property
    def is_evictable(self) -> bool:
        """Whether the node is an unlocked leaf of the tree."""
        return self.alive and not self.locks and not self.children and not self.is_root

    def nearest_live(self) -> Node:
        """Return the node that holds the remainder of this node's path."""
        node = self
        while not node.alive and node.parent is not None:
            node = node.parent
        return node

    def __repr__(self) -> str:
        return f"<Node {self.uid} [{self.start}:{self.end}) locks={self.locks}>"


# Programs -----------------------------------------------------------------------------------------


CLOSED, NORMAL, LIVE = 0, 1, 2
"""Tiers of nodes, the first to evict first.

`CLOSED`: only programs that have ended used the node. `LIVE`: a running program used the node.
`NORMAL`: everything else.
"""

_TIDY_AT = 64


class Programs:
    """Programs by name, and the tier of each node.

    A tier falls only when a program is closed. A `live` program keeps the nodes where its requests
    ended, so that a close finds these nodes without a scan of the tree.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self.live: dict[int, set[Node]] = {}
        self._tidy_at: dict[int, int] = {}
        self._opened = 0

    def tier(self, node: Node) -> int:
        """`CLOSED`, `NORMAL` or `LIVE`."""
        if not self.live.keys().isdisjoint(node.programs):
            return LIVE
        return CLOSED if node.programs and not node.shared else NORMAL

    def names(self, node: Node) -> tuple[str, ...]:
        """Names of the running programs that used `node`. O(programs)."""
        if not node.programs:
            return ()
        return tuple(name for name, number in self._open.items() if number in node.programs)

    def open(self, name: str) -> int:
        """Return the id of the program `name` in nodes; 0 for the empty name: no program. A program
        opened again after a close gets a new id; its old nodes stay closed."""
        if not name:
            return 0
        program = self._open.get(name)
        if program is None:
            self._opened += 1
            program = self._open[name] = self._opened
            self.live[program] = set()
        return program

    def ended_at(self, program: int, node: Node) -> None:
        """Note that a request of the running `program` ended at `node`, which is no root."""
        nodes = self.live[program]
        nodes.add(node)
        if len(nodes) > self._tidy_at.get(program, _TIDY_AT):
            nodes = {node.nearest_live() for node in nodes}
            self.live[program] = nodes
            self._tidy_at[program] = max(_TIDY_AT, 2 * len(nodes))

    def close(self, name: str) -> set[Node]:
        """Close a program; return the nodes where its requests ended, whose tier may be lower."""
        program = self._open.pop(name, 0)
        self._tidy_at.pop(program, None)
        return {node.nearest_live() for node in self.live.pop(program, ())}

    def reset(self) -> None:
        """Forget all nodes after the tree was lost; programs stay open."""
        self._tidy_at = {}
        self.live = {program: set() for program in self.live}


# Eviction policies --------------------------------------------------------------------------------


class EvictionPolicy:
    """Ranks unlocked leaves; the leaf of the lowest rank is evicted first.

    A node carries what policies build on: `last_use`, `uses`, its programs, and `worth`: its uses
    and the policy's `age` at the last of them. A rank may change only when the node is used or a
    program is closed.
    """

    age = 0.0

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def rank(self, node: Node) -> tuple[float, ...]:
        """Return the node's rank, of fixed length. Of equal ranks the older node goes first."""
        raise NotImplementedError

    def evicted(self, node: Node) -> None:
        """Note that `node` is about to lose some or all of its blocks."""

    def reset(self) -> None:
        """Forget all state after the tree was lost."""


class LeastRecentlyUsed(EvictionPolicy):
    """Eviction by tier (see `Programs`), then by last use."""

    def rank(self, node: Node) -> tuple[float, ...]:
        return self._programs.tier(node), node.last_use


class LeastFrequentlyUsed(EvictionPolicy):
    """LFU-DA: least frequently used with dynamic aging, within tiers.

    Source: Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating Content Management Techniques for
    Web Proxy Caches, ACM SIGMETRICS Performance Evaluation Review 27(4), 2000.

    On use a node's worth becomes its use count plus the cache's age, the worth of the last evicted
    node. So prefixes in use overtake a prefix that was popular once. And a burst of unique prompts
    does not evict frequent prefixes. Ties go least recently used first.
    """

    def rank(self, node: Node) -> tuple[float, ...]:
        return self._programs.tier(node), node.worth, node.last_use

    def evicted(self, node: Node) -> None:
        # Tiers may evict a worthier node before others.
        self.age = max(self.age, node.worth)

    def reset(self) -> None:
        self.age = 0.0


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfuda": LeastFrequentlyUsed,
}
"""Eviction policies by their names in `config.Eviction`."""


# Eviction queue -----------------------------------------------------------------------------------


_SMALL_HEAP = 1024


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
        """Remove stale entries once half of all entries may be stale: O(1) per push."""
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
