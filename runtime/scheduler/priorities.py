"""The queue of all priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rootlace.runtime.scheduler.clients import ClientQueues
from rootlace.runtime.scheduler.sequence import Sequence


class PriorityQueues:
    """`ClientQueues` for each priority; what they promise holds among requests of one priority.

    Among priorities a step is worth `seconds` of waiting: the queue comes first whose first request
    came earliest, had each come so much earlier for each step. So a request whose client's turn it
    is waits for later ones of higher priority only if they came within that time, and nobody waits
    for ever.
    """

    def __init__(self, seconds: float, make: Callable[[], ClientQueues]) -> None:
        self._seconds = seconds
        self._make = make
        self._plain = make()
        self._queues = {0: self._plain}

    def __len__(self) -> int:
        if len(self._queues) == 1:
            return len(self._plain)
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def add(self, sequence: Sequence) -> None:
        priority = sequence.request.handling.priority
        if priority not in self._queues:
            self._queues[priority] = self._make()
        self._queues[priority].add(sequence)

    def refresh(self) -> None:
        """Renew some estimates; call once per step in which there is room for more requests."""
        self._first().refresh()

    def computed(self, sequence: Sequence) -> None:
        """All tokens of an admitted `sequence` are in the tree, or will be with this step."""
        for queue in self._queues.values():
            queue.computed(sequence)

    def peek(self) -> Sequence | None:
        """The sequence to admit next."""
        found = self._first().peek()
        if found is None and len(self._queues) > 1:
            queues = (queue for _, _, queue in sorted(self._turns()))
            found = next((one for queue in queues if (one := queue.peek())), None)
        return found

    def set_aside(self, sequence: Sequence) -> None:
        """Offer others until `bring_back`: what the sequence needs is being read."""
        self._queues[sequence.request.handling.priority].set_aside(sequence)

    def bring_back(self, sequence: Sequence) -> None:
        """A sequence that was set aside may be offered again."""
        self._queues[sequence.request.handling.priority].bring_back(sequence)

    def take(self, sequence: Sequence) -> None:
        """`sequence` is admitted."""
        self._queues[sequence.request.handling.priority].take(sequence)
        self._drop_empty(sequence.request.handling.priority)

    def remove(self, sequence: Sequence) -> None:
        """`sequence` leaves the queue, not admitted."""
        self._queues[sequence.request.handling.priority].remove(sequence)
        self._drop_empty(sequence.request.handling.priority)

    def ahead(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those that would surely be admitted before `sequence`, if it were added now."""
        mine, request = self._turn(sequence), sequence.request
        for priority, queue in self._queues.items():
            head = queue.first
            if head is None or self._turn(head) > mine:
                continue
            # Where several clients wait, it may be later ones who decide when another queue's
            # turn is.
            if priority == request.handling.priority or queue.share(request.client)[1] == 1:
                yield from (one for one in queue.ahead(sequence) if self._turn(one) <= mine)

    def ended(self, sequence: Sequence) -> None:
        """An admitted `sequence` has got all of its output."""
        queue = self._queues.get(sequence.request.handling.priority)
        if queue is not None:
            queue.ended(sequence)

    def crowds_out(self, client: str, most: int) -> bool:
        """Whether there is no room for another request of `client`, where `most` may wait: the last
        eighth is for those of whom fewer wait than of others in the mean."""
        waiting = len(self)
        if waiting < most - most // 8:
            return False
        shares = [queue.share(client) for queue in self._queues.values()]
        own = sum(count for count, _ in shares)
        clients = max(sum(others for _, others in shares), 1)
        return waiting >= most or own * clients >= waiting

    def _first(self) -> ClientQueues:
        if len(self._queues) == 1:
            return self._plain
        return min(self._turns(), default=(0.0, 0, self._plain))[2]

    def _turns(self) -> Iterator[tuple[float, int, ClientQueues]]:
        """When it is whose turn, the highest priority first of those that are equal."""
        for priority, queue in self._queues.items():
            if (head := queue.first) is not None:
                yield self._turn(head), -priority, queue

    def _turn(self, sequence: Sequence) -> float:
        """When it came, moved by its priority."""
        return sequence.arrived - self._seconds * sequence.request.handling.priority

    def _drop_empty(self, priority: int) -> None:
        if priority and not len(self._queues[priority]):
            del self._queues[priority]
