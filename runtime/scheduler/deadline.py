"""Whether requests can be done by their deadlines: refused are those that hardly would be."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from rootlace.runtime.scheduler.pace import PromptPace, ServicePace
from rootlace.runtime.scheduler.priorities import PriorityQueues
from rootlace.runtime.scheduler.prompt_work import PromptWork
from rootlace.runtime.scheduler.running import RunningSet
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.wire.errors import DeadlineImpossible

MARGIN = 1.25
"""What is expected is taken to be off by so much: times of requests that have ended are older than
the queue. `benchmarks/overload` shows what that is worth."""
SPARE = 64
"""So many sequences that do not wait are remembered at least."""
CONSIDERED = 256
"""Of only so many requests it is looked up how much of their prompts is to be computed; the others
are taken to be like them."""


class Deadlines:
    """Refuses what would be late, when it comes and where it waits.

    Without that, more requests than can be done are all begun late, and none is done in time. What
    is expected follows from the pace of prompts and from how long requests took, and beside how
    many others, that have just ended (`ServicePace`). A request alone is never refused.
    """

    def __init__(
        self,
        waiting: PriorityQueues,
        running: RunningSet,
        cached: Callable[[Sequence], int],
        pace: PromptPace,
        max_rows: int,
    ) -> None:
        """`cached`: how many leading tokens of a sequence need not be computed."""
        self._waiting = waiting
        self._running = running
        self._work = PromptWork(cached)
        self._pace = pace
        self._service = ServicePace()
        self._max_rows = max_rows
        self._heap: list[tuple[float, int, Sequence]] = []
        """Deadlines of those that wait, and of some that do not any more."""

    def check(self, sequence: Sequence, now: float) -> None:
        """A request comes. Raises DeadlineImpossible if it is expected to be late."""
        timeout = sequence.request.handling.timeout
        if timeout is None:
            return
        ahead = self._waiting.ahead(sequence)
        queued = [*self._running.retracted, *islice(ahead, CONSIDERED)]
        count = len(queued) + sum(1 for _ in ahead)
        seconds = self._until_done(sequence, queued, count, now)
        left = sequence.arrived + timeout - now
        if seconds * MARGIN > left:
            raise DeadlineImpossible(
                f"{count} requests come first; with them this one takes about {seconds:.3g} s, "
                f"and its timeout leaves {max(left, 0):.3g} s"
            )

    def add(self, sequence: Sequence) -> None:
        """It was queued."""
        timeout = sequence.request.handling.timeout
        if timeout is None:
            return
        heapq.heappush(self._heap, (sequence.arrived + timeout, sequence.number, sequence))
        if len(self._heap) > 2 * len(self._waiting) + SPARE:
            # Those that do not wait any more would stay until their deadlines.
            self._heap = [entry for entry in self._heap if _waits(entry[2])]
            heapq.heapify(self._heap)

    def ended(self, sequence: Sequence, now: float, *, whole: bool) -> None:
        """An admitted sequence ended; `whole`: by itself."""
        assert sequence.queued is not None
        seconds = now - sequence.arrived - sequence.queued
        rows = len(self._running.sequences) + 1
        self._service.note(seconds, rows, sequence.outputs, whole=whole)

    def late(self, now: float) -> Iterator[Sequence]:
        """Those that wait and are expected to be late even if they were admitted now."""
        heap, running = self._heap, self._running.sequences
        if not len(self._waiting):
            self._work.forget()
        while heap and running and heap[0][0] < now + self._service.seconds(self._rows(0)):
            deadline, _, sequence = heapq.heappop(heap)
            if _waits(sequence) and deadline < now + self._own(sequence, self._rows(0)):
                yield sequence

    # ------------------------------------------------------------ what is expected

    def _until_done(
        self, sequence: Sequence, queued: list[Sequence], count: int, now: float
    ) -> float:
        """Seconds. `count` requests come first, of which `queued` are the first ones."""
        running = self._running.sequences
        if not count and not running:
            return 0.0  # what is known is of requests that had company
        computed = sum(one.target() - one.computed for one in running)
        before = self._work.of_waiting(queued, now) * count // max(len(queued), 1)
        own = self._work.of_next(sequence)
        rows = self._rows(count)
        # They are admitted as the prompts before them are computed, or as rows become free.
        excess = max(len(running) + count + 1 - self._most, 0)
        wait = max(
            self._pace.seconds(computed + before),
            self._service.seconds(rows) * excess / self._most,
        )
        return wait + max(self._pace.seconds(own), self._own(sequence, rows))

    def _own(self, sequence: Sequence, rows: int) -> float:
        """Seconds from its admission on, beside so many others; 0 where others say nothing of it: a
        constraint, a yes or no, say, may end it soon."""
        if sequence.matcher is not None:
            return 0.0
        return self._service.seconds(rows, sequence.max_tokens - sequence.outputs)

    def _rows(self, count: int) -> int:
        """How many run together with a request before which `count` others come."""
        return min(len(self._running.sequences) + count + 1, self._most)

    @property
    def _most(self) -> int:
        """How many rows there is room for."""
        return min(self._running.most or self._max_rows, self._max_rows)


def _waits(sequence: Sequence) -> bool:
    return sequence.order < 0 and not sequence.finished
