"""Questions about regular languages, asked of interegular within a budget.

These questions come up while a constraint is compiled, never while a request runs on it. The
automata are ours: interegular reads sets of characters one by one, looks around only inside groups
and cannot be stopped while it builds. It does the products, and counts the states that it visits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from interegular.fsm import FSM, Alphabet

from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.syntax import Regex, TooLarge

MAX_STATES = 512
"""The states that one language may have."""
MAX_STEPS = 2048
"""States of a product that one question may visit."""
_FOUND = -1
"""The state behind a whole text and one more byte."""
_UNREAD = -1
"""The class of the bytes that no state reads."""


class Language:
    """The texts of `regex`, as UTF-8. Raises `TooLarge` where its automaton is at once.

    Sets of bytes are integers of 256 bits.
    """

    def __init__(self, regex: Regex, max_states: int = MAX_STATES) -> None:
        self._dfa = LazyDfa(regex, max_states)
        # A language is asked about itself, too, and would refer to itself.
        self._known: WeakKeyDictionary[Language, dict[int, bool | None]] = WeakKeyDictionary()
        self._made: dict[int, FSM] = {}

    @property
    def empty(self) -> bool:
        return self._dfa.empty

    def first_bytes(self) -> int:
        """The bytes that a text may begin with."""
        if self.empty:
            return 0
        return _bits(self._dfa.transitions(np.array([self._dfa.start]))[0] >= 0)

    def goes_on_behind(self, text: Language, following: int) -> bool | None:
        """Whether some text begins with a whole one of `text` and then with one of the bytes
        `following`; None where that is not found out within the budget."""
        if self.empty or text.empty:
            return False
        known = self._known.setdefault(text, {})
        if following not in known:
            try:
                known[following] = self._goes_on_behind(text, following)
            except TooLarge:
                known[following] = None
        return known[following]

    def _goes_on_behind(self, text: Language, following: int) -> bool:
        first = self.first_bytes() if text._dfa.accepting(text._dfa.start) else 0
        if not following & (first | self._later_bytes):
            return False
        return not self._fsm(0).isdisjoint(text._fsm(following))

    @cached_property
    def _later_bytes(self) -> int:
        """The bytes that stand behind the first one in some text."""
        rows = self._dfa.all_transitions()
        return _bits((rows[np.unique(rows[rows >= 0])] >= 0).any(axis=0))

    def _fsm(self, following: int) -> FSM:
        """All beginnings of texts; or the whole texts with one of the bytes `following` behind."""
        if following not in self._made:
            self._made[following] = self._make(following)
        return self._made[following]

    def _make(self, following: int) -> FSM:
        rows = self._dfa.all_transitions()
        behind = np.unpackbits(
            np.frombuffer(following.to_bytes(32, "little"), np.uint8), bitorder="little"
        )
        # A class of bytes is 2 * the automaton's own + whether its bytes are among `following`.
        read = (rows >= 0).any(axis=0) | (behind == 1)
        class_of = np.where(read, 2 * self._dfa.byte_classes.astype(int) + behind, _UNREAD)
        keys, one_of_each = np.unique(class_of, return_index=True)
        # Numbered from 1: `FSM.isdisjoint` takes a state 0 for a dead end.
        steps = {
            state: {key: to + 1 for key, to in zip(keys.tolist(), row, strict=True) if to >= 0}
            for state, row in enumerate(rows[:, one_of_each].tolist(), 1)
        }
        if following:
            # Odd classes are those of `following`.
            found = {key: _FOUND for key in keys.tolist() if key & 1 and key != _UNREAD}
            for state, row in steps.items():
                if self._dfa.accepting(state - 1):
                    row.update(found)  # where else the byte leads does not matter
        return FSM(
            alphabet=_ByteClasses(class_of.tolist()),
            states=(),
            initial=self._dfa.start + 1,
            # None of the automaton's states is dead: all that leads to one begins some text.
            finals={_FOUND} if following else set(steps),
            map=steps,
            __no_validation__=True,
        )


def _bits(of_bytes: np.ndarray) -> int:
    return int.from_bytes(np.packbits(of_bytes, bitorder="little").tobytes(), "little")


class _ByteClasses(Alphabet):  # type: ignore[misc]
    """The classes of bytes that one automaton tells apart."""

    def __init__(self, class_of: list[int]) -> None:
        super().__init__({})
        self._class_of = class_of

    def intersect(self, other: _ByteClasses) -> Any:
        """The classes that either tells apart and both read, and what they are to each of them."""
        pairs = set(zip(self._class_of, other._class_of, strict=True))
        both = [pair for pair in pairs if _UNREAD not in pair]
        old = tuple({new: pair[side] for new, pair in enumerate(both)} for side in (0, 1))
        return _Counted(len(both)), old


class _Counted(Alphabet):  # type: ignore[misc]
    """Is asked for its transitions once per state, and raises `TooLarge` beyond the budget."""

    def __init__(self, size: int) -> None:
        super().__init__(dict(enumerate(range(size))))
        self._left = MAX_STEPS

    @property
    def by_transition(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooLarge(f"the product has more than {MAX_STEPS} states")
        return super().by_transition
