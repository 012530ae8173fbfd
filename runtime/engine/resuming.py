"""Constrained requests that another engine began."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.contracts.request import Request
from rootlace.wire.errors import InvalidConstraint

TOKENS_AT_ONCE = 1000
"""What a turn of the loop takes in. A text that is checked as it comes takes 10 µs a token."""


class Resuming:
    """A request whose matcher takes in what was generated before."""

    def __init__(self, request: Request, grammar: Callable[[], Grammar], waited: float) -> None:
        self.request = request
        self.waited = waited
        """Seconds for its constraint."""
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self._taken = 0
        self._error: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._error is not None or self._taken == len(self.request.output_ids)

    def matcher(self) -> Matcher:
        """When it is ready. Raises what making it, or one of the tokens, led to."""
        error, self._error = self._error, None  # its frames know this
        if error is not None:
            raise error
        assert self._matcher is not None
        return self._matcher

    def advance(self, tokens: int) -> int:
        """Take in so many tokens, or all that are left; how many these were."""
        begun = self._taken
        try:
            if self._matcher is None:
                self._matcher = self._grammar().matcher()
            for token in self.request.output_ids[begun : begun + tokens].tolist():
                if not self._matcher.advance(token):
                    raise InvalidConstraint("the tokens to resume from violate the constraint")
                self._taken += 1
        except Exception as error:
            self._error = error
        return self._taken - begun


class ResumingRequests:
    """Keeps requests aside until their matchers have taken in what was generated before, some of it
    in each turn of the loop, for others do not wait for all of it."""

    def __init__(self) -> None:
        self._by_rid: dict[int, Resuming] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: int) -> bool:
        return rid in self._by_rid

    def add(self, one: Resuming) -> None:
        self._by_rid[one.request.rid] = one

    def remove(self, rid: int) -> bool:
        """Forget an aborted request; False if it is not here."""
        return self._by_rid.pop(rid, None) is not None

    def take(self) -> Iterator[Resuming]:
        """Those that get ready by the next `TOKENS_AT_ONCE` tokens, who came first being first."""
        left = TOKENS_AT_ONCE
        for rid, one in list(self._by_rid.items()):
            if left <= 0:
                return
            left -= max(1, one.advance(left))
            if one.ready:
                del self._by_rid[rid]
                yield one
