"""One request's place in a grammar on an automaton, whichever kind of grammar it is."""

from __future__ import annotations

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import DEAD
from rootlace.runtime.constrained.matchers.places import (
    BEYOND,
    ENDED,
    MAX_FORCED,
    Place,
    PlacedGrammar,
)
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow
from rootlace.wire.errors import InvalidConstraint

_OVER = (DEAD, ENDED)
"""States at which no token is taken."""


class Cursor(Matcher):
    """See `contracts.matcher.Matcher`.

    Where the grammar does not know, the matcher of another grammar is asked. It is made when it is
    first needed, and takes in then what it missed.
    """

    def __init__(self, grammar: PlacedGrammar) -> None:
        self._grammar = grammar
        self._size = grammar.vocabulary.size
        self.place = grammar.places.of(grammar.dfa.start)
        """Where the text stands; its state is negative where the automaton does not know it."""
        self._tokens: list[int] = []
        self._before: list[Place] = []  # the place before each of them
        self._error = ""
        self._other: Matcher | None = None
        self._taken = 0
        """How many of the tokens `_other` has taken in."""

    # ------------------------------------------------------------ masks

    @property
    def ready(self) -> MaskRow | None:  # type: ignore[override]
        return self.place.mask

    def allowed_mask(self) -> np.ndarray:
        return bitmask.filled(self.fill_bitmask, self._size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._size)
        state = self.place.state
        if state >= 0 and self._grammar.write(state, out):
            return
        other = self._other_here() if state not in _OVER else None
        if other is None:
            out[:] = 0
        else:
            other.fill_bitmask(out)
            self._error = other.error()
        if state >= 0:
            self._grammar.keep(state, out, failed=bool(self._error))

    def mask_row(self) -> MaskRow | None:
        place = self.place
        if place.mask is not None or place.state < 0:
            return place.mask
        row = self._grammar.row(place.state)
        if row is not None and row.address:
            place.mask = row
            if not self._grammar.trusted:  # lost meanwhile: masks may be forgotten already
                place.mask = row = None
        return row

    def prepare_mask(self) -> None:
        place = self.place
        unknown = place.mask is None and place.state >= 0
        if unknown and not self._grammar.write(place.state, None) and self.mask_row() is not None:
            self.fill_bitmask(np.zeros(bitmask.words_of(self._size), np.int32))

    def automaton(self) -> AutomatonState | None:
        state = self.place.state
        stepped = self._grammar.stepped() if state >= 0 else None
        return AutomatonState(stepped, state) if stepped is not None else None

    # ------------------------------------------------------------ the text

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool:
        place = self.place
        after = place.onward.get(token_id)
        if after is None or not after.goes_on or (jumps and not after.quiet):
            return False
        self._tokens.append(token_id)
        self._before.append(place)
        self.place = after
        return True

    def advance(self, token_id: int) -> bool:
        place = self.place
        state = place.state
        if state in _OVER or not 0 <= token_id < self._size:
            return self._refuse(token_id)
        following = place.onward.get(token_id)
        if following is None:
            after = self._step(state, token_id)
            if after is None:
                return False
            if after == DEAD:
                return self._refuse(token_id)
            following = self._grammar.places.of(after)
            if state >= 0 and self._grammar.trusted:
                following.goes_on = after >= 0 and self._grammar.is_final(after) is False
                self._grammar.places.lead(place, token_id, following)
        self._tokens.append(token_id)
        self._before.append(place)
        self.place = following
        self._error = ""
        return True

    def _step(self, state: int, token_id: int) -> int | None:
        """The state after a token; None, with `error` set, where another matcher refuses it."""
        after = self._grammar.step(state, token_id) if state >= 0 else None
        if after is not None:
            return after
        other = self._other_here()
        if other is None:
            return None
        if not other.advance(token_id):
            self._error = other.error()
            return None
        self._taken += 1
        return self._grammar.after(state, token_id)

    def _refuse(self, token_id: int) -> bool:
        self._error = f"the constraint forbids token {token_id} after {len(self._tokens)} tokens"
        return False

    def is_accepting(self) -> bool:
        state = self.place.state
        if state != BEYOND:
            return state == ENDED or self._grammar.dfa.accepting(state)
        other = self._other_here()
        return other is not None and other.is_accepting()

    def is_finished(self) -> bool:
        state = self.place.state
        if state in _OVER:
            return state == ENDED
        known = self._grammar.is_final(state) if state >= 0 else None
        if known is not None:
            return known
        other = self._other_here()
        return other is not None and other.is_finished()

    def forced_text(self) -> bytes:
        state = self.place.state
        if state in _OVER:
            return b""
        known = self._grammar.forced_text(state) if state >= 0 else None
        if known is not None:
            return known
        other = self._other_here()
        if other is None:
            return b""
        text = other.forced_text()
        if state >= 0 and not other.error():
            self._grammar.texts[state] = text
        return text

    def forced_tokens(self) -> list[int]:
        place, grammar = self.place, self._grammar
        state = place.state
        if state < 0:
            other = self._other_here() if state == BEYOND else None
            return [] if other is None else other.forced_tokens()
        if not self.forced_text():
            place.quiet = grammar.forced_text(state) is not None
            return []
        tail = grammar.canonicalizer.tail(self._tokens)
        if tail is None:
            return []
        known = grammar.forced.get((state, tail))
        if known is None:
            known = grammar.forced_tokens(state, tail)
            if known is None:
                other = self._other_here()
                known = [] if other is None else other.forced_tokens()
                if other is None or other.error():
                    return known
            if len(grammar.forced) >= MAX_FORCED:
                grammar.forced.clear()
            grammar.forced[state, tail] = known
        return list(known)

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._error = ""
        if count:
            self.place = self._before[-count]
            del self._tokens[-count:], self._before[-count:]
        if self._other is not None:  # it may have come to an error behind what is undone
            self._other.rollback(max(self._taken - len(self._tokens), 0))
            self._taken = min(self._taken, len(self._tokens))

    def reset(self) -> None:
        self.rollback(len(self._tokens))

    # ------------------------------------------------------------ the rest

    def retreat(self) -> int | None:
        self._error = "the constraint has nothing to check that its mask does not hold"
        return None

    def error(self) -> str:
        return self._error

    def _other_here(self) -> Matcher | None:
        """The other matcher at this place; None, with `error` set, if it cannot come here."""
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
