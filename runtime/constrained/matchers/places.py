"""What requests remember of the states of an automaton that they share.

A state that a request has stood at is a `Place`, with its mask and the places that tokens lead to.
"""

from __future__ import annotations

import weakref

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import DEAD, LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.tokens.table import TokenTable
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import ForcedTokenizer, Matcher
from rootlace.runtime.contracts.plan import MaskRow, SteppedAutomaton
from rootlace.wire.errors import InvalidConstraint

ENDED = -2
"""The state after the end of the sequence."""
BEYOND = -3
"""The state of a text that the automaton knows nothing of: another matcher does."""
MAX_STEPS = 1 << 17
MAX_FORCED = 1 << 12
"""Memos are emptied when they have so many entries."""


class Place:
    """A state, as far as a request that goes on needs to know it: a token is then one look into a
    small table, and a mask is there where it is needed."""

    __slots__ = ("goes_on", "mask", "onward", "quiet", "state")

    def __init__(self, state: int) -> None:
        self.state = state
        self.goes_on = False
        """Whether it is known that the text is not finished here: more has to follow, or may."""
        self.mask: MaskRow | None = None
        """Its row of masks, once that is filled."""
        self.quiet = False
        """Whether nothing is known to be forced here."""
        self.onward: dict[int, Place] = {}
        """By allowed token, the place after it."""


class Places:
    """Of one automaton; threads may share them."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._steps = 0

    @property
    def nbytes(self) -> int:
        return 300 * len(self._places) + 100 * self._steps

    def of(self, state: int) -> Place:
        known = self._places.get(state)
        return known if known is not None else self._places.setdefault(state, Place(state))

    def lead(self, place: Place, token_id: int, after: Place) -> None:
        """Remember a step."""
        if self._steps >= MAX_STEPS:
            self.forget()
        self._steps += token_id not in place.onward
        place.onward[token_id] = after

    def forget(self) -> None:
        """Forget masks and steps."""
        self._steps = 0
        for place in list(self._places.values()):
            place.onward, place.mask = {}, None


class PlacedGrammar:
    """A grammar on an automaton over bytes, and what all requests remember of its states.

    `Cursor` is a request's place in it. A kind of grammar says here what it knows by itself; where
    that is None or False, the cursor asks the matcher of another grammar (`other`).
    """

    backend: str

    def __init__(
        self,
        vocabulary: Vocabulary,
        dfa: LazyDfa,
        canonicalizer: ForcedTokenizer,
        max_table_bytes: int,
    ) -> None:
        self.vocabulary = vocabulary
        self.dfa = dfa
        self.canonicalizer = canonicalizer
        self.table = TokenTable(vocabulary.trie, vocabulary.eos_token_ids, dfa, max_table_bytes)
        self.places = Places()
        self.trusted = True
        """Whether what one request finds out at a state holds for all that come there."""
        self.texts: dict[int, bytes] = {}
        """What another matcher said is forced, by state."""
        self.forced: dict[tuple[int, bytes], list[int]] = {}
        """The forced tokens, by state and by what matters of the text before."""
        self._final: dict[int, bool] = {}
        # Both refer in circles, and would outlive this until a full collection of garbage.
        weakref.finalize(self, _forget, self.places, self.table)

    @property
    def nbytes(self) -> int:
        memos = 300 * len(self.forced) + self.places.nbytes
        return self.dfa.nbytes + self.table.nbytes + memos

    # ------------------------------------------------------------ what kinds of grammars know

    def row(self, state: int) -> MaskRow | None:
        """The row of the table that has, or will have, the mask of `state`."""
        return self.table.row(state)

    def write(self, state: int, out: np.ndarray | None) -> bool:
        """Make the mask of `state`, in its row if it has one, and copy it to `out`; False where
        another matcher has to make it."""
        row = self.row(state)
        if row is None or not self.table.filled(row.row):
            return False
        if out is not None:
            out[:] = self.table.rows[row.row]
        return True

    def keep(self, state: int, words: np.ndarray, failed: bool) -> None:
        """Take in the mask of `state` that another matcher made, or failed to."""

    def step(self, state: int, token_id: int) -> int | None:
        """The state after a token of the vocabulary; `DEAD` where it is forbidden."""
        raise NotImplementedError

    def after(self, state: int, token_id: int) -> int:
        """The state after a token that is allowed; `BEYOND` where the automaton does not know."""
        if token_id in self.vocabulary.eos_token_ids:
            return ENDED
        data = self.vocabulary.token_bytes[token_id]
        found = self.run(state, data) if state >= 0 and data else DEAD
        return BEYOND if found is None or found == DEAD else found

    def run(self, state: int, data: bytes) -> int | None:
        """The state after `data`; None where the automaton gets too large to know it."""
        try:
            return self.dfa.run(state, data)
        except TooLarge:
            return None

    def is_final(self, state: int) -> bool | None:
        """Whether the text is complete and nothing can follow."""
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
        """The bytes that every text goes on with."""
        try:
            return self.dfa.forced(state)[0]
        except TooLarge:
            return self.texts.get(state)

    def forced_tokens(self, state: int, tail: bytes) -> list[int] | None:
        """The tokens that are forced behind a text that ends with `tail`."""
        try:
            text, end = self.dfa.forced(state)
        except TooLarge:
            return None
        # What is not known may follow: that forces fewer tokens, never a wrong one.
        return self.canonicalizer.tokens_after(
            tail, text, lambda data: self.run(end, data) != DEAD, self.dfa.accepting(end)
        )

    def stepped(self) -> SteppedAutomaton | None:
        """The whole automaton for a device. Never waits."""
        return None

    def other(self) -> Matcher:
        """A new matcher that knows what the automaton does not. Raises InvalidConstraint."""
        raise InvalidConstraint("the automaton got too large")


def _forget(*parts: Places | TokenTable) -> None:
    for part in parts:
        part.forget()
