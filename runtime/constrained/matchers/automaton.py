"""Regular constraints on our own automaton: it knows masks, steps and what is forced by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.automaton.dfa import DEAD, LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.matchers.cursor import Cursor
from rootlace.runtime.constrained.matchers.places import ENDED, PlacedGrammar
from rootlace.runtime.constrained.matchers.stepped import SteppedBuilds
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import ForcedTokenizer, Grammar, Matcher
from rootlace.runtime.contracts.plan import MaskRow, SteppedAutomaton


class AutomatonGrammar(PlacedGrammar):
    """A regular language on a lazy automaton; see `contracts.matcher.Grammar`.

    Should the automaton get larger than it may while requests run on it, they ask `fallback()`
    (called once), a grammar of the same language, from there on, and later requests ask nothing
    else. `max_table_bytes` bounds the masks that are kept; others are made anew for each request
    that asks. `builds` makes the whole automaton for a device, once a matcher is asked for it.
    """

    backend = "automaton"

    def __init__(
        self,
        vocabulary: Vocabulary,
        dfa: LazyDfa,
        canonicalizer: ForcedTokenizer,
        fallback: Callable[[], Grammar],
        max_table_bytes: int = ConstraintConfig.max_table_bytes,
        builds: SteppedBuilds | None = None,
    ) -> None:
        super().__init__(vocabulary, dfa, canonicalizer, max_table_bytes)
        self._make_fallback = fallback
        self._fallback: Grammar | None = None
        self._lock = threading.Lock()
        self._builds = builds
        self._stepped: SteppedAutomaton | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(part.nbytes for part in (self._fallback, self._stepped) if part)

    def matcher(self) -> Matcher:
        return Cursor(self) if self._fallback is None else self._fallback.matcher()

    def other(self) -> Matcher:
        with self._lock:
            if self._fallback is None:
                self._fallback = self._make_fallback()
            return self._fallback.matcher()

    # ------------------------------------------------------------ for cursors

    def stepped(self) -> SteppedAutomaton | None:
        """Made for the first who asks, on another thread."""
        if self._builds is not None:
            with self._lock:
                builds, self._builds = self._builds, None
            if builds is not None:
                vocabulary = self.vocabulary
                builds.submit(vocabulary.trie, vocabulary.eos_token_ids, self.dfa, self._take)
        return self._stepped

    def _take(self, stepped: SteppedAutomaton | None) -> None:
        self._stepped = stepped

    def write(self, state: int, out: np.ndarray | None) -> bool:
        try:
            self.table.fill(state) if out is None else self.table.write(state, out)
        except TooLarge:
            return False
        return True

    def row(self, state: int) -> MaskRow | None:
        """Once there is a fallback, only rows that are filled: its masks may fail."""
        row = self.table.row(state)
        lost = self._fallback is not None and row is not None and not self.table.filled(row.row)
        return None if lost else row

    def keep(self, state: int, words: np.ndarray, failed: bool) -> None:
        """The same language has the same mask, whoever makes it. A mask that failed is the
        request's alone."""
        row = None if failed else super().row(state)
        if row is not None:
            self.table.store(row.row, words)

    def step(self, state: int, token_id: int) -> int | None:
        if token_id in self.vocabulary.eos_token_ids:
            return ENDED if self.dfa.accepting(state) else DEAD
        data = self.vocabulary.token_bytes[token_id]
        return self.run(state, data) if data else DEAD
