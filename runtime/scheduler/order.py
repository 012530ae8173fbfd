"""Depth-first order of the sequences of a step."""

from __future__ import annotations

from rootlace.runtime.cache import Node
from rootlace.runtime.scheduler.sequence import Sequence


def depth_first(sequences: list[Sequence]) -> list[Sequence]:
    """`sequences` so that those whose paths share a node are neighbours, at every depth.

    Siblings, and sequences at the same node, keep the order given. Costs O(nodes locked by them).
    """
    ending: dict[Node, list[Sequence]] = {}
    children: dict[Node, list[Node]] = {}
    roots: list[Node] = []
    alone: list[Sequence] = []
    for sequence in sequences:
        node = sequence.node
        if node is None:
            alone.append(sequence)
            continue
        ending.setdefault(node, []).append(sequence)
        if node in children:
            continue
        children[node] = []
        while node.parent is not None:
            child, node = node, node.parent
            if node in children:
                children[node].append(child)
                break
            children[node] = [child]
        else:
            roots.append(node)
    ordered: list[Sequence] = []
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        ordered.extend(ending.get(node, ()))
        stack.extend(reversed(children[node]))
    return ordered + alone
