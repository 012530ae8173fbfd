"""Thoughts before an answer: their beginning and end, and a constraint that begins behind them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np

from rootlace.runtime.contracts.matcher import UNKNOWN, Matcher, Place
from rootlace.runtime.contracts.messages import ThoughtTokens
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow
from rootlace.runtime.structured.vocabulary import vocabulary as bitmask
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary


class Phase(Enum):
    """Part of the text to come next."""

    UNDECIDED = auto()
    """The text may still begin with thoughts."""
    INSIDE = auto()
    BEHIND = auto()


class Position(NamedTuple):
    """Position in a text. `never`: the text has no thoughts.

    `tail` is the end of the text read so far that may begin a tag. Behind thoughts, `tail` is the
    text of the last token after the end tag.
    """

    phase: Phase
    tail: bytes | tuple[int, ...]
    never: bool = False


class _TokenBytes(Protocol):
    def __getitem__(self, token: int, /) -> bytes: ...


class Watch:
    """Watch for thoughts in tokens. Tags of special tokens are found as tokens, other tags as text
    with any cuts into tokens."""

    def __init__(self, thoughts: ThoughtTokens, token_bytes: _TokenBytes) -> None:
        self._bytes = None if thoughts.special else token_bytes
        self.begin, self.end = self._of(*thoughts.begin), self._of(*thoughts.end)
        self.start = Position(Phase.UNDECIDED if thoughts.begin else Phase.INSIDE, self.begin[:0])

    def after(self, position: Position, token: int) -> Position:
        """Return the position after one more token."""
        if position.phase is Phase.BEHIND:
            return position
        seen = position.tail + self._of(token)  # type: ignore[operator]
        if position.phase is Phase.INSIDE:
            return self._inside(seen)
        size = len(self.begin)
        if seen[:size] != self.begin[: len(seen)]:
            return Position(Phase.BEHIND, seen[:0], never=True)
        return Position(Phase.UNDECIDED, seen) if len(seen) < size else self._inside(seen[size:])

    def _inside(self, seen: bytes | tuple[int, ...]) -> Position:
        size = len(self.end)
        for at in range(len(seen) - size + 1):
            if seen[at : at + size] == self.end:
                return Position(Phase.BEHIND, seen[at + size :])
        return Position(Phase.INSIDE, seen[max(len(seen) - size + 1, 0) :])

    def _of(self, *tokens: int) -> bytes | tuple[int, ...]:
        return tokens if self._bytes is None else b"".join(self._bytes[one] for one in tokens)


class _State(NamedTuple):
    """State of a matcher behind thoughts.

    `thought` tokens are thoughts; `left` are forced behind the thoughts. `taken` tokens of `then`
    and the inner text were accepted, as long as the state is `alive`. `rewound`: the inner text
    began again behind thoughts.
    """

    position: Position
    thought: int = 0
    left: tuple[int, ...] = ()
    taken: int = 0
    alive: bool = True
    rewound: bool = False


_THINKING = Place(unfinished=True, unforced=True)
"""Within thoughts."""


class ThoughtMatcher(Matcher):
    """Matcher of an answer behind thoughts; see `contracts.matcher.Matcher`.

    Optional thoughts: the text begins with the begin tag, or with `then` and text of the inner
    matcher. Within thoughts every token is allowed except two kinds. One ends the sequence before
    the constraint has begun. The other holds the end tag and more text. A used-up budget forces the
    end tag.
    """

    def __init__(
        self, inner: Matcher | None, thoughts: ThoughtTokens, vocabulary: Vocabulary
    ) -> None:
        self._inner = inner
        self.can_rollback = inner is not None and inner.can_rollback
        self._thoughts = thoughts
        self._vocabulary = vocabulary
        self._watch = Watch(thoughts, vocabulary.token_bytes)
        self._eos = frozenset(vocabulary.eos_token_ids)
        self._then = thoughts.then if inner is not None else ()
        self._error = ""
        self._tokens: list[int] = []
        self._before: list[_State] = []
        self._state = self._begun(_State(self._watch.start))

    def _begun(self, state: _State) -> _State:
        """Return the state with the end tag forced if the budget is used up."""
        budget = self._thoughts.budget
        if state.position.phase is not Phase.INSIDE or budget is None or state.thought < budget:
            return state
        behind = Position(Phase.BEHIND, state.position.tail[:0])
        return state._replace(position=behind, left=self._thoughts.close + self._thoughts.gap)

    # ------------------------------------------------------------ masks

    @property
    def place(self) -> Place:  # type: ignore[override]
        if self._state.position.phase is Phase.INSIDE:
            return _THINKING
        return self._inner.place if self._inner is not None and self._is_inner else UNKNOWN

    @property
    def _is_inner(self) -> bool:
        """Return whether the inner matcher alone decides."""
        state = self._state
        behind = state.position.phase is Phase.BEHIND and not state.left
        return behind and state.taken >= len(self._then)

    def allowed_mask(self) -> np.ndarray:
        return bitmask.filled(self.fill_bitmask, self._vocabulary.size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._vocabulary.size)
        state = self._state
        if state.left:
            out[:] = 0
            _allow(out, state.left[:1])
        elif state.position.phase is Phase.INSIDE:
            out[:] = self._vocabulary.any_mask
            if self._inner is not None:
                _forbid(out, self._eos)
                _forbid(out, self._overrunning(state.position.tail))
        else:
            self._fill_inner(out)
            if state.position.phase is Phase.UNDECIDED:
                _allow(out, self._beginning(state.position.tail))

    def _fill_inner(self, out: np.ndarray) -> None:
        state = self._state
        if self._inner is None:
            # Free text has no matcher, so drafts into it must allow what no mask forbids.
            vocabulary = self._vocabulary
            out[:] = vocabulary.full_mask if self._is_inner else vocabulary.any_mask
        elif state.alive and state.taken >= len(self._then):
            self._inner.fill_bitmask(out)
        else:
            out[:] = 0
            _allow(out, self._then[state.taken : state.taken + 1] if state.alive else ())

    def _beginning(self, seen: bytes | tuple[int, ...]) -> Sequence[int]:
        """Return the tokens that begin, or continue, the begin tag."""
        rest = self._watch.begin[len(seen) :]
        if isinstance(rest, tuple):
            return rest[:1]
        known = (self._vocabulary.token_of(rest[:n]) for n in range(1, len(rest) + 1))
        return [token for token in known if token is not None]

    def _overrunning(self, tail: bytes | tuple[int, ...]) -> Sequence[int]:
        """Return the tokens that end the thoughts and continue with more than white space. These
        tokens are forbidden, because the constraint begins at a token boundary."""
        end, vocabulary = self._watch.end, self._vocabulary
        if not (isinstance(end, bytes) and isinstance(tail, bytes)):
            return ()
        found = list(vocabulary.going_on_behind(end))
        for size in range(1, len(tail) + 1):
            if tail.endswith(end[:size]):
                found += vocabulary.going_on_behind(end[size:], begin=True)
        return found

    def mask_row(self) -> MaskRow | None:
        return self._inner.mask_row() if self._inner is not None and self._is_inner else None

    def prepare_mask(self) -> None:
        if self._inner is not None and self._is_inner:
            self._inner.prepare_mask()

    def automaton(self) -> AutomatonState | None:
        return self._inner.automaton() if self._inner is not None and self._is_inner else None

    # ------------------------------------------------------------ forwards

    def advance(self, token_id: int) -> bool:
        self._error = ""
        state = self._after(token_id)
        if state is None:
            self._error = self._error or f"token {token_id} cannot stand beside these thoughts"
            return False
        self._before.append(self._state)
        self._tokens.append(token_id)
        self._state = state
        return True

    def _after(self, token: int) -> _State | None:
        """Return the state after a token; None if the token is not allowed. If the token belongs to
        the answer, the inner matcher has accepted it."""
        state = self._state
        if state.left:
            return state._replace(left=state.left[1:]) if token == state.left[0] else None
        if state.position.phase is Phase.BEHIND:
            return state._replace(taken=state.taken + 1) if self._take(token) else None
        position = self._watch.after(state.position, token)
        if state.position.phase is Phase.INSIDE:
            if self._inner is not None and token in self._eos:
                return None
            return self._thought(state._replace(position=position, thought=state.thought + 1))
        taken = state.alive and self._take(token)
        if taken:
            state = state._replace(taken=state.taken + 1)
        if position.phase is Phase.UNDECIDED or position.never:
            return (
                state._replace(position=position, alive=taken)
                if taken or not position.never
                else None
            )
        self._give_back(state.taken, 0)
        self._error = ""
        return self._thought(state._replace(position=position, taken=0, alive=True, rewound=True))

    def _thought(self, state: _State) -> _State:
        """Return the state after a token of the thoughts. The gap behind the end tag is forced only
        before a constraint, and only if the model wrote no white space there."""
        if state.position.phase is Phase.INSIDE:
            return self._begun(state)
        gap = self._thoughts.gap if self._inner is not None and not state.position.tail else ()
        return state._replace(left=gap)

    def _take(self, token: int) -> bool:
        taken = self._state.taken
        if taken < len(self._then):
            return token == self._then[taken]
        if self._inner is None or self._inner.advance(token):
            return True
        self._error = self._inner.error()
        return False

    def _give_back(self, taken: int, keep: int) -> None:
        """Undo all but the first `keep` of `taken` tokens in the inner matcher."""
        count = len(self._then)
        if self._inner is not None:
            self._inner.rollback(max(taken - count, 0) - max(keep - count, 0))

    def ignores(self, token_id: int) -> bool:
        state = self._state
        thinks = state.position.phase is Phase.INSIDE or bool(state.left)
        return thinks and token_id in self._thoughts.stops

    @property
    def free(self) -> bool:  # type: ignore[override]
        return self._inner is None and self._is_inner

    def is_accepting(self) -> bool:
        state = self._state
        if self._inner is None:
            return not state.left
        mine = state.position.phase is not Phase.INSIDE and not state.left and state.alive
        return mine and state.taken >= len(self._then) and self._inner.is_accepting()

    def is_finished(self) -> bool:
        return self._inner is not None and self._is_inner and self._inner.is_finished()

    def forced_text(self) -> bytes:
        return self._inner.forced_text() if self._inner is not None and self._is_inner else b""

    def forced_tokens(self) -> list[int]:
        state = self._state
        if state.left or state.position.phase is not Phase.BEHIND:
            return list(state.left)
        if state.taken < len(self._then):
            return list(self._then[state.taken :])
        return [] if self._inner is None else self._inner.forced_tokens()

    # ------------------------------------------------------------ backwards

    def rollback(self, count: int) -> None:
        keep = len(self._tokens) - count
        if not 0 <= keep <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._error = ""
        if not count:
            if self._inner is not None:
                self._inner.rollback(0)
            return
        state, before = self._state, self._before[keep]
        if before.rewound == state.rewound:
            self._give_back(state.taken, before.taken)
        else:  # back to its place before the thoughts began
            self._give_back(state.taken, 0)
            for token in self._tokens[len(self._then) : before.taken]:
                if self._inner is not None:
                    self._inner.advance(token)
        self._cut(keep)

    def _cut(self, keep: int) -> None:
        if keep < len(self._tokens):
            self._state = self._before[keep]
            del self._before[keep:], self._tokens[keep:]

    def reset(self) -> None:
        self._cut(0)
        self._error = ""
        if self._inner is not None:
            self._inner.reset()

    def settled(self) -> int:
        return len(self._tokens) - self._state.taken

    def rollback_refused(self) -> int | None:
        if self._inner is None or not self._state.alive:
            return None
        undone = self._inner.rollback_refused()
        if undone is not None:
            self._cut(len(self._tokens) - undone)
        self._error = ""
        return undone

    def error(self) -> str:
        return self._error or ("" if self._inner is None else self._inner.error())


def _allow(out: np.ndarray, tokens: Sequence[int]) -> None:
    bits = out.view(np.uint8)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)


def _forbid(out: np.ndarray, tokens: Sequence[int] | frozenset[int]) -> None:
    bits = out.view(np.uint8)
    for token in tokens:
        bits[token >> 3] &= 0xFF ^ (1 << (token & 7))
