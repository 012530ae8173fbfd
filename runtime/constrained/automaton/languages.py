"""Questions about regular languages, asked of interegular within a budget.

These questions come up while a constraint is compiled, never while a request runs on it. The
automata are ours: interegular reads sets of characters one by one, looks around only inside groups
and cannot be stopped while it builds. It does the products, and counts the states that it visits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from interegular.fsm import FSM, Alphabet

from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.syntax import Regex

MAX_STATES = 512
"""The states that one language may have."""
MAX_STEPS = 2048
"""States of a product that one question may visit."""


class Language:
    """The texts of `regex`, as UTF-8. Raises `TooLarge` where its automaton is at once."""

    def __init__(self, regex: Regex, max_states: int = MAX_STATES) -> None:
        self._dfa = LazyDfa(regex, max_states)

    @property
    def empty(self) -> bool:
        return self._dfa.empty

    def first_bytes(self) -> list[int]:
        """The bytes that a text may begin with."""
        if self.empty:
            return []
        first = self._dfa.transitions(np.array([self._dfa.start]))[0]
        return np.flatnonzero(first >= 0).tolist()

    def overlaps(self, other: Language) -> bool | None:
        """Whether some text is in both; None where that is not found out within the budget."""
        if self.empty or other.empty:
            return False
        try:
            return not self._fsm.isdisjoint(other._fsm)
        except TooLarge:
            return None

    @cached_property
    def _fsm(self) -> FSM:
        dfa = self._dfa
        rows = dfa.all_transitions()
        one_of_each = np.unique(dfa.byte_classes, return_index=True)[1]
        # Numbered from 1: `FSM.isdisjoint` takes a state 0 for a dead end.
        return FSM(
            alphabet=_ByteClasses(dfa.byte_classes.tolist()),
            states=range(1, len(rows) + 1),
            initial=dfa.start + 1,
            finals={state + 1 for state in range(len(rows)) if dfa.accepting(state)},
            map={
                state + 1: {key: to + 1 for key, to in enumerate(row) if to >= 0}
                for state, row in enumerate(rows[:, one_of_each].tolist())
            },
            __no_validation__=True,
        )


class _ByteClasses(Alphabet):  # type: ignore[misc]
    """The classes of bytes that one automaton tells apart."""

    def __init__(self, class_of: list[int]) -> None:
        super().__init__({})
        self._class_of = class_of

    def intersect(self, other: _ByteClasses) -> Any:
        """The classes that either tells apart, and what they are to each of the two."""
        both = sorted(set(zip(self._class_of, other._class_of, strict=True)))
        own, others = zip(*both, strict=True)
        return _Counted(len(both)), (dict(enumerate(own)), dict(enumerate(others)))


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
