"""A lexer of llguidance that many requests share, and is replaced when it is worn out."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher

from rootlace.runtime.constrained.tokens import bitmask

_WORN = ("too many states", "too many expressions")
"""How llguidance calls the errors that stay with a lexer, and so with all that share it: it has all
the states it may have, or a single mask (or much text without one) has cost too much."""
REPLAYED = 32
"""So many tokens are taken in at once by a lexer that is new: what it may spend is counted from one
mask to the next."""


def mask_of(matcher: LLMatcher, vocabulary_size: int) -> np.ndarray:
    """int32: the packed mask; of no meaning where the matcher has an error after it."""
    words = np.zeros(bitmask.words_of(vocabulary_size), np.int32)
    matcher.unsafe_compute_mask_ptr(bitmask.address(words), words.nbytes)
    return words


class SharedLexer:
    """The prototype that requests copy. Copies share one lexer, with all states that any of them
    came to: when it is full, requests must not fail for what others left there. Thread-safe."""

    def __init__(self, build: Callable[[], LLMatcher]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._prototype: LLMatcher | None = None

    def prototype(self, worn: LLMatcher | None = None) -> LLMatcher:
        """What to copy, and never `worn`: then another one is built."""
        with self._lock:
            if self._prototype is None or self._prototype is worn:
                self._prototype = self._build()
            return self._prototype

    def discard(self, worn: LLMatcher) -> None:
        """Build another prototype instead of `worn`, but only when it is needed."""
        with self._lock:
            if self._prototype is worn:
                self._prototype = None


class Parser:
    """One request's parser: `matcher` is a copy of the prototype that has taken in `tokens`."""

    def __init__(self, lexer: SharedLexer, vocabulary_size: int) -> None:
        self._lexer = lexer
        self._size = vocabulary_size
        self._prototype = lexer.prototype()
        self.matcher = self._prototype.deep_copy()
        self.tokens: list[int] = []

    def copy(self) -> Parser:
        """Another one at the same place."""
        other = Parser.__new__(Parser)
        other._lexer, other._size, other._prototype = self._lexer, self._size, self._prototype
        other.matcher, other.tokens = self.matcher.deep_copy(), self.tokens.copy()
        return other

    def fill_bitmask(self, out: np.ndarray) -> None:
        """Of no meaning where the matcher has an error after it."""
        self.matcher.unsafe_compute_mask_ptr(bitmask.address(out), out.nbytes)
        if _is_worn(self.matcher) and self._replay():
            self.matcher.unsafe_compute_mask_ptr(bitmask.address(out), out.nbytes)
            self._leave_if_worn()

    def take(self, token_id: int) -> bool:
        """Take a token in, if it fits."""
        taken: bool = self.matcher.try_consume_tokens([token_id]) == 1
        # What did not fit is no error; an error is one of bounds.
        if not taken and _is_worn(self.matcher) and self._replay():
            taken = self.matcher.try_consume_tokens([token_id]) == 1
            self._leave_if_worn()
        if taken:
            self.tokens.append(token_id)
        return taken

    def undo(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]
        if self.matcher.is_error():  # then it does not go back
            self._replay()
        elif count:
            self.matcher.rollback(count)

    def _replay(self) -> bool:
        """Come to the same place with another matcher, on another lexer where this one is worn out.
        False, and as before, where that would not help."""
        prototype = self._lexer.prototype(worn=self._prototype if _is_worn(self.matcher) else None)
        matcher = prototype.deep_copy()
        for start in range(0, len(self.tokens), REPLAYED):
            part = self.tokens[start : start + REPLAYED]
            if matcher.try_consume_tokens(part) != len(part):
                if _is_worn(matcher):
                    self._lexer.discard(prototype)
                return False
            mask_of(matcher, self._size)
        self._prototype, self.matcher = prototype, matcher
        return True

    def _leave_if_worn(self) -> None:
        """Where this very text wears a new lexer out, the next request gets another one."""
        if _is_worn(self.matcher):
            self._lexer.discard(self._prototype)


def _is_worn(matcher: LLMatcher) -> bool:
    return matcher.is_error() and any(kind in matcher.get_error() for kind in _WORN)
