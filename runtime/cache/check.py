"""Every invariant of tree and pool, recomputed from scratch. For tests and `check_invariants`."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.tree import RadixTree


def check_cache(tree: RadixTree, handles: list[Node], held: list[np.ndarray]) -> None:
    """Raise AssertionError at the first broken invariant.

    `handles`: every handle there is. `held`: the blocks that sequences hold by themselves, one
    array per sequence. O(nodes + tokens).
    """
    pool = tree.pool
    refs = np.zeros(pool.num_blocks, np.int32)
    pins = np.zeros(pool.num_blocks, np.int32)
    ends = Counter(id(node) for node in handles)
    leaves: set[Node] = set()
    nodes = tokens = 0
    known: set[int] = set()
    for namespace, root in tree.roots.items():
        assert root.namespace == namespace and root.parent is None and root.alive
        assert root.end == 0 and not len(root.blocks)
        assert root.children or root.locks, f"empty root of namespace {namespace!r} was kept"
        stack = [root]
        while stack:
            node = stack.pop()
            known.add(id(node))
            _check_locks(node, ends[id(node)])
            for first, child in node.children.items():
                assert child.parent is node and child.alive, f"{child} is not {node}'s child"
                assert child.tokens[0] == first, f"{child} is filed under the wrong token"
                assert child.start == node.end, f"{child} does not start at the end of {node}"
                assert child.last_use <= node.last_use or node.is_root or node.locks, (
                    f"{child} was used after {node}"
                )
            stack.extend(node.children.values())
            if node.is_root:
                continue
            nodes += 1
            tokens += len(node.tokens)
            _check_edge(node, tree.block_size)
            tree.evicted.check(node)
            refs[node.blocks] += 1
            if node.locks:
                pins[node.blocks] += 1
            elif not node.children:
                leaves.add(node)
    assert all(id(node) in known for node in handles), "a handle ends at a node that is gone"
    assert nodes == tree.num_nodes, f"{tree.num_nodes} nodes counted, there are {nodes}"
    assert tokens == tree.num_tokens, f"{tree.num_tokens} tokens counted, there are {tokens}"
    for blocks in held:
        np.add.at(refs, blocks, 1)
        np.add.at(pins, blocks, 1)
    pool.check(refs, pins)
    tree.check_queue(leaves)


def _check_locks(node: Node, ending: int) -> None:
    below = sum(child.locks for child in node.children.values())
    assert node.locks == below + ending, (
        f"{node}: {ending} handles end here and {below} go on, locks are {node.locks}"
    )
    if len(node.children) == 1 and not node.is_root:
        (child,) = node.children.values()
        assert ending or not node.same_users(child), f"the edges of {node} and {child} are not one"


def _check_edge(node: Node, block_size: int) -> None:
    assert len(node.tokens) and node.end == node.start + len(node.tokens), f"{node}: bad size"
    first, last = node.start // block_size, (node.end - 1) // block_size
    assert len(node.blocks) == last - first + 1, f"{node} has {len(node.blocks)} blocks"
    assert len(np.unique(node.blocks)) == len(node.blocks), f"{node} holds a block twice"
