"""Tokens that an automaton survives from a state: the trie of the vocabulary × the automaton.

A walk handles a state at once: tokens share the steps of common prefixes, and a forbidden node
removes all nodes below it. A level of the trie is one array operation. The operation covers the
alive nodes if these are few, and the whole level if they are many. Gathering a few nodes costs
about ten times more per node than computing all nodes.
"""

from __future__ import annotations

import itertools
import threading
from typing import Protocol

import msgspec
import numpy as np

from rootlace.runtime.contracts.plan import MaskRow
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.vocabulary import vocabulary
from rootlace.runtime.structured.vocabulary.vocabulary import ByteTrie

_DENSE = 16
_SPARSE = 4096
"""Bounds of a sparse level. The walk computes a level and all levels below it whole if the parents
of more than `_SPARSE` nodes, and of over one in `_DENSE`, are alive."""
_UNKNOWN = -1


class Automaton(Protocol):
    """Part of a `LazyDfa` that walks use. State -1 is the dead state."""

    @property
    def num_states(self) -> int: ...

    @property
    def byte_classes(self) -> np.ndarray:
        """Classes of bytes, uint8 [256], from 0 on: bytes of a class lead to the same state, from
        every state."""

    def transitions(self, states: np.ndarray) -> np.ndarray:
        """Return the state after each byte, int32 [n, 256]. May raise `TooLarge`."""


class TokenWalk:
    """Walks of one automaton, with a cache of the steps seen. Not thread-safe. A walk that
    `TooLarge` ended changes nothing and may be tried again."""

    def __init__(self, trie: ByteTrie, automaton: Automaton) -> None:
        self._trie = trie
        self._automaton = automaton
        classes = automaton.byte_classes
        self._class_of = classes
        self._width = int(classes.max()) + 1
        self._bytes = np.empty(self._width, np.int64)  # one byte of each class
        self._bytes[classes] = np.arange(256)
        # Flat [states + 1, classes]: the target of each class of bytes, as an index into this very
        # array. State s has row s + 1; row 0 is the dead state's.
        self._steps = np.zeros(self._width, np.int64)

    @property
    def nbytes(self) -> int:
        return self._steps.nbytes

    def allowed(self, state: int) -> np.ndarray:
        """Return the tokens that do not kill `state` (not dead), bool [32 * ceil(vocab_size /
        32)]."""
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
        """Walk whole levels from `depth` on, and mark the nodes that are `alive`. `places`: the
        automaton's places at all nodes of the level above."""
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
        """Step from each place by its byte class (at least one) and return the places reached."""
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
        """Extend the tables to every known state, including the states that known steps reach."""
        need = (self._automaton.num_states + 1) * self._width
        if need > len(self._steps):
            more = max(need, 2 * len(self._steps)) - len(self._steps)
            self._steps = np.append(self._steps, np.full(more, _UNKNOWN, np.int64))


# Table --------------------------------------------------------------------------------------------
#
# The masks of an automaton's states over the vocabulary, packed, each made when first needed.


_KEYS = itertools.count()
_FIRST_ROWS = 8


class TokenTable:
    """Table of masks (`plan.MaskTable`): one row per state that a request has reached. Thread-safe.
    Reads (`row`, `filled`) never wait for a row that is being filled."""

    def __init__(
        self, trie: ByteTrie, eos_token_ids: tuple[int, ...], dfa: LazyDfa, max_bytes: int
    ) -> None:
        """Make a table. `max_bytes` bounds it: no row is given out beyond the bound."""
        self.key = next(_KEYS)
        self._dfa = dfa
        self._words = -(-trie.vocab_size // 32)
        self._max_rows = max_bytes // max(4 * self._words, 1)
        self._eos = np.zeros(self._words, np.int32)
        for token in eos_token_ids:
            self._eos.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._walk = TokenWalk(trie, dfa)
        self._walking = threading.Lock()
        self._changing = threading.Lock()
        self._row_of: dict[int, MaskRow] = {}
        self._state_of: list[int] = []
        self._filled = bytearray()
        self._replaced: list[np.ndarray] = []
        """Smaller arrays of rows, kept because their addresses were given out."""
        self._rows = np.zeros((0, self._words), np.int32)

    @property
    def rows(self) -> np.ndarray:
        """Rows of masks, int32 [capacity, words]; replaced when the table grows."""
        return self._rows

    @property
    def nbytes(self) -> int:
        rows = self._rows.nbytes + sum(array.nbytes for array in self._replaced)
        return rows + self._walk.nbytes + 200 * len(self._row_of)

    def forget(self) -> None:
        """Give out no row again; given rows keep their contents."""
        self._row_of.clear()

    def filled(self, row: int) -> bool:
        return self._filled[row] != 0

    def row(self, state: int) -> MaskRow | None:
        """Return the row of `state` (not `DEAD`), filled or not; None if the table is full."""
        known = self._row_of.get(state)
        if known is not None or len(self._row_of) >= self._max_rows:
            return known
        with self._changing:
            known = self._row_of.get(state)
            if known is None and len(self._row_of) < self._max_rows:
                # First the flag: readers of the row may ask for it.
                self._filled.append(0)
                self._state_of.append(state)
                known = self._row_of[state] = MaskRow(self, len(self._filled) - 1)
            return known

    def fill(self, state: int) -> None:
        """Fill the row of `state`. Raises `TooLarge` if the automaton is too large; nothing has
        changed then."""
        place = self.row(state)
        if place is None or self._filled[place.row]:
            return
        with self._walking:
            if not self._filled[place.row]:
                self.store(place.row, self._mask(state))

    def store(self, row: int, words: np.ndarray) -> None:
        """Fill `row` with a mask that was found in another way: int32 [words]."""
        with self._changing:
            if self._filled[row]:
                return
            if row >= len(self._rows):
                capacity = max(row + 1, 2 * len(self._rows), _FIRST_ROWS)
                rows = np.zeros((min(capacity, self._max_rows), self._words), np.int32)
                rows[: len(self._rows)] = self._rows
                self._replaced.append(self._rows)
                self._rows = rows
            self._rows[row] = words
            self._filled[row] = 1
            self._row_of[self._state_of[row]] = MaskRow(
                self, row, vocabulary.address(self._rows[row])
            )

    def write(self, state: int, out: np.ndarray) -> None:
        """Write the mask of `state` to `out`, int32 [words]; the row is filled if there is one.
        Raises `TooLarge` if the automaton is too large."""
        self.fill(state)
        place = self.row(state)
        out[:] = self.walked(state) if place is None else self._rows[place.row]

    def walked(self, state: int) -> np.ndarray:
        """Return the mask of `state` by the automaton, int32 [words], with any content of its row.
        Raises `TooLarge` if the automaton is too large."""
        with self._walking:
            return self._mask(state)

    def _mask(self, state: int) -> np.ndarray:
        words = vocabulary.packed(self._walk.allowed(state))
        return words | self._eos if self._dfa.accepting(state) else words


# Classes ------------------------------------------------------------------------------------------
#
# Classes of tokens with the same effect on every state of an automaton, and the effect of each
# class.
#
# A token is a function from states to states: its bytes' functions, one after another. Tokens with
# one function are one class, the coarsest possible grouping (the classes are elements of the
# automaton's transition monoid). The classes are found by walking the trie of the vocabulary
# against the automaton of functions. A node's function combines the function of the node above and
# the byte between them. So each pair of a function and a class of bytes is composed once, for any
# number of nodes.


class TokenClasses(msgspec.Struct, frozen=True):
    """Classes of tokens. `token_class` int32 [vocab_size]: the class of each token; class 0 has the
    tokens that no state allows. `next_state` int32 [num_states, num_classes]: the state after a
    token of a class; -1: forbidden. The end of the sequence is no step of the automaton: forbidden
    here."""

    token_class: np.ndarray
    next_state: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.token_class.nbytes + self.next_state.nbytes


def token_classes(trie: ByteTrie, automaton: LazyDfa, max_bytes: int) -> TokenClasses | None:
    """Return the classes of the whole automaton; None if the table exceeds `max_bytes`. May raise
    `TooLarge` if the automaton is not explored yet."""
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
    # Only functions of tokens are needed, and class 0.
    of_token = found.take(trie.node[: trie.vocab_size])
    needed = np.zeros(functions.count, bool)
    needed[of_token] = True
    needed[0] = True
    numbers = np.cumsum(needed, dtype=np.int32) - 1
    return TokenClasses(
        numbers.take(of_token), np.ascontiguousarray(functions.table[: functions.count][needed].T)
    )


class _Functions:
    """Functions found so far: 0 kills every state, 1 is the identity."""

    def __init__(self, steps: np.ndarray, byte_classes: np.ndarray, max_bytes: int) -> None:
        states = len(steps)
        width = int(byte_classes.max()) + 1
        representative = np.empty(width, np.int64)
        representative[byte_classes] = np.arange(256)
        # Row `states` is the dead state's, so that -1 is a row too.
        dead = np.full((1, width), -1, np.int32)
        self._steps = np.concatenate([steps[:, representative], dead])
        self._width = width
        self._limit = max(max_bytes // (4 * max(states, 1)), 2)
        self.table = np.empty((16, states), np.int32)
        self.table[0], self.table[1] = -1, np.arange(states)
        self._numbers = {self.table[0].tobytes(): 0}
        self._numbers.setdefault(self.table[1].tobytes(), 1)
        self.count = 2
        self._products = np.full((16, width), -1, np.int64)
        self._products[0] = 0

    def compose(self, functions: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
        """Follow each function by a byte of its class; None if the functions become too many."""
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
                if number >= self._limit:
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
