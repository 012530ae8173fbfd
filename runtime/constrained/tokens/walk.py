"""Which tokens an automaton survives from a state: the trie of the vocabulary × the automaton.

One walk per state, not one per token: prefixes that tokens share are walked once, and what the
automaton forbids is left with all that is below. A level of the trie is one array operation: over
the nodes that are alive while those are few, over the whole level where they are many (gathering
the few costs more per node than computing them all, about ten times).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rootlace.runtime.constrained.tokens.byte_trie import ByteTrie

_DENSE = 16
_SPARSE = 4096
"""A level is computed whole, and all below it, if more than so many of its nodes have a parent
alive, and more than one in `_DENSE`."""
_UNKNOWN = -1


class Automaton(Protocol):
    """What walks need of a `LazyDfa`. State -1 is the dead one."""

    @property
    def num_states(self) -> int: ...

    @property
    def byte_classes(self) -> np.ndarray:
        """uint8 [256], from 0 on: bytes of one class lead to the same state, from every state."""

    def transitions(self, states: np.ndarray) -> np.ndarray:
        """int32 [n, 256]: where each byte leads. May raise `TooLarge`."""


class TokenWalk:
    """Walks of one automaton, which keep the steps they have seen of it. Not thread-safe.

    A walk that `TooLarge` ended leaves everything as it was and may be tried again.
    """

    def __init__(self, trie: ByteTrie, automaton: Automaton) -> None:
        self._trie = trie
        self._automaton = automaton
        classes = automaton.byte_classes
        self._class_of = classes
        self._width = int(classes.max()) + 1
        self._bytes = np.empty(self._width, np.int64)  # one byte of each class
        self._bytes[classes] = np.arange(256)
        # Flat [states + 1, classes]: where each class of bytes leads, as an index into this very
        # array. State s stands at row s + 1, row 0 is the dead state's.
        self._steps = np.zeros(self._width, np.int64)

    @property
    def nbytes(self) -> int:
        return self._steps.nbytes

    def allowed(self, state: int) -> np.ndarray:
        """bool [32 * ceil(vocab_size / 32)]: the tokens that do not kill `state` (not dead)."""
        trie = self._trie
        self._grow()
        alive = np.zeros(trie.num_nodes + 1, bool)  # the last is the node of tokens without bytes
        places = np.array([(state + 1) * self._width])
        nodes = np.zeros(1, np.int64)
        for depth in range(1, len(trie.levels) - 1):
            begin = trie.children[nodes]
            counts = trie.children[nodes + 1] - begin
            total = int(counts.sum())
            if not total:
                break
            if total > _SPARSE and total * _DENSE > trie.levels[depth + 1] - trie.levels[depth]:
                whole = np.zeros(trie.levels[depth] - trie.levels[depth - 1], np.int64)
                whole[nodes - trie.levels[depth - 1]] = places
                self._walk_whole_levels(whole, depth, alive)
                break
            shift = begin - (np.cumsum(counts) - counts)
            nodes = np.repeat(shift, counts) + np.arange(total)
            places = self._step(np.repeat(places, counts), self._class_of[trie.byte[nodes]])
            keep = places > 0
            nodes, places = nodes[keep], places[keep]
            alive[nodes] = True
        return alive.take(trie.node)

    def _walk_whole_levels(self, places: np.ndarray, depth: int, alive: np.ndarray) -> None:
        """From level `depth` on, given the places of the automaton at all nodes of the one above;
        says which nodes are `alive`."""
        trie = self._trie
        classes = self._class_of.take(trie.byte[trie.levels[depth] :])
        origin = trie.levels[depth]
        for start, stop in zip(trie.levels[depth:-1], trie.levels[depth + 1 :], strict=True):
            places = places.take(trie.above[start:stop])
            places = self._step(places, classes[start - origin : stop - origin])
            np.not_equal(places, 0, out=alive[start:stop])
            if not alive[start:stop].any():
                return

    # ------------------------------------------------------------ the automaton

    def _step(self, places: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Where bytes of these classes (not none) lead, each from its own place."""
        index = places + classes
        while True:
            after = self._steps.take(index)
            if after.min() >= 0:
                return after
            wanted = np.zeros(len(self._steps) // self._width, bool)
            wanted[places[after == _UNKNOWN] // self._width] = True
            self._learn(np.flatnonzero(wanted) - 1)

    def _learn(self, states: np.ndarray) -> None:
        rows = self._automaton.transitions(states)[:, self._bytes]
        self._grow()
        table = self._steps.reshape(-1, self._width)
        table[states + 1] = (rows.astype(np.int64) + 1) * self._width

    def _grow(self) -> None:
        """Have a place for every state there is: those that what is known leads to among them."""
        need = (self._automaton.num_states + 1) * self._width
        if need > len(self._steps):
            more = max(need, 2 * len(self._steps)) - len(self._steps)
            self._steps = np.append(self._steps, np.full(more, _UNKNOWN, np.int64))
