"""Views of the cache and orders to the cache between steps.

Sections: cache view (with pages of the tree for `/tree` and the viewer), cache control.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import msgspec
import numpy as np

from rootlace.runtime.cache.journal import Change, Journal, PrefixDigests
from rootlace.runtime.cache.node import Node
from rootlace.runtime.contracts.messages import (
    Below,
    PinnedPrefix,
    TreeNode,
    TreePage,
    adapter_and_namespace,
)
from rootlace.runtime.scheduler.admission import RunningSet
from rootlace.runtime.scheduler.kv_manager import KVStore
from rootlace.runtime.scheduler.pacing import PromptPace
from rootlace.runtime.scheduler.request import OneRequest, RequestState
from rootlace.wire.protocol import CacheReport, Scope

_Entry = tuple[int, int, Node, tuple[str, str]]

SHOWN = 24
"""Tokens shown of either end of an edge."""


def _push(heap: list[_Entry], node: Node, name: tuple[str, str], limit: int) -> None:
    """Push the children that may still be shown, and one more to detect an incomplete page."""
    children = node.children.values()
    for child in heapq.nlargest(limit + 1, children, key=lambda child: child.last_use):
        heapq.heappush(heap, (-child.last_use, child.uid, child, name))


def _path(node: Node | None) -> Iterator[Node]:
    """Yield the node and its ancestors without the root."""
    while node is not None and not node.is_root:
        yield node
        node = node.parent


def _all(roots: list[Node]) -> Iterator[Node]:
    stack = list(roots)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _name(node: Node) -> tuple[str, str]:
    """Return adapter and namespace of the node's KV."""
    while node.parent is not None:
        node = node.parent
    return adapter_and_namespace(node.namespace)


# Cache view ---------------------------------------------------------------------------------------


class TickTimes:
    """Time of each tick, to a second, for the last hour of use."""

    def __init__(self) -> None:
        self._ticks: deque[int] = deque(maxlen=3600)
        self._times: deque[float] = deque(maxlen=3600)
        self.due = 0.0
        """Time before which `note` does nothing."""

    def note(self, tick: int, now: float) -> None:
        if now >= self.due:
            self.due = now + 1.0
            self._ticks.append(tick)
            self._times.append(now)

    def seconds_since(self, tick: int, now: float) -> float:
        """Return an upper bound on the seconds since `tick`: older ticks count as the first known
        one."""
        if not self._times:
            return 0.0
        at = bisect_right(self._ticks, tick) - 1
        return max(now - self._times[max(at, 0)], 0.0)


class CacheView:
    """View that explains and shows the cache without a change."""

    def __init__(
        self, kv: KVStore, running: RunningSet, clock: Callable[[], float], pace: PromptPace
    ) -> None:
        self._pace = pace
        self._kv = kv
        self._running = running
        self._clock = clock
        self.ticks = TickTimes()

    def explain(self, namespace: Hashable, tokens: np.ndarray, scope: Scope) -> CacheReport:
        """Explain the cached prefix that the prompt `tokens` (int32) would get now."""
        report = self._kv.explain(namespace, tokens, len(tokens) - 1, scope)
        saved = self._pace.seconds(report.matched)
        return msgspec.structs.replace(report, saved_seconds=saved)

    def tree_page(self, namespace: str | None, under: int, limit: int) -> TreePage:
        """Return at most `limit` nodes of one namespace (None: all), or below node `under` (0: from
        the roots). An empty page if `under` was evicted.

        Costs O(limit log limit), one look at each child of the nodes shown, and one at every node
        to find `under`. About 5 us for each node shown.
        """
        now, tree = self._clock(), self._kv.tree
        restored = self._kv.tiering.fetching.restored
        requests: defaultdict[Node, list[int]] = defaultdict(list)
        for sequence in self._running.sequences:
            for node in _path(sequence.node):
                requests[node].append(sequence.rid)
        pinned: defaultdict[Node, list[str]] = defaultdict(list)
        for pin in self._kv.retention.pins.all():
            for node in _path(pin.node):
                pinned[node].append(pin.id)
        roots = [
            root for root in tree.roots.values() if namespace is None or _name(root)[1] == namespace
        ]
        if under:
            roots = [node for node in _all(roots) if node.uid == under]
        heap: list[_Entry] = []
        for root in roots:
            _push(heap, root, _name(root), limit)
        nodes: list[TreeNode] = []
        while heap and len(nodes) < limit:
            _, _, node, name = heapq.heappop(heap)
            shown = node.tokens[:SHOWN].tolist(), node.tokens[SHOWN:][-SHOWN:].tolist()
            assert node.parent is not None
            nodes.append(
                TreeNode(
                    node.uid,
                    0 if node.parent.is_root else node.parent.uid,
                    name[1],
                    name[0],
                    node.start,
                    node.end,
                    head=tuple(shown[0]),
                    tail=tuple(shown[1]),
                    blocks=len(node.blocks),
                    from_disk=int(np.count_nonzero(restored[node.blocks])),
                    children=len(node.children),
                    requests=tuple(requests.get(node, ())),
                    locked=node.locks > 0,
                    uses=node.uses,
                    programs=tree.programs.names(node),
                    pins=tuple(pinned.get(node, ())),
                    idle_seconds=self.ticks.seconds_since(node.last_use, now),
                )
            )
            _push(heap, node, name, limit - len(nodes))
        if under or len(roots) < len(tree.roots):  # no count exists for this selection
            return TreePage(tuple(nodes), complete=not heap)
        return TreePage(tuple(nodes), not heap, tree.num_nodes, tree.num_tokens)

    def pins(self) -> tuple[PinnedPrefix, ...]:
        """Return the current pins, the earliest to expire first."""
        self._kv.retention.expire()
        pins, now = [], self._clock()
        for pin in sorted(self._kv.retention.pins.all(), key=lambda pin: pin.until):
            adapter, namespace = adapter_and_namespace(pin.namespace)
            left = pin.until - now
            pins.append(PinnedPrefix(pin.id, namespace, adapter, pin.tokens, pin.node.uid, left))
        return tuple(pins)


# Cache control ------------------------------------------------------------------------------------


class CacheControl:
    """Orders to the cache: forget prefixes, release pins and programs."""

    def __init__(
        self, kv: KVStore, sequences: Mapping[int, RequestState], changed: Callable[[], None]
    ) -> None:
        """`sequences`: unfinished sequences by request id. `changed` is called after a change."""
        self._kv = kv
        self._sequences = sequences
        self._changed = changed
        self._readable: dict[int, bool] = {}
        """Map from offload level to whether it was readable at the last `changes_below`; empty: no
        journal."""
        self.forgotten: set[Hashable] = set()
        """Namespaces to forget when their last request ends."""

    def flush(self) -> None:
        """Forget every prefix that no running request uses."""
        self._kv.tree.flush()
        self._kv.tiering.flush()
        if self._kv.suffixes is not None:
            self._kv.suffixes.clear()
        self._changed()

    def forget_namespace(self, namespace: str) -> None:
        """Forget a namespace with any adapter; prefixes in use go when their requests end."""
        known = {*self._kv.tree.roots, *(one.namespace for one in self._sequences.values())}
        if self._kv.suffixes is not None:  # it may have texts whose KV is gone
            known |= {
                one.namespace if isinstance(one, OneRequest) else one
                for one in self._kv.suffixes.owners
            }
        for kv in known:
            if adapter_and_namespace(kv)[1] == namespace:
                self._forget(kv)
        self._kv.tiering.forget_namespace(namespace)
        self._changed()

    def unpin(self, pin: str, namespace: str | None = None) -> bool:
        """Release a pin of `namespace` (None: any); False if no such pin exists."""
        self._kv.retention.expire()
        released = any(
            one.id == pin and namespace in (None, adapter_and_namespace(one.namespace)[1])
            for one in self._kv.retention.pins.all()
        ) and self._kv.retention.pins.release(pin)
        self._changed()
        return released

    def release_program(self, program: str, wanted: bool = False) -> None:
        """Lower the rank of prefixes that only an ended program used, unless `wanted`."""
        self._kv.tree.close_program(program, wanted)

    def keep_journal(self, key: bytes = b"") -> None:
        """Start a journal for `changes` on an empty cache, with digests by `key`."""
        tree = self._kv.tree
        tree.evicted.digests = PrefixDigests(key)
        tree.journal = Journal(tree.block_size, tree.evicted.digests)
        for at, level in enumerate(self._kv.tiering.levels):
            level.tier.journal, self._readable[at] = {}, False

    def changes(self, all_of_it: bool = False) -> Change | None:
        """Return prefixes cached and evicted since the last call, or with `all_of_it` the whole
        cache. None if nothing changed, or without a journal."""
        tree = self._kv.tree
        if tree.journal is None:
            return None
        if all_of_it:
            return tree.journal.snapshot(tree.roots.values())
        return tree.journal.take() if tree.journal.changed else None

    def changes_below(self, all_of_it: bool = False) -> tuple[Below, ...]:
        """Return the changes of the offload levels: blocks that became readable, and blocks that
        are gone."""
        journals = []
        for at, was_working in self._readable.items():
            level = self._kv.tiering.levels[at]
            tier, working = level.tier, level.store.working
            if not (tier.journal or all_of_it or working != was_working):
                continue
            changed, tier.journal, self._readable[at] = tier.journal or {}, {}, working
            if all_of_it:
                changed = {entry.label.key: True for entry in tier.entries() if entry.whole}
            added = _array(key for key, held in changed.items() if held)
            removed = _array(key for key, held in changed.items() if not held)
            seconds = level.block_seconds if working else math.inf
            journals.append(Below(at, tier.num_slots, seconds, added, removed))
        return tuple(journals)

    def request_ended(self, namespace: Hashable) -> None:
        """Apply a delayed forget after a request of `namespace` ended."""
        if namespace in self.forgotten:
            self._forget(namespace)
            self._kv.tiering.forget_namespace(adapter_and_namespace(namespace)[1])

    def _forget(self, kv: Hashable) -> None:
        self._kv.tree.forget_namespace(kv)
        if self._kv.suffixes is not None:
            self._kv.suffixes.forget(kv)
        if any(sequence.namespace == kv for sequence in self._sequences.values()):
            self.forgotten.add(kv)
        else:
            self.forgotten.discard(kv)


def _array(keys: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(key[:8] for key in keys), np.uint64)
