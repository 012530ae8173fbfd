"""What the tree holds, for others to know: digests of its prefixes at block bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache.digest import PrefixDigests
from rootlace.runtime.cache.node import Node


@dataclass(frozen=True)
class Change:
    """Digests (uint64) of prefixes that are held since the last change, and of those that no longer
    are. `fresh`: nothing of what was said before counts any more."""

    added: np.ndarray
    removed: np.ndarray
    fresh: bool = False


class Journal:
    """Collects changes of a tree until they are taken.

    A prefix counts if it ends at a block bound. Where one is held, so are all shorter ones.
    """

    def __init__(self, block_size: int, digests: PrefixDigests) -> None:
        self._block_size = block_size
        self._digests = digests
        self._held: dict[int, bool] = {}
        """What changed, the last word on each."""
        self._fresh = True

    def added(self, parent: Node, tokens: np.ndarray) -> None:
        """`tokens` were put in behind the end of `parent`."""
        self._note(parent, tokens, parent.end, True)

    def removed(self, leaf: Node, end: int) -> None:
        """`leaf` is about to lose its tokens from position `end` on."""
        assert leaf.parent is not None
        start = max(end, leaf.start)
        if self._first_bound(start) <= leaf.end:
            self._note(leaf.parent, leaf.tokens, start, False)

    @property
    def changed(self) -> bool:
        """Whether there is anything to take."""
        return self._fresh or bool(self._held)

    def reset(self) -> None:
        """Everything was lost."""
        self._held.clear()
        self._fresh = True

    def take(self) -> Change:
        """What changed since this was asked last."""
        held, fresh = self._held, self._fresh
        self._held, self._fresh = {}, False
        return Change(
            _array(digest for digest, is_held in held.items() if is_held),
            _array(digest for digest, is_held in held.items() if not is_held and not fresh),
            fresh,
        )

    def snapshot(self, roots: Iterable[Node]) -> Change:
        """All that is held: for who missed a change."""
        found = [np.empty(0, np.uint64)]
        nodes = list(roots)
        for node in nodes:  # it grows meanwhile
            nodes.extend(node.children.values())
            if node.parent is not None:
                found.append(self._bounds(node.parent, node.tokens, node.start))
        self._held.clear()
        self._fresh = False
        return Change(np.concatenate(found), np.empty(0, np.uint64), fresh=True)

    def _note(self, parent: Node, tokens: np.ndarray, start: int, held: bool) -> None:
        for digest in self._bounds(parent, tokens, start).tolist():
            self._held[digest] = held

    def _bounds(self, parent: Node, tokens: np.ndarray, start: int) -> np.ndarray:
        """Digests at the bounds behind position `start`, of `tokens` behind `parent`."""
        before = self._digests.of_node(parent)
        all_of_them = self._digests.behind(before, tokens, parent.end)
        return all_of_them[self._first_bound(start) - parent.end :: self._block_size]

    def _first_bound(self, start: int) -> int:
        """The first block bound behind position `start`."""
        return (start // self._block_size + 1) * self._block_size


def _array(digests: Iterable[int]) -> np.ndarray:
    return np.fromiter(digests, np.uint64)
