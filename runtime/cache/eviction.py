"""In which order cached prefixes are given up."""

from __future__ import annotations

import heapq

from rootlace.runtime.cache.node import Node

CLOSED, NORMAL, LIVE = 0, 1, 2

_SMALL_HEAP = 1024


class EvictionQueue:
    """Unlocked leaves by (tier, last use): a heap whose stale entries are skipped when met, and
    thrown out when they outnumber the others (a leaf that is used again and again leaves one each
    time, and with enough memory nobody ever pops).

    Tier `CLOSED`: only programs that have ended used the node. `LIVE`: a program that still runs
    used it. `NORMAL`: everything else. A push or pop costs O(log n); nothing ever scans the tree.

    A tier falls only when a program is released. To find the entries that must move forward then,
    a live program keeps the nodes where its requests ended.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Node]] = []
        self._compact_at = _SMALL_HEAP
        self._open: dict[str, int] = {}
        self._live: dict[int, set[Node]] = {}
        self._tidy_at: dict[int, int] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self._heap)

    def tier(self, node: Node) -> int:
        if any(program in self._live for program in node.programs):
            return LIVE
        return CLOSED if node.programs and not node.shared else NORMAL

    def push(self, node: Node) -> None:
        """`node` is an unlocked leaf; replaces its earlier entry."""
        key = (self.tier(node), node.last_use, node.uid)
        if node.key != key:
            node.key = key
            heapq.heappush(self._heap, (*key, node))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> Node | None:
        """The leaf to evict next, taken out of the queue; None if there is none."""
        while self._heap:
            *key, node = heapq.heappop(self._heap)
            if node.key != tuple(key):
                continue
            node.key = None
            if not _evictable(node):
                continue
            if self.tier(node) != key[0]:  # used by a live program since
                self.push(node)
                continue
            return node
        return None

    def _compact(self) -> None:
        """Throw stale entries out; due when half of them may be, so a push pays O(1) for it."""
        kept = []
        for entry in self._heap:
            node = entry[3]
            if node.key == entry[:3]:
                if _evictable(node):
                    kept.append(entry)
                else:
                    node.key = None
        heapq.heapify(kept)
        self._heap = kept
        self._compact_at = max(2 * len(kept), _SMALL_HEAP)

    def open_program(self, name: str) -> int:
        """The id by which nodes know the program `name`; 0 for the empty name: nobody.

        A program that was closed gets a new id: what it left behind stays left behind.
        """
        if not name:
            return 0
        program = self._open.get(name)
        if program is None:
            self._opened += 1
            program = self._open[name] = self._opened
            self._live[program] = set()
        return program

    def ended_at(self, program: int, node: Node) -> None:
        """A request of `program` ended at `node`."""
        nodes = self._live.get(program)
        if nodes is None or node.is_root:
            return
        nodes.add(node)
        if len(nodes) > self._tidy_at.get(program, 64):
            nodes = {_standing(node) for node in nodes}
            self._live[program] = nodes
            self._tidy_at[program] = max(64, 2 * len(nodes))

    def close_program(self, name: str) -> None:
        """What only this program used may go first from now on."""
        program = self._open.pop(name, 0)
        self._tidy_at.pop(program, None)
        for node in self._live.pop(program, ()):
            standing = _standing(node)
            if _evictable(standing):
                self.push(standing)

    def reset(self) -> None:
        """The tree is gone; programs stay open."""
        self._heap = []
        self._tidy_at = {}
        self._live = {program: set() for program in self._live}

    def check(self, leaves: set[Node]) -> None:
        """Every unlocked leaf has a valid entry, and none is due later than it should."""
        entries = [node for *key, node in self._heap if node.key == tuple(key)]
        valid = {node for node in entries if _evictable(node)}
        assert valid == leaves, f"unlocked leaves without an entry: {leaves - valid}"
        for node in leaves:
            assert node.key is not None
            due = (self.tier(node), node.last_use, node.uid)
            assert node.key <= due, f"{node} is queued at {node.key}, due at {due}"


def _evictable(node: Node) -> bool:
    return node.alive and not node.locks and not node.children and not node.is_root


def _standing(node: Node) -> Node:
    """The node that holds what is left of `node`'s path."""
    while not node.alive and node.parent is not None:
        node = node.parent
    return node
