"""llguidance with a memory: what it says is kept by the state of an automaton, and asked for again
only where the automaton does not know the way.

Most of what a schema allows is declared, also where an object may have other properties. The
declared part (`schema/declared`) is an automaton that tells places apart: texts that lead to one of
its states go on alike. So a mask that llguidance made at a state is the mask of every request that
comes there; it is made once, with the tokens that begin declared and end elsewhere in it. A token
that leaves the declared part has its request go on in llguidance.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import DEAD, LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.matchers.llguidance import LLGuidanceGrammar, LLGuidanceMatcher
from rootlace.runtime.constrained.matchers.places import Place, Places
from rootlace.runtime.constrained.schema.regular import MARK
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.table import TokenTable
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.constrained.tokens.walk import TokenWalk
from rootlace.runtime.contracts.matcher import ForcedTokenizer, Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow

log = logging.getLogger(__name__)

_ENDED = -2
_BEYOND = -3
"""States after the end of the sequence, and of texts that left the declared part."""
_MARK = ord(MARK)
_MAX_STEPS = 1 << 17
_MAX_FORCED = 1 << 12
"""Memos are emptied when they have so many entries."""


class HybridGrammar:
    """`inner`, whose declared part is `dfa`; see `interface.Grammar`.

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
        self.vocabulary = vocabulary
        self.inner = inner
        self.dfa = dfa
        self.canonicalizer = canonicalizer
        self.trusted = True
        trie = vocabulary.trie
        self.table = TokenTable(trie, vocabulary.eos_token_ids, dfa, max_table_bytes)
        self._any = TokenWalk(trie, _AnythingAtMarks(dfa))
        self._checking = threading.Lock()
        # Where tokens lead that are allowed, by state * vocabulary size + token.
        self.steps: dict[int, int] = {}
        self.places = Places()
        self._final: dict[int, bool] = {}
        self.texts: dict[int, bytes] = {}
        """What is forced at each state where it was asked."""
        self.forced: dict[tuple[int, bytes | None], list[int]] = {}

    @property
    def nbytes(self) -> int:
        memos = 100 * len(self.steps) + 300 * len(self.forced) + self.places.nbytes
        return self.inner.nbytes + self.dfa.nbytes + self.table.nbytes + memos

    def matcher(self) -> Matcher:
        return HybridMatcher(self) if self.trusted else self.inner.matcher()

    # ------------------------------------------------------------ for matchers

    def after(self, state: int, token_id: int) -> int:
        """The state after a token that is allowed at `state`."""
        if token_id in self.vocabulary.eos_token_ids:
            found = _ENDED
        elif state < 0 or not self.trusted:
            return _BEYOND
        else:
            data = self.vocabulary.token_bytes[token_id]
            try:
                found = DEAD if _MARK in data else self.dfa.run(state, data)
            except TooLarge:
                found = DEAD
            found = _BEYOND if found == DEAD else found
        if len(self.steps) >= _MAX_STEPS:
            self.steps.clear()
        self.steps[state * self.vocabulary.size + token_id] = found
        return found

    def keep(self, state: int, row: MaskRow, words: np.ndarray) -> None:
        """Take llguidance's mask of a state in, for all."""
        if self.trusted and not self._agrees(state, words):
            log.warning("a schema's automaton and llguidance do not agree; it is not used")
            self.trusted = False
            self.steps.clear()
            self.places.forget()
        if self.trusted:
            self.table.store(row.row, words)

    def _agrees(self, state: int, words: np.ndarray) -> bool:
        try:
            declared = self.table.walked(state)
            with self._checking:
                any_ = np.packbits(self._any.allowed(state + 1), bitorder="little").view(np.int32)
        except TooLarge:
            return True  # not known
        missing = declared & self.vocabulary.without_zeros & ~words
        return not (missing | words & ~(any_ | declared)).any()

    def is_final(self, state: int) -> bool:
        """Whether the text is complete and nothing can follow."""
        known = self._final.get(state)
        if known is None:
            known = self.dfa.accepting(state)
            try:
                known = known and not (self.dfa.transitions(np.array([state])) >= 0).any()
            except TooLarge:
                return False
            self._final[state] = known
        return known

    def keep_forced(self, state: int, tail: bytes | None, tokens: list[int]) -> None:
        if len(self.forced) >= _MAX_FORCED:
            self.forced.clear()
        self.forced[state, tail] = tokens


class _AnythingAtMarks:
    """The automaton, but that anything follows where a mark does (`token_walk.Automaton`). Its
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


class HybridMatcher:
    """See `interface.Matcher`. llguidance's own matcher is made when it is needed first, and takes
    in what it missed then."""

    __slots__ = (
        "__weakref__",
        "_before",
        "_error",
        "_grammar",
        "_own",
        "_place",
        "_size",
        "_steps",
        "_taken",
        "_tokens",
        "ready",
    )

    def __init__(self, grammar: HybridGrammar) -> None:
        self._grammar = grammar
        self._size = grammar.vocabulary.size
        self._steps = grammar.steps
        self._place = grammar.places.of(grammar.dfa.start)
        self.ready = self._place.mask
        self._tokens: list[int] = []
        self._before: list[Place] = []  # the place before each of them
        self._error = ""
        self._own: LLGuidanceMatcher | None = None
        self._taken = 0
        """How many of the tokens `_own` has taken in."""

    @property
    def declared(self) -> bool:
        """Whether the text is in the declared part, so that the automaton knows where."""
        return self._state >= 0

    @property
    def _state(self) -> int:
        return self._place.state

    # ------------------------------------------------------------ masks

    def allowed_mask(self) -> np.ndarray:
        words = np.zeros(bitmask.words_of(self._size), np.int32)
        self.fill_bitmask(words)
        return bitmask.unpacked(words, self._size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._size)
        row = self.mask_row()
        if row is not None and row.table.filled(row.row):
            out[:] = row.table.rows[row.row]
        elif not self._fill(out):
            out[:] = 0
        elif row is not None:
            self._grammar.keep(self._state, row, out)

    def _fill(self, out: np.ndarray) -> bool:
        """False, with `error` set, where llguidance came to its bounds."""
        own = self._there() if self._state != _ENDED else None
        if own is None:
            return False
        own.fill_bitmask(out)
        self._error = own.error()
        return not self._error

    def mask_row(self) -> MaskRow | None:
        place, grammar = self._place, self._grammar
        # Of a state that is not trusted even two requests of one step may need different masks.
        row = grammar.table.row(place.state) if place.state >= 0 and grammar.trusted else None
        if row is not None and row.address:
            place.mask = self.ready = row
        return row

    def prepare_mask(self) -> None:
        row = self.mask_row()
        if row is not None and not row.table.filled(row.row):
            self.fill_bitmask(np.zeros(bitmask.words_of(self._size), np.int32))

    def automaton(self) -> AutomatonState | None:
        return None

    # ------------------------------------------------------------ the text

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool:
        place = self._place
        after = place.onward.get(token_id)
        if after is None or (jumps and not after.quiet):
            return False
        self._tokens.append(token_id)
        self._before.append(place)
        self._place = after
        self.ready = after.mask
        return True

    def _go(self, token_id: int, after: int) -> None:
        places, place = self._grammar.places, self._place
        following = places.of(after)
        if place.state >= 0 and after >= 0 and self._goes_on(after) and self._grammar.trusted:
            places.lead(place, token_id, following)
        self._tokens.append(token_id)
        self._before.append(place)
        self._place = following
        self.ready = following.mask
        self._error = ""

    def advance(self, token_id: int) -> bool:
        state = self._state
        # No state below 0 is in the memo, and no token outside the vocabulary may alias another.
        after = (
            self._steps.get(state * self._size + token_id)
            if state >= 0 and 0 <= token_id < self._size
            else None
        )
        if after is None:
            if not self._allows(token_id):
                return False
            after = self._grammar.after(state, token_id)
        self._go(token_id, after)
        return True

    def _allows(self, token_id: int) -> bool:
        if self._state == _ENDED or not 0 <= token_id < self._size:
            return self._refuse(token_id)
        row = self.mask_row()
        if row is not None and row.table.filled(row.row):
            if bitmask.allows(row.table.rows[row.row], token_id):
                return True
            return self._refuse(token_id)
        own = self._there()
        if own is None:
            return False
        if not own.advance(token_id):
            self._error = own.error()
            return False
        self._taken += 1
        return True

    def _refuse(self, token_id: int) -> bool:
        self._error = f"the constraint forbids token {token_id} after {len(self._tokens)} tokens"
        return False

    def _goes_on(self, state: int) -> bool:
        return not self._grammar.is_final(state)

    def is_accepting(self) -> bool:
        if self._state == _BEYOND:
            own = self._there()
            return own is not None and own.is_accepting()
        return self._state == _ENDED or self._grammar.dfa.accepting(self._state)

    def is_finished(self) -> bool:
        if self._state == _BEYOND:
            own = self._there()
            return own is not None and own.is_finished()
        return self._state == _ENDED or self._grammar.is_final(self._state)

    def forced_text(self) -> bytes:
        if self._state == _ENDED:
            return b""
        texts = self._grammar.texts
        known = texts.get(self._state)
        if known is None:
            own = self._there()
            if own is None:
                return b""
            known = own.forced_text()
            if self._state >= 0 and not own.error():
                texts[self._state] = known
        return known

    def forced_tokens(self) -> list[int]:
        if self._state < 0:
            own = self._there() if self._state == _BEYOND else None
            return [] if own is None else own.forced_tokens()
        if not self.forced_text():
            if self._state in self._grammar.texts:
                self._place.quiet = True
            return []
        grammar = self._grammar
        tail = grammar.canonicalizer.tail(self._tokens)
        known = grammar.forced.get((self._state, tail))
        if known is None:
            own = self._there()
            known = [] if own is None else own.forced_tokens()
            if own is not None and not own.error():
                grammar.keep_forced(self._state, tail, known)
        return list(known)

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._error = ""
        if not count:
            return
        self._place = self._before[-count]
        self.ready = self._place.mask
        del self._tokens[-count:], self._before[-count:]
        if self._own is not None and self._taken > len(self._tokens):
            self._own.rollback(self._taken - len(self._tokens))
            self._taken = len(self._tokens)

    def reset(self) -> None:
        self.rollback(len(self._tokens))

    # ------------------------------------------------------------ the rest

    def can_retreat(self) -> bool:
        return False

    def retreat(self) -> int | None:
        self._error = "the constraint has nothing to check that its mask does not hold"
        return None

    def error(self) -> str:
        return self._error

    def _there(self) -> LLGuidanceMatcher | None:
        """llguidance's matcher at this place; None, with `error` set, if it cannot come here."""
        own = self._own
        if own is None:
            own = self._own = self._grammar.inner.matcher()
        while self._taken < len(self._tokens):
            if not own.advance(self._tokens[self._taken]):
                self._error = own.error()
                return None
            self._taken += 1
        return own
