"""Matchers of grammars that run on an automaton, and the masks that requests share.

token 5 -> DfaMatcher (one request) --state--> DfaStates (all requests of a grammar)
                                                 state -> mask row; state, token -> next state
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable

import numpy as np

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar, Matcher, Place
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SteppedAutomaton
from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa
from rootlace.runtime.structured.regex.syntax import TooLarge
from rootlace.runtime.structured.vocabulary import vocabulary
from rootlace.runtime.structured.vocabulary.forced_tokens import Canonicalizer
from rootlace.runtime.structured.vocabulary.masks import TokenClasses, TokenTable, token_classes
from rootlace.runtime.structured.vocabulary.vocabulary import ByteTrie, Vocabulary
from rootlace.wire.errors import InvalidConstraint

# States -------------------------------------------------------------------------------------------
#
# Memos of an automaton's states, shared by requests: the mask of each state that a request has
# reached, and the states after tokens.


ENDED = -2
"""Number of the state after the end of the sequence."""
BEYOND = -3
"""Number of the state of a text unknown to the automaton: another matcher has to answer."""
MAX_STEPS = 1 << 17
MAX_FORCED = 1 << 12
"""Entries of a memo at which the matcher empties the memo."""


class DfaState(Place):
    """State with memos for requests: a token is one lookup in a small table."""

    __slots__ = ("after", "number")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.after: dict[int, DfaState] = {}
        """Map from allowed token to the state after the token."""


class DfaStates:
    """Known states of one automaton. Thread-safe."""

    def __init__(self) -> None:
        self._states: dict[int, DfaState] = {}
        self._steps = 0

    @property
    def nbytes(self) -> int:
        return 300 * len(self._states) + 100 * self._steps

    def of(self, number: int) -> DfaState:
        known = self._states.get(number)
        return known if known is not None else self._states.setdefault(number, DfaState(number))

    def remember(self, state: DfaState, token_id: int, after: DfaState) -> None:
        """Remember a step."""
        if self._steps >= MAX_STEPS:
            self.forget()
        self._steps += token_id not in state.after
        state.after[token_id] = after

    def forget(self) -> None:
        """Forget masks and steps."""
        self._steps = 0
        for state in list(self._states.values()):
            state.after, state.mask = {}, None


class DfaGrammar:
    """Grammar on an automaton over bytes, with memos of its states for all requests.

    A subclass answers from the automaton if possible. If an answer is None or False, a request's
    `DfaMatcher` asks the matcher of another grammar (`other`).
    """

    backend: str

    def __init__(
        self,
        vocabulary: Vocabulary,
        dfa: LazyDfa,
        canonicalizer: Canonicalizer,
        max_table_bytes: int,
    ) -> None:
        self.vocabulary = vocabulary
        self.dfa = dfa
        self.canonicalizer = canonicalizer
        self.table = TokenTable(vocabulary.trie, vocabulary.eos_token_ids, dfa, max_table_bytes)
        self.states = DfaStates()
        self.start = self.states.of(dfa.start)
        self.trusted = True
        """Whether all requests may use a state's mask and tokens that one request learned."""
        self.texts: dict[int, bytes] = {}
        """Map from state to the forced text that another matcher reported."""
        self.forced: dict[tuple[int, bytes], list[int]] = {}
        """Map from state and the relevant end of the text before to the forced tokens."""
        self._final: dict[int, bool] = {}
        self.start.unfinished = self.is_final(dfa.start) is False
        # Both have reference cycles, and would live on until a full garbage collection.
        weakref.finalize(self, _forget, self.states, self.table)

    @property
    def nbytes(self) -> int:
        memos = 300 * len(self.forced) + self.states.nbytes
        return self.dfa.nbytes + self.table.nbytes + memos

    def matcher(self) -> Matcher:
        return DfaMatcher(self) if self.trusted else self.other()

    # ------------------------------------------------------------ answers for matchers

    def row(self, state: int) -> MaskRow | None:
        """Return the row of the table that has, or will have, the mask of `state`."""
        return self.table.row(state)

    def write(self, state: int, out: np.ndarray | None) -> bool:
        """Make the mask of `state`, in its row if it has one, and copy it to `out`. Returns False
        if another matcher has to make the mask."""
        row = self.row(state)
        if row is None or not self.table.filled(row.row):
            return False
        if out is not None:
            out[:] = self.table.rows[row.row]
        return True

    def keep(self, state: int, words: np.ndarray, failed: bool) -> None:
        """Take in the mask of `state` that another matcher made, or failed to."""

    def step(self, state: int, token_id: int) -> int | None:
        """Return the state after a token of the vocabulary; `DEAD` where it is forbidden."""
        raise NotImplementedError

    def after(self, state: int, token_id: int) -> int:
        """Return the state after an allowed token; `BEYOND` if the automaton does not know the
        state."""
        if token_id in self.vocabulary.eos_token_ids:
            return ENDED
        data = self.vocabulary.token_bytes[token_id]
        found = self.run(state, data) if state >= 0 and data else DEAD
        return BEYOND if found is None or found == DEAD else found

    def run(self, state: int, data: bytes) -> int | None:
        """Return the state after `data`; None if the automaton gets too large to know the state."""
        try:
            return self.dfa.run(state, data)
        except TooLarge:
            return None

    def is_final(self, state: int) -> bool | None:
        """Return whether the text is complete and nothing can follow."""
        known = self._final.get(state)
        if known is None:
            try:
                known = self.dfa.accepting(state)
                known = known and not (self.dfa.transitions(np.array([state])) >= 0).any()
            except TooLarge:
                return None
            self._final[state] = known
        return known

    def forced_text(self, state: int) -> bytes | None:
        """Return the forced bytes that begin every continuation."""
        try:
            return self.dfa.forced(state)[0]
        except TooLarge:
            return self.texts.get(state)

    def forced_tokens(self, state: int, tail: bytes) -> list[int] | None:
        """Return the tokens that are forced behind a text that ends with `tail`."""
        try:
            text, end = self.dfa.forced(state)
        except TooLarge:
            return None
        # Unknown texts count as possible: that forces fewer tokens, never a wrong one.
        return self.canonicalizer.tokens_after(
            tail, text, lambda data: self.run(end, data) != DEAD, self.dfa.accepting(end)
        )

    def stepped(self) -> SteppedAutomaton | None:
        """Return the whole automaton for a device. Never waits."""
        return None

    def other(self) -> Matcher:
        """Return a new matcher for the questions that the automaton cannot answer. Raises
        InvalidConstraint."""
        raise InvalidConstraint("the automaton got too large")


def _forget(*parts: DfaStates | TokenTable) -> None:
    for part in parts:
        part.forget()


# Matcher ------------------------------------------------------------------------------------------


_OVER = (DEAD, ENDED)
"""States at which no token is taken."""


class DfaMatcher(Matcher):
    """Matcher on an automaton; see `contracts.matcher.Matcher`.

    If the grammar has no answer, the matcher of another grammar is asked. That matcher is made at
    the first question, and takes in all earlier tokens then.
    """

    def __init__(self, grammar: DfaGrammar) -> None:
        self._grammar = grammar
        self._size = grammar.vocabulary.size
        self.place: DfaState = grammar.start
        """The state of the text; the number is negative if the automaton does not know the text."""
        self._tokens: list[int] = []
        self._before: list[DfaState] = []  # the state before each of the tokens
        self._error = ""
        self._other: Matcher | None = None
        self._taken = 0
        """Number of tokens that `_other` has accepted."""

    # ------------------------------------------------------------ masks

    def allowed_mask(self) -> np.ndarray:
        return vocabulary.filled(self.fill_bitmask, self._size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = vocabulary.writable(out, self._size)
        number = self.place.number
        if number >= 0 and self._grammar.write(number, out):
            return
        other = self._other_here() if number not in _OVER else None
        if other is None:
            out[:] = 0
        else:
            other.fill_bitmask(out)
            self._error = other.error()
        if number >= 0:
            self._grammar.keep(number, out, failed=bool(self._error))

    def mask_row(self) -> MaskRow | None:
        place = self.place
        if place.mask is not None or place.number < 0:
            return place.mask
        row = self._grammar.row(place.number)
        if row is not None and row.address:
            place.mask = row
            if not self._grammar.trusted:  # lost meanwhile: the masks may be gone already
                place.mask = row = None
        return row

    def prepare_mask(self) -> None:
        place = self.place
        unknown = place.mask is None and place.number >= 0
        if unknown and not self._grammar.write(place.number, None) and self.mask_row() is not None:
            self.fill_bitmask(np.zeros(vocabulary.words_of(self._size), np.int32))

    def automaton(self) -> AutomatonState | None:
        number = self.place.number
        stepped = self._grammar.stepped() if number >= 0 else None
        return AutomatonState(stepped, number) if stepped is not None else None

    # ------------------------------------------------------------ the text

    def advance(self, token_id: int) -> bool:
        place = self.place
        following = place.after.get(token_id)
        if following is None:
            following = self._state_after(place, token_id)
            if following is None:
                return False
        self._tokens.append(token_id)
        self._before.append(place)
        self.place = following
        self._error = ""
        return True

    def _state_after(self, place: DfaState, token_id: int) -> DfaState | None:
        """Return and store the state after a token; None, with `error` set, if refused."""
        number, grammar = place.number, self._grammar
        if number in _OVER or not 0 <= token_id < self._size:
            after: int | None = DEAD
        else:
            after = grammar.step(number, token_id) if number >= 0 else None
        if after is None:
            other = self._other_here()
            if other is None:
                return None
            if not other.advance(token_id):
                self._error = other.error()
                return None
            self._taken += 1
            after = grammar.after(number, token_id)
        if after == DEAD:
            taken = len(self._tokens)
            self._error = f"the constraint forbids token {token_id} after {taken} tokens"
            return None
        following = grammar.states.of(after)
        if number >= 0 and grammar.trusted:
            following.unfinished = after >= 0 and grammar.is_final(after) is False
            grammar.states.remember(place, token_id, following)
        return following

    def is_accepting(self) -> bool:
        number = self.place.number
        if number != BEYOND:
            return number == ENDED or self._grammar.dfa.accepting(number)
        other = self._other_here()
        return other is not None and other.is_accepting()

    def is_finished(self) -> bool:
        number = self.place.number
        if self.place.unfinished or number in _OVER:
            return number == ENDED
        known = self._grammar.is_final(number) if number >= 0 else None
        if known is not None:
            return known
        other = self._other_here()
        return other is not None and other.is_finished()

    def forced_text(self) -> bytes:
        number = self.place.number
        if number in _OVER:
            return b""
        known = self._grammar.forced_text(number) if number >= 0 else None
        if known is not None:
            return known
        other = self._other_here()
        if other is None:
            return b""
        text = other.forced_text()
        if number >= 0 and not other.error():
            self._grammar.texts[number] = text
        return text

    def forced_tokens(self) -> list[int]:
        place, grammar = self.place, self._grammar
        number = place.number
        if place.unforced:
            return []
        if number < 0:
            other = self._other_here() if number == BEYOND else None
            return [] if other is None else other.forced_tokens()
        tail = grammar.canonicalizer.tail(self._tokens)
        known = None if tail is None else grammar.forced.get((number, tail))
        if known is None:
            if not self.forced_text():
                place.unforced = grammar.forced_text(number) is not None
                return []
            if tail is None:
                return []
            known = grammar.forced_tokens(number, tail)
            if known is None:
                other = self._other_here()
                known = [] if other is None else other.forced_tokens()
                if other is None or other.error():
                    return known
            if len(grammar.forced) >= MAX_FORCED:
                grammar.forced.clear()
            grammar.forced[number, tail] = known
        return list(known)

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._error = ""
        if count:
            self.place = self._before[-count]
            del self._tokens[-count:], self._before[-count:]
        if self._other is not None:  # its error may lie in the tokens that are undone
            self._other.rollback(max(self._taken - len(self._tokens), 0))
            self._taken = min(self._taken, len(self._tokens))

    def reset(self) -> None:
        self.rollback(len(self._tokens))

    def rollback_refused(self) -> int | None:
        self._error = "the constraint has nothing to check that its mask does not hold"
        return None

    def error(self) -> str:
        return self._error

    def _other_here(self) -> Matcher | None:
        """Return the other matcher at this state; None, with `error` set, if it fails."""
        if self._other is None:
            try:
                self._other = self._grammar.other()
            except InvalidConstraint as error:
                self._error = f"the automaton got too large, and nothing else takes over: {error}"
                return None
        while self._taken < len(self._tokens):
            if not self._other.advance(self._tokens[self._taken]):
                self._error = self._other.error()
                return None
            self._taken += 1
        return self._other


# Stepped ------------------------------------------------------------------------------------------
#
# Whole automata over tokens, for a device that masks and steps by itself.
#
# The host asks lazy automata for one state at a time. A device needs all states, their masks and
# all transitions in advance. For regular constraints of modest size these are a table of states and
# classes of tokens (`token_classes`), and few masks, since many states allow the same tokens.


log = logging.getLogger(__name__)

_KEYS = itertools.count()
_AT_ONCE = 8
_SHARE = 0.25
"""Largest share of the automaton's bounds for a search of all states; requests need the rest."""


def stepped_automaton(
    trie: ByteTrie,
    eos_token_ids: tuple[int, ...],
    dfa: LazyDfa,
    max_states: int = ConstraintConfig.max_device_states,
    max_bytes: int = ConstraintConfig.max_device_bytes,
) -> SteppedAutomaton | None:
    """Return the whole of `dfa`, with new state numbers; None if the result exceeds the bounds."""
    if dfa.empty or not _explore(dfa, max_states):
        return None
    table_bytes = max_bytes - 4 * trie.vocab_size
    classes = token_classes(trie, dfa, table_bytes) if table_bytes > 0 else None
    if classes is None:
        return None
    found = _masks(classes, eos_token_ids, dfa, table_bytes - classes.next_state.nbytes)
    if found is None:
        return None
    masks, mask_of = found
    return SteppedAutomaton(next(_KEYS), classes.token_class, classes.next_state, mask_of, masks)


def _explore(dfa: LazyDfa, max_states: int) -> bool:
    """Visit all states. False if there are too many; visited states stay."""
    known = 0
    try:
        while known < dfa.num_states:
            if dfa.num_states > max_states or dfa.fullness > _SHARE:
                return False
            stop = min(known + _AT_ONCE, dfa.num_states)
            dfa.transitions(np.arange(known, stop))
            known = stop
    except TooLarge:
        return False
    return True


def _masks(
    classes: TokenClasses, eos_token_ids: tuple[int, ...], dfa: LazyDfa, max_bytes: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (distinct masks int32 [M, words], the index of each state's mask int32 [states])."""
    vocab = len(classes.token_class)
    words = -(-vocab // 32)
    states = len(classes.next_state)
    accepting = np.array([dfa.accepting(state) for state in range(states)], bool)
    allowed = np.column_stack([accepting, classes.next_state >= 0])
    distinct, mask_of = np.unique(np.packbits(allowed, axis=1), axis=0, return_inverse=True)
    if distinct.shape[0] * words * 4 > max_bytes:
        return None
    patterns = np.unpackbits(distinct, axis=1, count=allowed.shape[1]).astype(bool)
    bits = np.zeros(32 * words, bool)
    masks = np.empty((len(patterns), words), np.int32)
    for mask, pattern in zip(masks, patterns, strict=True):
        bits[:vocab] = pattern[1:].take(classes.token_class)
        bits[list(eos_token_ids)] = pattern[0]
        mask[:] = vocabulary.packed(bits)
    return masks, mask_of.reshape(-1).astype(np.int32)


class SteppedBuilds:
    """Builder of stepped automata within bounds, on daemon threads, one at a time."""

    def __init__(
        self,
        max_states: int = ConstraintConfig.max_device_states,
        max_bytes: int = ConstraintConfig.max_device_bytes,
    ) -> None:
        self._bounds = (max_states, max_bytes)
        self._one_at_a_time = threading.Lock()

    def submit(
        self,
        trie: ByteTrie,
        eos_token_ids: tuple[int, ...],
        dfa: LazyDfa,
        done: Callable[[SteppedAutomaton | None], None],
    ) -> None:
        """Call `done`, on a thread of its own, with the result of `stepped_automaton`."""

        def make() -> None:
            try:
                with self._one_at_a_time:
                    made = stepped_automaton(trie, eos_token_ids, dfa, *self._bounds)
            except Exception:
                log.exception("an automaton was not made for the device; the host goes on masking")
            else:
                done(made)

        threading.Thread(target=make, name="stepped automaton", daemon=True).start()


# Automaton ----------------------------------------------------------------------------------------
#
# Regular constraints on the automaton of this package, which has masks, steps and forced text.


class AutomatonGrammar(DfaGrammar):
    """Regular language on a lazy automaton; see `contracts.matcher.Grammar`.

    If the automaton exceeds its bound while requests run on it, the requests ask `fallback()`
    (called once) from there on. It is a grammar of the same language; later requests ask nothing
    else. `max_table_bytes` bounds the masks that are kept; other masks are made again for each
    request. `builds` makes the whole automaton for a device, once a matcher asks for it.
    """

    backend = "automaton"

    def __init__(
        self,
        vocabulary: Vocabulary,
        dfa: LazyDfa,
        canonicalizer: Canonicalizer,
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
        return DfaMatcher(self) if self._fallback is None else self._fallback.matcher()

    def other(self) -> Matcher:
        with self._lock:
            if self._fallback is None:
                self._fallback = self._make_fallback()
            return self._fallback.matcher()

    # ------------------------------------------------------------ answers for matchers

    def stepped(self) -> SteppedAutomaton | None:
        """Return the device's automaton; the first call has another thread make it."""
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
        """Return a row; with a fallback, only a filled one, since making a mask may fail."""
        row = self.table.row(state)
        lost = self._fallback is not None and row is not None and not self.table.filled(row.row)
        return None if lost else row

    def keep(self, state: int, words: np.ndarray, failed: bool) -> None:
        """Store a mask, the same from every matcher of the language. A failed mask stays with its
        request."""
        row = None if failed else super().row(state)
        if row is not None:
            self.table.store(row.row, words)

    def step(self, state: int, token_id: int) -> int | None:
        if token_id in self.vocabulary.eos_token_ids:
            return ENDED if self.dfa.accepting(state) else DEAD
        data = self.vocabulary.token_bytes[token_id]
        return self.run(state, data) if data else DEAD
