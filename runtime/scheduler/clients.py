"""The queue of the clients of one priority, who take turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from rootlace.runtime.scheduler.patience import COMPUTED, work_of
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.runtime.scheduler.waiting import WaitingQueue

_TOLD = 16
"""The queues of so many clients learn of a computed prompt at once, others at their turn."""
_REMEMBERED = 4096
"""So many clients who do not wait keep their clocks, until nobody waits."""


class ClientQueues:
    """A `WaitingQueue` for each client; what it promises holds among the requests of one client.

    Among clients this is start-time fair queueing (Goyal, Vin and Cheng, 1996). Each client has a
    clock, which goes on by the work of every request of his that is admitted, and at its end by
    that of its output. The client whose clock is furthest behind comes next. One who asked for
    nothing meanwhile is owed nothing: he starts at the clock of whoever was admitted last, or where
    an equal share of what was admitted since would have brought him (as in WF2Q+). Without that
    share, clients who are always new would start at the same place for ever, before all others.

    So between two clients who both wait, what is admitted for one exceeds what is admitted for the
    other by one request of each at most (and by their outputs), and a client with a single request
    waits for about one request of each other client, however many these have sent.
    """

    def __init__(
        self, make: Callable[[], WaitingQueue], estimate: Callable[[Sequence], int]
    ) -> None:
        """`estimate`: how many leading tokens of a sequence are cached."""
        self._make = make
        self._estimate = estimate
        self._queues: dict[str, WaitingQueue] = {}
        self._clocks: dict[str, int] = {}
        """Of all who wait, and of those who did since the queue was empty."""
        self._now = 0
        """Where the clock of a client starts."""
        self._waiting = 0
        self._order: list[tuple[int, int, str]] = []
        """A heap: clock, number of a request that waited then, client. Entries whose clock is not
        the client's are out of date."""

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    @property
    def first(self) -> Sequence | None:
        """Of the requests of the client who comes next, the one that came first."""
        queue = self._next()
        return None if queue is None else queue.first

    def share(self, client: str) -> tuple[int, int]:
        """How many requests of the client wait, and how many clients have some."""
        queue = self._queues.get(client)
        return 0 if queue is None else len(queue), len(self._queues)

    def ahead(self, sequence: Sequence) -> Iterator[Sequence]:
        """Requests that are admitted before `sequence`, were it added now: of its own client, and
        as many of each other one's, who take turns with it."""
        client = sequence.request.client
        queue = self._queues.get(client)
        turns = 1
        for one in () if queue is None else queue.ahead(sequence):
            turns += 1
            yield one
        for name, other in self._queues.items():
            if name != client:
                yield from islice(other, turns)

    def add(self, sequence: Sequence) -> None:
        client = sequence.request.client
        self._waiting += 1
        if client in self._queues:
            self._queues[client].add(sequence)
            return
        queue = self._queues[client] = self._make()
        queue.add(sequence)
        self._set_clock(client, max(self._clocks.get(client, 0), self._now))

    def refresh(self) -> None:
        """Renew some estimates; call once per step in which there is room for more requests."""
        queue = self._next()
        if queue is not None:
            queue.refresh()

    def computed(self, sequence: Sequence) -> None:
        """All tokens of an admitted `sequence` are in the tree, or will be with this step."""
        for queue in islice(self._queues.values(), _TOLD):
            if len(queue) > 1:  # else there is no order to change
                queue.computed(sequence)

    def peek(self) -> Sequence | None:
        """The sequence to admit next."""
        queue = self._next()
        found = None if queue is None else queue.peek()
        if found is None and queue is not None:  # they are set aside: it is others' turn
            by_clock = sorted(self._queues.items(), key=lambda item: self._clocks[item[0]])
            found = next((one for _, other in by_clock if (one := other.peek())), None)
        return found

    def set_aside(self, sequence: Sequence) -> None:
        """See `WaitingQueue.set_aside`."""
        self._queues[sequence.request.client].set_aside(sequence)

    def bring_back(self, sequence: Sequence) -> None:
        """See `WaitingQueue.bring_back`."""
        self._queues[sequence.request.client].bring_back(sequence)

    def take(self, sequence: Sequence) -> None:
        """`sequence` is admitted."""
        client = sequence.request.client
        self._queues[client].take(sequence)
        work = work_of(sequence.length, self._estimate(sequence))
        self._now = max(self._now + work // len(self._queues), self._clocks[client])
        self._set_clock(client, self._clocks[client] + work)
        self._left(client)

    def remove(self, sequence: Sequence) -> None:
        """`sequence` leaves the queue, not admitted."""
        client = sequence.request.client
        self._queues[client].remove(sequence)
        self._left(client)

    def ended(self, sequence: Sequence) -> None:
        """An admitted `sequence` has got all of its output."""
        if self._queues and sequence.outputs:
            client = sequence.request.client
            clock = max(self._clocks.get(client, 0), self._now)
            self._set_clock(client, clock + COMPUTED * sequence.outputs)

    # ------------------------------------------------------------ clocks

    def _next(self) -> WaitingQueue | None:
        """The queue of the client whose clock is furthest behind."""
        order = self._order
        while order:
            clock, _, client = order[0]
            if client in self._queues and self._clocks[client] == clock:
                return self._queues[client]
            heapq.heappop(order)
        return None

    def _set_clock(self, client: str, clock: int) -> None:
        self._clocks[client] = clock
        queue = self._queues.get(client)
        if queue is not None and queue.first is not None:
            heapq.heappush(self._order, (clock, queue.first.number, client))
        if len(self._clocks) > len(self._queues) + _REMEMBERED:
            self._clocks = {name: self._clocks[name] for name in self._queues}

    def _left(self, client: str) -> None:
        """A request of the client waits no longer."""
        self._waiting -= 1
        if len(self._queues[client]):
            return
        del self._queues[client]
        if not self._queues:  # nobody has to be compared with anybody
            self._clocks.clear()
            self._order.clear()
            self._now = 0
