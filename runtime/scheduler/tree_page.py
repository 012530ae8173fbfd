"""The radix tree as it is shown: the nodes used last, each behind its parent."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from rootlace.runtime.cache import Node, Pin, RadixTree
from rootlace.runtime.contracts.request import adapter_and_namespace
from rootlace.runtime.contracts.tree_page import TreeNode, TreePage
from rootlace.runtime.scheduler.sequence import Sequence

_Entry = tuple[int, int, Node, tuple[str, str]]

SHOWN = 24
"""So many tokens of either end of an edge are shown."""


def tree_page(
    tree: RadixTree,
    sequences: list[Sequence],
    pins: list[Pin],
    idle_seconds: Callable[[Node], float],
    restored: np.ndarray,
    *,
    namespace: str | None,
    under: int,
    limit: int,
) -> TreePage:
    """At most `limit` nodes: those of one namespace (None: of all), or those below node `under`
    (0: from the roots). `sequences` are those running; `restored` (bool [blocks]): what was read
    back from below the pool. Empty if `under` is gone.

    Costs O(limit log limit), a look at each child of the nodes shown, and one at every node to
    find `under`. About 5 us for each node shown.
    """
    requests: defaultdict[Node, list[int]] = defaultdict(list)
    for sequence in sequences:
        for node in _path(sequence.node):
            requests[node].append(sequence.rid)
    pinned: defaultdict[Node, list[str]] = defaultdict(list)
    for pin in pins:
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
                idle_seconds=idle_seconds(node),
            )
        )
        _push(heap, node, name, limit - len(nodes))
    if under or len(roots) < len(tree.roots):  # nobody counted these apart
        return TreePage(tuple(nodes), complete=not heap)
    return TreePage(tuple(nodes), not heap, tree.num_nodes, tree.num_tokens)


def _push(heap: list[_Entry], node: Node, name: tuple[str, str], limit: int) -> None:
    """The children that may still be shown, and one more: then the page is not complete."""
    children = node.children.values()
    for child in heapq.nlargest(limit + 1, children, key=lambda child: child.last_use):
        heapq.heappush(heap, (-child.last_use, child.uid, child, name))


def _path(node: Node | None) -> Iterator[Node]:
    """The node and its ancestors, the root left out."""
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
    """The adapter and the namespace that the node's KV is of."""
    while node.parent is not None:
        node = node.parent
    return adapter_and_namespace(node.namespace)
