"""Tokens that do the same to every state of an automaton, and what each class of them does.

A token is a function from states to states: its bytes' functions, one after another. Tokens with
one function are one class, the coarsest grouping there is (the classes are elements of the
automaton's transition monoid). They are found by walking the trie of the vocabulary against the
automaton of functions: a node's function is that of the node above and of the byte between them, so
that each pair of a function and a class of bytes is composed once, however many nodes there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.tokens.byte_trie import ByteTrie


@dataclass(frozen=True)
class TokenClasses:
    """`token_class` int32 [vocab_size]: the class of each token; 0 is that of tokens that no state
    allows. `next_state` int32 [num_states, num_classes]: the state after a token of a class, -1
    where it is forbidden. The end of the sequence is not a step of the automaton: forbidden here.
    """

    token_class: np.ndarray
    next_state: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.token_class.nbytes + self.next_state.nbytes


def token_classes(trie: ByteTrie, automaton: LazyDfa, max_bytes: int) -> TokenClasses | None:
    """The classes of the whole automaton; None if the table has more bytes.

    May raise `TooLarge` where the automaton is not explored yet.
    """
    functions = _Functions(automaton.all_transitions(), automaton.byte_classes, max_bytes)
    found = np.zeros(trie.num_nodes + 1, np.int64)  # of each node; 0: dead everywhere
    found[0] = 1
    classes = automaton.byte_classes.take(trie.byte)
    level = found[:1]
    for start, stop in zip(trie.levels[1:-1], trie.levels[2:], strict=True):
        composed = functions.compose(level.take(trie.above[start:stop]), classes[start:stop])
        if composed is None:
            return None
        level = found[start:stop] = composed
    # Functions of prefixes that are no tokens are not needed; class 0 always is.
    of_token = found.take(trie.node[: trie.vocab_size])
    needed = np.zeros(functions.count, bool)
    needed[of_token] = True
    needed[0] = True
    numbers = np.cumsum(needed, dtype=np.int32) - 1
    return TokenClasses(
        numbers.take(of_token), np.ascontiguousarray(functions.table[: functions.count][needed].T)
    )


class _Functions:
    """The functions met so far: 0 kills every state, 1 is the identity."""

    def __init__(self, steps: np.ndarray, byte_classes: np.ndarray, max_bytes: int) -> None:
        states = len(steps)
        width = int(byte_classes.max()) + 1
        representative = np.empty(width, np.int64)
        representative[byte_classes] = np.arange(256)
        # Row `states` is the dead state's, so that -1 is a row too.
        dead = np.full((1, width), -1, np.int32)
        self._steps = np.concatenate([steps[:, representative], dead])
        self._width = width
        self._most = max(max_bytes // (4 * max(states, 1)), 2)
        self.table = np.empty((16, states), np.int32)
        self.table[0], self.table[1] = -1, np.arange(states)
        self._numbers = {self.table[0].tobytes(): 0}
        self._numbers.setdefault(self.table[1].tobytes(), 1)
        self.count = 2
        self._products = np.full((16, width), -1, np.int64)
        self._products[0] = 0

    def compose(self, functions: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
        """The functions followed by a byte of these classes; None if there get to be too many."""
        index = functions * self._width + classes
        found = self._products.take(index)
        if found.min() < 0:
            wanted = np.zeros(self._products.size, bool)
            wanted[index[found < 0]] = True
            pairs = np.flatnonzero(wanted)
            for first in range(0, len(pairs), 256):  # a bounded amount of memory at a time
                if not self._compose_pairs(pairs[first : first + 256]):
                    return None
            found = self._products.take(index)
        return found

    def _compose_pairs(self, pairs: np.ndarray) -> bool:
        functions, classes = np.divmod(pairs, self._width)
        composed = self._steps[self.table[functions], classes[:, None]]
        for pair, function in zip(pairs.tolist(), composed, strict=True):
            key = function.tobytes()
            number = self._numbers.get(key)
            if number is None:
                number = self.count
                if number >= self._most:
                    return False
                if number == len(self.table):
                    self.table = np.concatenate([self.table, np.empty_like(self.table)])
                    unknown = np.full_like(self._products, -1)
                    self._products = np.concatenate([self._products, unknown])
                self.table[number] = function
                self._numbers[key] = number
                self.count += 1
            self._products.flat[pair] = number
        return True
