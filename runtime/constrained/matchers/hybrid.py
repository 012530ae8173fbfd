"""llguidance with a memory: what it says is kept by the state of an automaton of what a schema
declares (`schema/regular`), and asked for again only where the automaton does not know the way.

A mask that llguidance made at a state is that of every request that comes there, with the tokens in
it that begin declared and end elsewhere. Such a token has its request go on in llguidance.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import DEAD, LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.matchers.cursor import Cursor
from rootlace.runtime.constrained.matchers.llguidance import LLGuidanceGrammar
from rootlace.runtime.constrained.matchers.places import BEYOND, PlacedGrammar
from rootlace.runtime.constrained.schema.regular import MARK
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.constrained.tokens.walk import TokenWalk
from rootlace.runtime.contracts.matcher import ForcedTokenizer, Matcher
from rootlace.runtime.contracts.plan import MaskRow

log = logging.getLogger(__name__)

_MARK = ord(MARK)


class HybridGrammar(PlacedGrammar):
    """`inner`, whose declared part is `dfa`; see `contracts.matcher.Grammar`.

    Every mask that llguidance makes at a state is compared with what the automaton says of it: all
    that is declared must be in it, and nothing that could not begin at a mark. Should the two not
    agree, the automaton is given up, and all go on in llguidance from their next token on.
    """

    backend = "llguidance"

    def __init__(
        self,
        vocabulary: Vocabulary,
        inner: LLGuidanceGrammar,
        dfa: LazyDfa,
        canonicalizer: ForcedTokenizer,
        max_table_bytes: int,
    ) -> None:
        super().__init__(vocabulary, dfa, canonicalizer, max_table_bytes)
        self.inner = inner
        self._any = TokenWalk(vocabulary.trie, _AnythingAtMarks(dfa))
        self._checking = threading.Lock()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.inner.nbytes

    def matcher(self) -> Matcher:
        return Cursor(self) if self.trusted else self.inner.matcher()

    def other(self) -> Matcher:
        return self.inner.matcher()

    # ------------------------------------------------------------ for cursors

    def row(self, state: int) -> MaskRow | None:
        # Of a state that is not trusted even two requests of one step may need different masks.
        return super().row(state) if self.trusted else None

    def keep(self, state: int, words: np.ndarray, failed: bool) -> None:
        """Take llguidance's mask of a state in, for all."""
        row = self.row(state)
        if failed or row is None:
            return
        if not self._agrees(state, words):
            log.warning("a schema's automaton and llguidance do not agree; it is not used")
            self.trusted = False
            self.places.forget()
        if self.trusted:
            self.table.store(row.row, words)

    def _agrees(self, state: int, words: np.ndarray) -> bool:
        try:
            declared = self.table.walked(state)
            with self._checking:
                any_ = bitmask.packed(self._any.allowed(state + 1))
        except TooLarge:
            return True  # not known
        missing = declared & self.vocabulary.without_zeros & ~words
        return not (missing | words & ~(any_ | declared)).any()

    def step(self, state: int, token_id: int) -> int | None:
        row = self.row(state)
        if row is None or not self.table.filled(row.row):
            return None
        allowed = bitmask.allows(self.table.rows[row.row], token_id)
        return self.after(state, token_id) if allowed else DEAD

    def forced_text(self, state: int) -> bytes | None:
        return self.texts.get(state)

    def forced_tokens(self, state: int, tail: bytes) -> list[int] | None:
        return None

    def after(self, state: int, token_id: int) -> int:
        is_text = token_id not in self.vocabulary.eos_token_ids
        if is_text and (not self.trusted or _MARK in self.vocabulary.token_bytes[token_id]):
            return BEYOND
        return super().after(state, token_id)


class _AnythingAtMarks:
    """The automaton, but that anything follows where a mark does (`walk.Automaton`). Its
    state s is s + 1 here; 0 is behind a mark."""

    def __init__(self, dfa: LazyDfa) -> None:
        self._dfa = dfa

    @property
    def num_states(self) -> int:
        return self._dfa.num_states + 1

    @property
    def byte_classes(self) -> np.ndarray:
        return self._dfa.byte_classes

    def transitions(self, states: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(states), 256), np.int32)
        inner = np.flatnonzero(states)
        found = self._dfa.transitions(states[inner] - 1) + 1
        found[found == 0] = DEAD
        marked = found[:, _MARK] > 0
        found[marked] = np.maximum(found[marked], 0)
        rows[inner] = found
        return rows
