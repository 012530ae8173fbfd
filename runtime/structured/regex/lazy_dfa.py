"""Deterministic byte automaton of a regex; a state is built when a text first reaches it.

    pattern a|bc      start --a--> accepting
                        |---b--> s1 --c--> accepting      (s1 exists once a text has begun with b)

A state is a set of the items of `nfa` (subset construction: Rabin & Scott 1959; on demand as in
Thompson's and RE2's matchers). `(a|b)*a(a|b){20}` has a million states, of which a text visits few.
The automaton is not minimal: equal states cost rows of masks, not exactness.
"""

from __future__ import annotations

import threading

import numpy as np

from rootlace.runtime.structured.regex.lookaround import has_look, without_look
from rootlace.runtime.structured.regex.nfa import ACCEPT, ByteEdge, nfa_of
from rootlace.runtime.structured.regex.syntax import Regex, TooLarge

DEAD = -1
"""State of a text that no continuation completes to a match."""

_NOWHERE = np.full(256, DEAD, np.int32)
_ITEMS_PER_STATE = 8
"""Bound of the mean number of items per state. One mask may need all items, and a step would wait
for them."""


class LazyDfa:
    """Automaton of `regex` over bytes; states are numbered as they are found.

    From every state but `DEAD` acceptance can be reached. Thread-safe. Visiting a new state raises
    `TooLarge` once there are `max_states`; known states stay usable then.
    """

    def __init__(self, regex: Regex, max_states: int) -> None:
        self._max_states = max_states
        plain = without_look(regex, max_states) if has_look(regex) else regex
        self._nfa = nfa_of(plain, max_states)
        self._lock = threading.Lock()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._sets: list[tuple[int, ...]] = []
        self._accepting: list[bool] = []
        self._expanded = bytearray()
        self._items = 0
        self._table = np.full((16, 256), DEAD, np.int32)
        self._chains: dict[int, tuple[bytes, int, int]] = {}
        self._classes: np.ndarray | None = None
        self.start = self._number(self._nfa.start) if self._nfa.start else DEAD

    @property
    def empty(self) -> bool:
        """Return whether no text matches; then `start` is `DEAD`."""
        return self.start == DEAD

    @property
    def num_states(self) -> int:
        """Return the number of states found so far, without `DEAD`."""
        return len(self._sets)

    @property
    def fullness(self) -> float:
        """Return the used share of the automaton's bounds, 0 to 1."""
        items = self._items / (_ITEMS_PER_STATE * self._max_states)
        return max(len(self._sets) / self._max_states, items)

    @property
    def nbytes(self) -> int:
        """Return the approximate memory of the automaton now, in bytes."""
        return self._table.nbytes + 40 * self._items + 250 * len(self._sets) + self._nfa.nbytes

    @property
    def byte_classes(self) -> np.ndarray:
        """Return the class of each byte, uint8 [256]. Bytes of one class lead to the same state,
        from every state. Classes are numbered from 0 by their lowest byte."""
        with self._lock:
            if self._classes is None:
                is_border = np.zeros(256, np.uint8)
                is_border[list(self._nfa.borders())] = 1
                is_border[0] = 0
                self._classes = np.cumsum(is_border, dtype=np.uint8)
            return self._classes

    def accepting(self, state: int) -> bool:
        """Return whether the text may end at `state`."""
        return state != DEAD and self._accepting[state]

    def step(self, state: int, byte: int) -> int:
        """Return the state after `byte`; `DEAD` if no text continues with it."""
        if state == DEAD:
            return DEAD
        if not self._expanded[state]:
            self._expand(state)
        return int(self._table[state, byte])

    def run(self, state: int, data: bytes) -> int:
        """Return the state after all of `data`."""
        for byte in data:
            if state == DEAD:
                return DEAD
            if not self._expanded[state]:
                self._expand(state)
            state = self._table.item(state, byte)
        return state

    def transitions(self, states: np.ndarray) -> np.ndarray:
        """Return the rows of `states` (1-d, none `DEAD`), expanded if needed: int32 [len(states),
        256]."""
        for state in states.tolist():
            if not self._expanded[state]:
                self._expand(state)
        return self._table[states]

    def all_transitions(self) -> np.ndarray:
        """Return the rows of all known states, int32 [num_states, 256]."""
        state = 0
        while state < self.num_states:
            if not self._expanded[state]:
                self._expand(state)
            state += 1
        return self._table[:state]

    def forced(self, state: int) -> tuple[bytes, int]:
        """Return the bytes that every text continues with at `state`, and the state after them.

        One edge of the compressed automaton of Zheng et al., "SGLang" (2024), section 4: a chain of
        states with one byte each. The chain stops where a text may end.
        """
        if state == DEAD:
            return b"", DEAD
        known = self._chains.get(state)
        if known is None:
            known = self._chain(state)
        text, offset, end = known
        return text[offset:], end

    def _chain(self, state: int) -> tuple[bytes, int, int]:
        """Follow the chain from `state`, and store the result for all states on the chain."""
        text = bytearray()
        path = []
        end = state
        while end not in self._chains:
            path.append(end)
            byte = self._only_byte(end)
            if byte is None:
                # The chain of a state with no single byte is empty.
                break
            text.append(byte)
            end = self.step(end, byte)
        else:
            rest, offset, last = self._chains[end]
            text += rest[offset:]
            end = last
        whole = bytes(text)
        for offset, passed in enumerate(path):
            self._chains[passed] = (whole, offset, end)
        return self._chains[state]

    def _only_byte(self, state: int) -> int | None:
        if self._accepting[state]:
            return None
        if not self._expanded[state]:
            self._expand(state)
        row = self._table[state]
        first = int(np.argmax(row >= 0))
        return first if np.count_nonzero(row >= 0) == 1 else None

    def _number(self, items: tuple[int, ...]) -> int:
        """Return the state that is the set `items` (ascending)."""
        number = self._numbers.get(items)
        if number is None:
            number = len(self._sets)
            self._items += len(items)
            if number >= self._max_states or self._items > _ITEMS_PER_STATE * self._max_states:
                raise TooLarge(f"the automaton has more than {self._max_states} states")
            # Other threads see a state only through a row, written later.
            self._sets.append(items)
            self._accepting.append(items[0] == ACCEPT)
            self._expanded.append(0)
            self._numbers[items] = number
        return number

    def _expand(self, state: int) -> None:
        """Fill the row of `state`."""
        with self._lock:
            if self._expanded[state]:
                return
            row = _NOWHERE.copy()
            ways = [edges for item in self._sets[state] if (edges := self._nfa.edges(item))]
            if len(ways) == 1:  # the edges of one item do not overlap
                for low, high, targets in ways[0]:
                    row[low : high + 1] = self._number(targets)
            elif ways:
                self._overlay([edge for edges in ways for edge in edges], row)
            if state >= len(self._table):
                capacity = max(2 * len(self._table), state + 1)
                table = np.full((min(capacity, self._max_states), 256), DEAD, np.int32)
                table[: len(self._table)] = self._table
                self._table = table
            self._table[state] = row
            self._expanded[state] = 1

    def _overlay(self, edges: list[ByteEdge], row: np.ndarray) -> None:
        """Write into `row`, for each byte, the state of all the items that `edges` lead to."""
        changes: dict[int, list[tuple[int, ...]]] = {}
        ends: dict[int, list[tuple[int, ...]]] = {}
        for low, high, targets in edges:
            changes.setdefault(low, []).append(targets)
            ends.setdefault(high + 1, []).append(targets)
        active: dict[tuple[int, ...], int] = {}
        borders = sorted(changes.keys() | ends.keys())
        for index, border in enumerate(borders):
            for targets in ends.get(border, ()):
                active[targets] -= 1
                if not active[targets]:
                    del active[targets]
            for targets in changes.get(border, ()):
                active[targets] = active.get(targets, 0) + 1
            if not active:
                continue
            if len(active) == 1:
                (items,) = active
            else:
                items = tuple(sorted({item for targets in active for item in targets}))
            row[border : borders[index + 1]] = self._number(items)
