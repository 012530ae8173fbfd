"""Constraints on our own automaton: masks in a shared table, steps that are remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.automaton.dfa import DEAD, LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.matchers.places import Place, Places
from rootlace.runtime.constrained.matchers.stepped import SteppedBuilds
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.table import TokenTable
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import ForcedTokenizer, Grammar, Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SteppedAutomaton
from rootlace.wire.errors import InvalidConstraint

_ENDED = -2
_CHANGED = -3
"""The states after the end of the sequence, and where another matcher has taken over."""
_MAX_STEPS = 1 << 17
_MAX_FORCED = 1 << 12
"""Memos are emptied when they have so many entries."""


class AutomatonGrammar:
    """A regular language on a lazy automaton; see `interface.Grammar`.

    Should the automaton get larger than it may while requests run on it, they go on in `fallback()`
    (called once), a grammar of the same language, and so do all later ones. `max_table_bytes`
    bounds the masks that are kept; others are made anew for each request that asks. By
    `builds` the whole automaton is made for a device, once a matcher is asked for it.
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
        self.vocabulary = vocabulary
        self.dfa = dfa
        self.table = TokenTable(vocabulary.trie, vocabulary.eos_token_ids, dfa, max_table_bytes)
        self._canonicalizer = canonicalizer
        self._make_fallback = fallback
        self._fallback: Grammar | None = None
        self._lock = threading.Lock()
        # Where tokens lead, by state * vocabulary size + token. Threads may both find out.
        self.steps: dict[int, int] = {}
        self.places = Places()
        self._final: dict[int, bool] = {}
        self._forced: dict[tuple[int, bytes], list[int]] = {}
        self._builds = builds
        self._stepped: SteppedAutomaton | None = None

    @property
    def nbytes(self) -> int:
        memos = 100 * len(self.steps) + 300 * len(self._forced) + self.places.nbytes
        inner = self._fallback.nbytes if self._fallback else 0
        stepped = self._stepped.nbytes if self._stepped else 0
        return self.dfa.nbytes + self.table.nbytes + memos + inner + stepped

    def matcher(self) -> Matcher:
        if self._fallback is not None:
            return self._fallback.matcher()
        return AutomatonMatcher(self)

    def fallback(self) -> Grammar:
        """The grammar that takes over. Raises InvalidConstraint if there is none."""
        with self._lock:
            if self._fallback is None:
                self._fallback = self._make_fallback()
            return self._fallback

    # ------------------------------------------------------------ for matchers

    def stepped(self) -> SteppedAutomaton | None:
        """The whole automaton, once it is there: the first who asks has it made. Never waits."""
        if self._builds is not None:
            with self._lock:
                builds, self._builds = self._builds, None
            if builds is not None:
                vocabulary = self.vocabulary
                builds.submit(vocabulary.trie, vocabulary.eos_token_ids, self.dfa, self._take)
        return self._stepped

    def _take(self, stepped: SteppedAutomaton | None) -> None:
        self._stepped = stepped

    def step(self, state: int, token_id: int) -> int:
        """The state after a token; `DEAD` where it is forbidden. May raise `TooLarge`."""
        if state < 0 or not 0 <= token_id < self.vocabulary.size:
            return DEAD
        if token_id in self.vocabulary.eos_token_ids:
            after = _ENDED if self.dfa.accepting(state) else DEAD
        else:
            data = self.vocabulary.token_bytes[token_id]
            after = self.dfa.run(state, data) if data else DEAD
        if len(self.steps) >= _MAX_STEPS:
            self.steps.clear()
        self.steps[state * self.vocabulary.size + token_id] = after
        return after

    def is_final(self, state: int) -> bool:
        """Whether the text is complete and nothing can follow. May raise `TooLarge`."""
        known = self._final.get(state)
        if known is None:
            known = self.dfa.accepting(state)
            known = known and not (self.dfa.transitions(np.array([state])) >= 0).any()
            self._final[state] = known
        return known

    def forced_tokens(self, state: int, tokens: list[int]) -> list[int]:
        """What is forced at `state`, behind `tokens`. May raise `TooLarge`."""
        text, end = self.dfa.forced(state)
        if not text:
            self.places.of(state).quiet = True
            return []
        tail = self._canonicalizer.tail(tokens)
        if tail is None:
            return []
        known = self._forced.get((state, tail))
        if known is None:
            known = self._canonicalizer.tokens_after(
                tail, text, lambda data: self._can_follow(end, data), self.dfa.accepting(end)
            )
            if len(self._forced) >= _MAX_FORCED:
                self._forced.clear()
            self._forced[state, tail] = known
        return list(known)

    def _can_follow(self, state: int, data: bytes) -> bool:
        try:
            return self.dfa.run(state, data) != DEAD
        except TooLarge:
            return True  # not known; to say so forces fewer tokens, never a wrong one


class AutomatonMatcher:
    """See `interface.Matcher`."""

    __slots__ = (
        "__weakref__",
        "_before",
        "_error",
        "_grammar",
        "_other",
        "_place",
        "_size",
        "_steps",
        "_tokens",
        "ready",
    )

    def __init__(self, grammar: AutomatonGrammar) -> None:
        self._grammar = grammar
        self._size = grammar.vocabulary.size
        self._steps = grammar.steps
        self._place = grammar.places.of(grammar.dfa.start)
        self.ready = self._place.mask
        self._tokens: list[int] = []
        self._before: list[Place] = []  # the place before each of them
        self._error = ""
        self._other: Matcher | None = None
        """Who went on where the automaton got too large."""

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
        if self._other is None:
            if self._state < 0:
                out[:] = 0
                return
            try:
                self._grammar.table.write(self._state, out)
                return
            except TooLarge:
                if not self._change_over():
                    out[:] = 0
                    return
        assert self._other is not None
        self._other.fill_bitmask(out)

    def mask_row(self) -> MaskRow | None:
        if self._other is not None:
            return self._other.mask_row()
        place = self._place
        row = self._grammar.table.row(place.state) if place.state >= 0 else None
        if row is not None and row.address:
            place.mask = self.ready = row
        return row

    def automaton(self) -> AutomatonState | None:
        if self._other is not None:
            return self._other.automaton()
        if self._state < 0:
            return None
        stepped = self._grammar.stepped()
        return AutomatonState(stepped, self._state) if stepped is not None else None

    def prepare_mask(self) -> None:
        if self._other is not None:
            self._other.prepare_mask()
            return
        if self._state < 0:
            return
        table, state = self._grammar.table, self._state
        try:
            table.fill(state)
        except TooLarge:
            # The row is promised: the same language has the same mask, whoever computes it.
            words = np.zeros(bitmask.words_of(self._size), np.int32)
            self.fill_bitmask(words)
            place = table.row(state)
            if place is not None:
                table.store(place.row, words)

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
        if place.state >= 0 and after >= 0 and self._goes_on(after):
            places.lead(place, token_id, following)
        self._tokens.append(token_id)
        self._before.append(place)
        self._place = following
        self.ready = following.mask
        self._error = ""

    def advance(self, token_id: int) -> bool:
        if self._other is not None:
            return self._other.advance(token_id)
        state = self._state
        # No state below 0 is in the memo, and no token outside the vocabulary may alias another.
        after = (
            self._steps.get(state * self._size + token_id) if 0 <= token_id < self._size else DEAD
        )
        if after is None:
            try:
                after = self._grammar.step(state, token_id)
            except TooLarge:
                return self._change_over() and self._advance_other(token_id)
        if after == DEAD:
            self._error = (
                f"the constraint forbids token {token_id} after {len(self._tokens)} tokens"
            )
            return False
        self._go(token_id, after)
        return True

    def _goes_on(self, state: int) -> bool:
        """Whether something has to follow, or may, as far as is known."""
        try:
            return not self._grammar.is_final(state)
        except TooLarge:
            return False

    def is_accepting(self) -> bool:
        if self._other is not None:
            return self._other.is_accepting()
        return self._state == _ENDED or self._grammar.dfa.accepting(self._state)

    def is_finished(self) -> bool:
        if self._other is None:
            if self._state < 0:
                return self._state == _ENDED
            try:
                return self._grammar.is_final(self._state)
            except TooLarge:
                if not self._change_over():
                    return False
        assert self._other is not None
        return self._other.is_finished()

    def forced_text(self) -> bytes:
        if self._other is None:
            if self._state < 0:
                return b""
            try:
                return self._grammar.dfa.forced(self._state)[0]
            except TooLarge:
                if not self._change_over():
                    return b""
        assert self._other is not None
        return self._other.forced_text()

    def forced_tokens(self) -> list[int]:
        if self._other is None:
            if self._state < 0:
                return []
            try:
                return self._grammar.forced_tokens(self._state, self._tokens)
            except TooLarge:
                if not self._change_over():
                    return []
        assert self._other is not None
        return self._other.forced_tokens()

    def rollback(self, count: int) -> None:
        if self._other is not None:
            self._other.rollback(count)
            return
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._error = ""
        if count:
            self._place = self._before[-count]
            self.ready = self._place.mask
            del self._tokens[-count:], self._before[-count:]

    def reset(self) -> None:
        if self._other is not None:
            self._other.reset()
            return
        self.rollback(len(self._tokens))

    # ------------------------------------------------------------ the rest

    def can_retreat(self) -> bool:
        return self._other is not None and self._other.can_retreat()

    def retreat(self) -> int | None:
        if self._other is not None:
            return self._other.retreat()
        self._error = "the constraint has nothing to check that its mask does not hold"
        return None

    def error(self) -> str:
        return self._error if self._other is None else self._other.error()

    def _change_over(self) -> bool:
        """Go on in the fallback; False, with `error` set, if that is impossible."""
        try:
            other = self._grammar.fallback().matcher()
        except InvalidConstraint as error:
            self._error = f"the automaton got too large, and nothing else takes over: {error}"
            return False
        for position, token in enumerate(self._tokens):
            if not other.advance(token):
                self._error = f"the fallback forbids token {position}: {other.error()}"
                return False
        self._other = other
        self._place = self._grammar.places.of(_CHANGED)
        self.ready = None
        return True

    def _advance_other(self, token_id: int) -> bool:
        assert self._other is not None
        return self._other.advance(token_id)
