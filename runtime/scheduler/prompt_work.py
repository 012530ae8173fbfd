"""How many tokens of waiting prompts are to be computed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from rootlace.runtime.cache.tree import common_prefix
from rootlace.runtime.scheduler.prompt_order import key_of
from rootlace.runtime.scheduler.sequence import Sequence

STALE_SECONDS = 0.25
"""How old an estimate of a waiting prompt may be: to look all of them up for each request that
comes would take longer than to compute some."""


class PromptWork:
    """Tokens of prompts that are neither cached nor shared with a prompt that counts already.

    What was found of a waiting prompt holds for a while; of the one that is asked for by `of_next`
    it is looked up each time.
    """

    def __init__(self, cached: Callable[[Sequence], int]) -> None:
        """`cached`: how many leading tokens of a sequence need not be computed."""
        self._cached = cached
        self._tokens: dict[int, int] = {}
        self._order: list[tuple[bytes, int]] = []
        self._known: dict[int, Sequence] = {}
        self._since = float("-inf")

    def of_waiting(self, sequences: Iterable[Sequence], now: float) -> int:
        """Of all of them together, at least."""
        if now - self._since > STALE_SECONDS:
            self.forget()
            self._since = now
        return sum(self._of(one) for one in sequences)

    def of_next(self, sequence: Sequence) -> int:
        """Of a sequence that comes behind those that `of_waiting` was asked for."""
        return self._beside_neighbours(sequence, bisect_left(self._order, (key_of(sequence), -1)))

    def forget(self) -> None:
        """What is cached, or who waits, has changed by much."""
        self._tokens.clear()
        self._order.clear()
        self._known.clear()

    def _of(self, sequence: Sequence) -> int:
        number = sequence.number
        if number not in self._tokens:
            entry = (key_of(sequence), number)
            self._tokens[number] = self._beside_neighbours(
                sequence, bisect_left(self._order, entry)
            )
            insort(self._order, entry)
            self._known[number] = sequence
        return self._tokens[number]

    def _beside_neighbours(self, sequence: Sequence, at: int) -> int:
        """`at`: its place among those that are known, in lexicographic order: neighbours share
        most."""
        known = self._cached(sequence)
        for other in self._neighbours(at):
            if other.namespace == sequence.namespace:
                shorter = min(other.length, sequence.length)
                shared = common_prefix(other.tokens[:shorter], sequence.tokens[:shorter])
                known = max(known, shared)
        return max(sequence.length - known, 0)

    def _neighbours(self, at: int) -> list[Sequence]:
        """Those before and at this place. Who is over goes: what it computed is in the cache, and
        it may have ended before it computed anything."""
        order, found = self._order, []
        for step in (-1, 0):
            while 0 <= at + step < len(order):
                other = self._known[order[at + step][1]]
                if not other.finished:
                    found.append(other)
                    break
                del order[at + step]
                at += step
        return found
