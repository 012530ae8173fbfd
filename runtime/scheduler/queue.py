"""The queue of requests that were not admitted yet.

 PriorityQueues          the earliest first request comes next, shifted by its priority
   FairQueue              per priority: clients share by start-time fair queueing
     WaitingQueue         per client: fcfs, lpm (longest cached prefix), dfs (order of prompts)
       Patience           bounds how far later requests overtake

Sections: patience, prompt order, waiting queue, clients, priorities, prompt work.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from rootlace.runtime.cache.radix_tree import common_prefix
from rootlace.runtime.config import Policy
from rootlace.runtime.scheduler.request import RequestState

# Patience -----------------------------------------------------------------------------------------


COMPUTED, CACHED = 8, 1
"""Cost per token: 8 computed, 1 cached, as a cached token takes blocks and attention."""


def work_of(length: int, cached: int) -> int:
    """Cost of a request of `length` tokens, `cached` of which are in the tree."""
    return COMPUTED * (length - cached) + CACHED * cached


class Patience:
    """Bounds how often the first waiting request may be overtaken.

    A request may be overtaken by `max_overtaken` later requests. More may overtake while their
    total work is less than `max_delay` times the work queued before the request on its arrival. So
    many cheap requests with cached prefixes may overtake, and no request waits much longer than in
    order of arrival.

    A request that overtakes a waiting one overtakes all requests before that one. So only the first
    is watched. Any other request is bounded, up to one overtaker, by its own limits or by those of
    a request queued before it.
    """

    def __init__(self, max_overtaken: int, max_delay: float) -> None:
        self._max_overtaken = max_overtaken
        self._max_delay = max_delay
        self._work: dict[int, int] = {}
        self._allowed: dict[int, float] = {}
        self._waiting = 0
        """Work of all waiting requests."""
        self._overtakers: list[int] = []
        """Numbers of admitted requests that came after the first waiting one, ascending."""
        self._delays: dict[int, int] = {}
        """Work of each overtaker."""
        self._delay = 0
        """Work of all overtakers."""

    def arrives(self, number: int, work: int) -> None:
        """Queue a request, whose `number` is higher than all before."""
        self._allowed[number] = self._max_delay * self._waiting
        self._work[number] = work
        self._waiting += work

    def renew(self, number: int, work: int) -> None:
        """Update a waiting request's work after a change of its cached prefix."""
        self._waiting += work - self._work[number]
        self._work[number] = work

    def overtakes(self, number: int) -> None:
        """Admit a request other than the first; call `leaves` for the request next."""
        work = self._work[number]
        insort(self._overtakers, number)
        self._delays[number] = work
        self._delay += work

    def leaves(self, number: int, first: int | None) -> None:
        """Remove a request; `first` is the new first waiting one."""
        self._waiting -= self._work.pop(number)
        del self._allowed[number]
        # Overtakers older than the new first request overtook no waiting request.
        stop = len(self._overtakers) if first is None else bisect_left(self._overtakers, first)
        for each in self._overtakers[:stop]:
            self._delay -= self._delays.pop(each)
        del self._overtakers[:stop]

    def is_exhausted(self, first: int) -> bool:
        """Whether only the first request may be admitted now."""
        return len(self._overtakers) >= self._max_overtaken and self._delay >= self._allowed[first]


# Prompt order -------------------------------------------------------------------------------------


_KEY_TOKENS = 4096


class PromptOrder:
    """Waiting sequences in the depth-first order of their prompts' tree: neighbours share most.

    A change costs O(log n) comparisons of the prompts' first 4096 tokens.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[bytes, int]] = []
        self._key_of: dict[int, bytes] = {}
        self._cursor: tuple[bytes, int] = (b"", -1)

    def add(self, sequence: RequestState) -> None:
        key = key_of(sequence)
        self._key_of[sequence.number] = key
        insort(self._keys, (key, sequence.number))

    def remove(self, number: int) -> None:
        key = self._key_of.pop(number)
        del self._keys[bisect_left(self._keys, (key, number))]

    def go_to(self, number: int) -> None:
        """Move the cursor of `following` to request `number`."""
        self._cursor = (self._key_of[number], number)

    def following(self) -> int:
        """The next number behind the cursor, wrapping around; the order must not be empty."""
        return self._keys[bisect_left(self._keys, self._cursor) % len(self._keys)][1]

    def neighbours(self, sequence: RequestState) -> tuple[Iterator[int], Iterator[int]]:
        """Numbers before and behind `sequence`, nearest first; `sequence` need not be queued.

        In both directions the shared prefix only gets shorter.
        """
        at = bisect_left(self._keys, (key_of(sequence), -1))
        before = (self._keys[i][1] for i in range(at - 1, -1, -1))
        behind = (self._keys[i][1] for i in range(at, len(self._keys)))
        return before, behind


def key_of(sequence: RequestState) -> bytes:
    """Bytes that sort like the prompts, token by token, within each namespace."""
    tokens = sequence.tokens[: min(sequence.length, _KEY_TOKENS)]
    request = sequence.request
    place = f"{request.adapter}\0{request.namespace}\0".encode()
    return place + tokens.astype(">i4").tobytes()


# Waiting queue ------------------------------------------------------------------------------------


REFRESHED = 32
"""Estimates renewed per step, round robin: the cost does not grow with the queue."""

_NEIGHBOURS = 256
"""Neighbours on either side considered when a prompt has been computed."""
_RETRIES = 8
"""Renewals of the best estimate before the best known request is offered."""


class WaitingQueue:
    """Waiting sequences of one client in order of policy; `Patience` bounds overtaking.

    - `fcfs`: order of arrival.
    - `lpm`: longest cached prefix first, then order of arrival. A heap holds the estimates. After a
     prefill, requests that share more with the new prompt than was cached get a new estimate.
     `REFRESHED` others are renewed per step, and the best one before the queue offers it.
    - `dfs`: lexicographic order of the prompts, continuing from the last admitted one and around.
    """

    def __init__(
        self,
        policy: Policy,
        max_overtaken: int,
        max_delay: float,
        estimate: Callable[[RequestState], int],
    ) -> None:
        self._policy = policy
        self._estimate = estimate
        self._all: OrderedDict[int, RequestState] = OrderedDict()  # by arrival number
        self._patience = Patience(max_overtaken, max_delay)
        self._prompts = PromptOrder()
        self._estimates: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._rotation: deque[int] = deque()
        self._aside: set[int] = set()
        """Numbers of requests that are deferred."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._all.values())

    @property
    def first(self) -> RequestState | None:
        """The earliest waiting request."""
        return next(iter(self._all.values()), None)

    def ahead(self, sequence: RequestState) -> Iterator[RequestState]:
        """Requests surely admitted before `sequence`, if queued now: those it may not overtake."""
        if self._policy == "fcfs":
            yield from self
        elif self._policy == "lpm":
            estimate = self._estimate(sequence)
            for number, other in self._all.items():
                if self._estimates[number] >= estimate:
                    yield other

    def add(self, sequence: RequestState) -> None:
        number = sequence.number
        self._all[number] = sequence
        if self._policy == "fcfs":
            return
        estimate = self._estimate(sequence)
        self._patience.arrives(number, work_of(sequence.length, estimate))
        self._prompts.add(sequence)
        if self._policy == "lpm":
            self._rotation.append(number)
            self._set_estimate(number, estimate)

    def refresh(self) -> None:
        """Renew some estimates; call once per step with room for more requests."""
        if self._policy != "lpm":
            return
        for _ in range(min(REFRESHED, len(self._all))):
            number = self._rotation.popleft()
            while number not in self._all:  # left the queue since
                number = self._rotation.popleft()
            self._rotation.append(number)
            self._set_estimate(number, self._estimate(self._all[number]))

    def computed(self, sequence: RequestState) -> None:
        """Update estimates after all tokens of `sequence` entered the tree, or will this step."""
        if self._policy != "lpm" or not self._all:
            return
        known = sequence.cached_tokens
        for side in self._prompts.neighbours(sequence):
            for number in islice(side, _NEIGHBOURS):
                other = self._all[number]
                limit = min(sequence.length, other.match_limit())
                shared = common_prefix(sequence.tokens[:limit], other.tokens[:limit])
                # Neighbours further away share no more, and know the prefix cached before.
                if shared <= known or other.namespace != sequence.namespace:
                    break
                if self._estimates[number] < shared:
                    self._set_estimate(number, shared)

    def peek(self) -> RequestState | None:
        """The sequence to admit next.

        None if the queue is empty, or if only deferred sequences remain, and sequences that may not
        overtake the deferred ones.
        """
        if not self._all:
            return None
        number, head = next(iter(self._all.items()))
        if self._policy != "fcfs" and self._patience.is_exhausted(number):
            return None if number in self._aside else head
        if self._policy == "dfs":
            number = self._prompts.following()
            return None if number in self._aside else self._all[number]
        best = self._longest() if self._policy == "lpm" else None
        if best is not None or not self._aside:
            return best or head
        return next((one for other, one in self._all.items() if other not in self._aside), None)

    def set_aside(self, sequence: RequestState) -> None:
        """Defer `sequence`, offering other sequences until `bring_back`."""
        self._aside.add(sequence.number)

    def bring_back(self, sequence: RequestState) -> None:
        """Offer a deferred sequence again."""
        number = sequence.number
        self._aside.discard(number)
        if number in self._estimates:
            heapq.heappush(self._heap, (-self._estimates[number], number))

    def take(self, sequence: RequestState) -> None:
        """Remove an admitted `sequence`."""
        number = sequence.number
        if self._policy == "dfs":
            self._prompts.go_to(number)
            self._patience.renew(number, work_of(sequence.length, self._estimate(sequence)))
        # In order of arrival only a request computed alone overtakes others.
        if self._policy != "fcfs" and number != next(iter(self._all)):
            self._patience.overtakes(number)
        self.remove(sequence)

    def remove(self, sequence: RequestState) -> None:
        """Remove `sequence`, admitted or not."""
        number = sequence.number
        del self._all[number]
        if self._policy == "fcfs":
            return
        self._patience.leaves(number, next(iter(self._all), None))
        self._prompts.remove(number)
        self._estimates.pop(number, None)
        if not self._all:
            self._heap.clear()
            self._rotation.clear()

    def _set_estimate(self, number: int, estimate: int) -> None:
        if self._estimates.get(number) != estimate:
            self._estimates[number] = estimate
            self._patience.renew(number, work_of(self._all[number].length, estimate))
            heapq.heappush(self._heap, (-estimate, number))
            if len(self._heap) > 4 * len(self._all) + 1024:
                self._heap = [(-value, key) for key, value in self._estimates.items()]
                heapq.heapify(self._heap)

    def _longest(self) -> RequestState | None:
        """The sequence with the best renewed estimate; after `_RETRIES` the best known one."""
        best = None
        for _ in range(_RETRIES):
            while self._heap and self._is_passed_over(*self._heap[0]):
                heapq.heappop(self._heap)
            if not self._heap:
                break
            estimate, number = self._heap[0]
            best = self._all[number]
            renewed = self._estimate(best)
            self._set_estimate(number, renewed)
            if renewed >= -estimate:
                break
        return best

    def _is_passed_over(self, negative: int, number: int) -> bool:
        """Whether a heap entry is outdated or deferred."""
        return number in self._aside or self._estimates.get(number) != -negative


# Clients ------------------------------------------------------------------------------------------


_TOLD = 16
"""Clients whose queues learn of a computed prompt at once; the others learn at their turn."""
_REMEMBERED = 4096
"""Clocks kept for clients without waiting requests, until the queue is empty."""


class FairQueue:
    """A `WaitingQueue` per client; its bounds hold among the requests of one client.

    Clients share by start-time fair queueing (Goyal, Vin and Cheng, 1996). A client's clock
    advances by the work of each admitted request, and at its end by the work of the output. The
    client with the smallest clock comes next. An idle client earns no credit: its clock restarts at
    the last admitted client's clock. Or it restarts at the mean share admitted since (as in WF2Q+).
    Without the mean share, new clients would always start at the same place, before all others.

    So of two waiting clients, one exceeds the other by at most one request of each (and their
    outputs). A client with a single request waits for about one request of each other client,
    however many requests these clients have sent.
    """

    def __init__(
        self, make: Callable[[], WaitingQueue], estimate: Callable[[RequestState], int]
    ) -> None:
        """`estimate`: count of cached leading tokens of a sequence."""
        self._make = make
        self._estimate = estimate
        self._queues: dict[str, WaitingQueue] = {}
        self._clocks: dict[str, int] = {}
        """Clocks of waiting clients, and of clients that waited since the queue was empty."""
        self._now = 0
        """Starting value of a client's clock."""
        self._waiting = 0
        self._order: list[tuple[int, int, str]] = []
        """Heap of (clock, number of a request that waited then, client).

        An entry with a clock other than the client's is outdated.
        """

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    @property
    def first(self) -> RequestState | None:
        """The earliest request of the client that comes next."""
        queue = self._next()
        return None if queue is None else queue.first

    def share(self, client: str) -> tuple[int, int]:
        """Count of the client's waiting requests, and count of clients with waiting requests."""
        queue = self._queues.get(client)
        return 0 if queue is None else len(queue), len(self._queues)

    def ahead(self, sequence: RequestState) -> Iterator[RequestState]:
        """Requests admitted before `sequence`, if queued now.

        These are requests of the same client, and as many of each other client.
        """
        client = sequence.request.client
        queue = self._queues.get(client)
        turns = 1
        for one in () if queue is None else queue.ahead(sequence):
            turns += 1
            yield one
        for name, other in self._queues.items():
            if name != client:
                yield from islice(other, turns)

    def add(self, sequence: RequestState) -> None:
        client = sequence.request.client
        self._waiting += 1
        if client in self._queues:
            self._queues[client].add(sequence)
            return
        queue = self._queues[client] = self._make()
        queue.add(sequence)
        self._set_clock(client, max(self._clocks.get(client, 0), self._now))

    def refresh(self) -> None:
        """Renew some estimates; call once per step with room for more requests."""
        queue = self._next()
        if queue is not None:
            queue.refresh()

    def computed(self, sequence: RequestState) -> None:
        """Update estimates after all tokens of `sequence` entered the tree, or will this step."""
        for queue in islice(self._queues.values(), _TOLD):
            if len(queue) > 1:  # a single request has no order to change
                queue.computed(sequence)

    def peek(self) -> RequestState | None:
        """The sequence to admit next."""
        queue = self._next()
        sequence = None if queue is None else queue.peek()
        if sequence is None and queue is not None:  # all deferred: the next client's turn
            by_clock = sorted(self._queues.items(), key=lambda item: self._clocks[item[0]])
            sequence = next((offered for _, other in by_clock if (offered := other.peek())), None)
        return sequence

    def set_aside(self, sequence: RequestState) -> None:
        """See `WaitingQueue.set_aside`."""
        self._queues[sequence.request.client].set_aside(sequence)

    def bring_back(self, sequence: RequestState) -> None:
        """See `WaitingQueue.bring_back`."""
        self._queues[sequence.request.client].bring_back(sequence)

    def take(self, sequence: RequestState) -> None:
        """Remove an admitted `sequence`."""
        client = sequence.request.client
        self._queues[client].take(sequence)
        work = work_of(sequence.length, self._estimate(sequence))
        self._now = max(self._now + work // len(self._queues), self._clocks[client])
        self._set_clock(client, self._clocks[client] + work)
        self._left(client)

    def remove(self, sequence: RequestState) -> None:
        """Remove a `sequence` that was not admitted."""
        client = sequence.request.client
        self._queues[client].remove(sequence)
        self._left(client)

    def ended(self, sequence: RequestState) -> None:
        """Charge the outputs of an ended `sequence` to its client."""
        if self._queues and sequence.outputs:
            client = sequence.request.client
            clock = max(self._clocks.get(client, 0), self._now)
            self._set_clock(client, clock + COMPUTED * sequence.outputs)

    # ------------------------------------------------------------ clocks

    def _next(self) -> WaitingQueue | None:
        """The queue of the client with the smallest clock."""
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
        """Update the client after one of its requests left the queue."""
        self._waiting -= 1
        if len(self._queues[client]):
            return
        del self._queues[client]
        if not self._queues:  # no clients left to compare
            self._clocks.clear()
            self._order.clear()
            self._now = 0


# Priorities ---------------------------------------------------------------------------------------


class PriorityQueues:
    """A `FairQueue` per priority; its bounds hold among the requests of one priority.

    One priority level is worth `seconds` of waiting. The next queue is that with the earliest first
    request, its arrival shifted by its priority. So a request waits for later ones of higher
    priority only within that time, and no request waits for ever.
    """

    def __init__(self, seconds: float, make: Callable[[], FairQueue]) -> None:
        self._seconds = seconds
        self._make = make
        self._plain = make()
        self._queues = {0: self._plain}

    def __len__(self) -> int:
        if len(self._queues) == 1:
            return len(self._plain)
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    def add(self, sequence: RequestState) -> None:
        priority = sequence.request.handling.priority
        if priority not in self._queues:
            self._queues[priority] = self._make()
        self._queues[priority].add(sequence)

    def refresh(self) -> None:
        """Renew some estimates; call once per step with room for more requests."""
        self._first().refresh()

    def computed(self, sequence: RequestState) -> None:
        """Update estimates after all tokens of `sequence` entered the tree, or will this step."""
        for queue in self._queues.values():
            queue.computed(sequence)

    def peek(self) -> RequestState | None:
        """The sequence to admit next."""
        sequence = self._first().peek()
        if sequence is None and len(self._queues) > 1:
            queues = (queue for _, _, queue in sorted(self._turns()))
            sequence = next((offered for queue in queues if (offered := queue.peek())), None)
        return sequence

    def set_aside(self, sequence: RequestState) -> None:
        """Defer `sequence` until `bring_back`, while its blocks are being read."""
        self._queues[sequence.request.handling.priority].set_aside(sequence)

    def bring_back(self, sequence: RequestState) -> None:
        """Offer a deferred sequence again."""
        self._queues[sequence.request.handling.priority].bring_back(sequence)

    def take(self, sequence: RequestState) -> None:
        """Remove an admitted `sequence`."""
        self._queues[sequence.request.handling.priority].take(sequence)
        self._drop_empty(sequence.request.handling.priority)

    def remove(self, sequence: RequestState) -> None:
        """Remove a `sequence` that was not admitted."""
        self._queues[sequence.request.handling.priority].remove(sequence)
        self._drop_empty(sequence.request.handling.priority)

    def ahead(self, sequence: RequestState) -> Iterator[RequestState]:
        """Requests surely admitted before `sequence`, if queued now."""
        turn, request = self._turn(sequence), sequence.request
        for priority, queue in self._queues.items():
            head = queue.first
            if head is None or self._turn(head) > turn:
                continue
            # With several clients, later requests may decide the turn of another queue.
            if priority == request.handling.priority or queue.share(request.client)[1] == 1:
                yield from (other for other in queue.ahead(sequence) if self._turn(other) <= turn)

    def ended(self, sequence: RequestState) -> None:
        """Charge the outputs of an ended `sequence` to its client."""
        queue = self._queues.get(sequence.request.handling.priority)
        if queue is not None:
            queue.ended(sequence)

    def crowds_out(self, client: str, max_waiting: int) -> bool:
        """Whether the queue has no room for another request of `client`, of `most` requests in all.

        The last eighth is for clients with fewer waiting requests than the mean client.
        """
        waiting = len(self)
        if waiting < max_waiting - max_waiting // 8:
            return False
        shares = [queue.share(client) for queue in self._queues.values()]
        clients_share = sum(count for count, _ in shares)
        clients = max(sum(others for _, others in shares), 1)
        return waiting >= max_waiting or clients_share * clients >= waiting

    def _first(self) -> FairQueue:
        if len(self._queues) == 1:
            return self._plain
        return min(self._turns(), default=(0.0, 0, self._plain))[2]

    def _turns(self) -> Iterator[tuple[float, int, FairQueue]]:
        """(time, priority, queue) of each queue's turn, ties by the highest priority."""
        for priority, queue in self._queues.items():
            if (head := queue.first) is not None:
                yield self._turn(head), -priority, queue

    def _turn(self, sequence: RequestState) -> float:
        """Arrival time of `sequence`, shifted by its priority."""
        return sequence.arrived - self._seconds * sequence.request.handling.priority

    def _drop_empty(self, priority: int) -> None:
        if priority and not len(self._queues[priority]):
            del self._queues[priority]


# Prompt work --------------------------------------------------------------------------------------


STALE_SECONDS = 0.25
"""Maximum age of a waiting prompt's estimate, in seconds.

Renewing all estimates for each arriving request would take longer than computing some prompts.
"""


class PromptWork:
    """Prefill tokens of waiting prompts, without cached tokens and tokens shared with counted
    prompts.

    A waiting prompt's estimate holds for a while; the prompt passed to `of_next` is matched each
    time.
    """

    def __init__(self, cached: Callable[[RequestState], int]) -> None:
        """`cached`: count of leading tokens of a sequence that need no computation."""
        self._cached = cached
        self._tokens: dict[int, int] = {}
        self._order: list[tuple[bytes, int]] = []
        self._known: dict[int, RequestState] = {}
        self._since = float("-inf")

    def of_waiting(self, sequences: Iterable[RequestState], now: float) -> int:
        """Prefill tokens of all `sequences` together, a lower bound."""
        if now - self._since > STALE_SECONDS:
            self.forget()
            self._since = now
        return sum(self._of(one) for one in sequences)

    def of_next(self, sequence: RequestState) -> int:
        """Prefill tokens of `sequence` if it were queued last."""
        return self._beside_neighbours(sequence, bisect_left(self._order, (key_of(sequence), -1)))

    def forget(self) -> None:
        """Drop all estimates after the cache or the queue changed by much."""
        self._tokens.clear()
        self._order.clear()
        self._known.clear()

    def _of(self, sequence: RequestState) -> int:
        number = sequence.number
        if number not in self._tokens:
            entry = (key_of(sequence), number)
            self._tokens[number] = self._beside_neighbours(
                sequence, bisect_left(self._order, entry)
            )
            insort(self._order, entry)
            self._known[number] = sequence
        return self._tokens[number]

    def _beside_neighbours(self, sequence: RequestState, at: int) -> int:
        """Prefill tokens of `sequence` beside its known neighbours at `at`.

        Known sequences are in lexicographic order, so the neighbours share most.
        """
        known = self._cached(sequence)
        for other in self._neighbours(at):
            if other.namespace == sequence.namespace:
                shorter = min(other.length, sequence.length)
                shared = common_prefix(other.tokens[:shorter], sequence.tokens[:shorter])
                known = max(known, shared)
        return max(sequence.length - known, 0)

    def _neighbours(self, at: int) -> list[RequestState]:
        """The known sequences before and at place `at`.

        An ended sequence is removed: its tokens are cached, or were never computed.
        """
        order, neighbours = self._order, []
        for step in (-1, 0):
            while 0 <= at + step < len(order):
                other = self._known[order[at + step][1]]
                if not other.finished:
                    neighbours.append(other)
                    break
                del order[at + step]
                at += step
        return neighbours
