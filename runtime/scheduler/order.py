"""Depth-first order of the sequences of a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rootlace.runtime.cache import Node
from rootlace.runtime.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """Sequences so that those whose paths share a node are neighbours, at every depth.

    `common[i]` are the leading tokens that sequences i and i + 1 share in the tree.
    """

    sequences: list[Sequence]
    common: list[int]

    def only(self, members: Collection[Sequence]) -> DepthFirst:
        """Those of them that are `members`."""
        sequences: list[Sequence] = []
        common: list[int] = []
        shared = 0
        for sequence, following in zip(self.sequences, [*self.common, 0], strict=True):
            if sequence in members:
                sequences.append(sequence)
                common.append(shared)
                shared = following
            else:
                shared = min(shared, following)
        return DepthFirst(sequences, common[1:])


def depth_first(sequences: list[Sequence]) -> DepthFirst:
    """Siblings, and sequences at the same node, keep the order given. Costs O(nodes locked)."""
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
    common: list[int] = []
    shared = 0  # with the sequence before: where the paths to it and to here part
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        shared = min(shared, 0 if node.parent is None else node.parent.end)
        for sequence in ending.get(node, ()):
            ordered.append(sequence)
            common.append(shared)
            shared = node.end
        stack.extend(reversed(children[node]))
    return DepthFirst(ordered + alone, [*common[1:], *([0] * len(alone))][: len(sequences) - 1])
