"""The masks of an automaton's states over the vocabulary, packed, each made when first needed."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.byte_trie import ByteTrie
from rootlace.runtime.constrained.tokens.walk import TokenWalk
from rootlace.runtime.contracts.plan import MaskRow

_KEYS = itertools.count()
_FIRST_ROWS = 8


class TokenTable:
    """A table of masks (`plan.MaskTable`): one row per state that a request has stood at.

    Thread-safe. What only looks (`row`, `filled`) never waits for a row that is being filled.
    """

    def __init__(
        self, trie: ByteTrie, eos_token_ids: tuple[int, ...], dfa: LazyDfa, max_bytes: int
    ) -> None:
        """Of rows that would make the table larger than `max_bytes` none is given out."""
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
        """Smaller arrays of rows, whose addresses were given out."""
        self._rows = np.zeros((0, self._words), np.int32)

    @property
    def rows(self) -> np.ndarray:
        """int32 [capacity, words]; replaced when it grows."""
        return self._rows

    @property
    def nbytes(self) -> int:
        rows = self._rows.nbytes + sum(array.nbytes for array in self._replaced)
        return rows + self._walk.nbytes + 200 * len(self._row_of)

    def forget(self) -> None:
        """Give no row out again; those that were stay as they are."""
        self._row_of.clear()

    def filled(self, row: int) -> bool:
        return self._filled[row] != 0

    def row(self, state: int) -> MaskRow | None:
        """The row of `state` (not the dead one), filled or not; None where the table is full."""
        known = self._row_of.get(state)
        if known is not None or len(self._row_of) >= self._max_rows:
            return known
        with self._changing:
            known = self._row_of.get(state)
            if known is None and len(self._row_of) < self._max_rows:
                # First the flag: who sees the row may ask for it.
                self._filled.append(0)
                self._state_of.append(state)
                known = self._row_of[state] = MaskRow(self, len(self._filled) - 1)
            return known

    def fill(self, state: int) -> None:
        """Fill the row of `state`. Raises `TooLarge` if the automaton is; nothing has changed."""
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
            self._row_of[self._state_of[row]] = MaskRow(self, row, bitmask.address(self._rows[row]))

    def write(self, state: int, out: np.ndarray) -> None:
        """Write the mask of `state` to `out`, int32 [words]; the row is filled if there is one.

        Raises `TooLarge` if the automaton is.
        """
        self.fill(state)
        place = self.row(state)
        out[:] = self.walked(state) if place is None else self._rows[place.row]

    def walked(self, state: int) -> np.ndarray:
        """The mask of `state` by the automaton, int32 [words], whatever its row has. Raises
        `TooLarge` if the automaton is."""
        with self._walking:
            return self._mask(state)

    def _mask(self, state: int) -> np.ndarray:
        words = bitmask.packed(self._walk.allowed(state))
        return words | self._eos if self._dfa.accepting(state) else words
