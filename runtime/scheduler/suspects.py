"""Requests that were in a step that failed: which of them made it fail?"""

from __future__ import annotations

from collections import deque

from rootlace.runtime.scheduler.flight import Flight
from rootlace.runtime.scheduler.sequence import Sequence

MAX_ACCUSATIONS = 2
"""How often a request may be in a failing step of several, none of whom then fails alone: what
fails only for several together (memory, say) must end, too."""


class Suspects:
    """Those that are to be computed alone until each is past where its step failed.

    A step of several that fails does not say who made it fail. A step of one does: whoever fails
    alone is guilty, whoever comes as far as it had been is not.
    """

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._accused: list[Sequence] = []
        """Those of the last failing step of several."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, sequence: Sequence, until: int) -> None:
        """`sequence` is computed alone until its first `until` tokens are."""
        sequence.suspected_until = until
        self._queue.append(sequence)

    def first(self) -> Sequence | None:
        """The one to compute now; None if nobody is left. No step may be under way."""
        while self._queue:
            sequence = self._queue[0]
            if not sequence.finished and sequence.computed < sequence.suspected_until:
                return sequence
            sequence.suspected_until = 0
            self._queue.popleft()
        self._accused = []  # a later fault says nothing of them
        return None

    def accuse(self, flight: Flight) -> list[Sequence]:
        """A step failed: suspect its requests. Returns those that must end."""
        rows = [sequence for sequence in flight.rows if not sequence.finished]
        if len(flight.rows) == 1:  # those who were aborted meanwhile were company, too
            for sequence in self._accused:
                sequence.accusations = 0
            self._accused = []
            return rows
        self._accused, guilty = rows, []
        for sequence in rows:
            if sequence.accusations == MAX_ACCUSATIONS:
                guilty.append(sequence)
                continue
            sequence.accusations += 1
            self.add(sequence, min(sequence.computed, sequence.length))
        return guilty
