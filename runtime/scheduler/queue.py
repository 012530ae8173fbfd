"""The queue of requests of one priority that were not admitted yet, and in which order they are."""

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
#
# How much later requests may delay an earlier one.


COMPUTED, CACHED = 8, 1
"""Cost: 8 per computed token, 1 per cached, which also takes room and is attended to."""


def work_of(length: int, cached: int) -> int:
    """Cost of a request of `length` tokens, `cached` of which are in the tree."""
    return COMPUTED * (length - cached) + CACHED * cached


class Patience:
    """Bounds how often the first waiting request may be overtaken.

    A request may be overtaken by `max_overtaken` later ones, and by more while their work is less
    than `max_delay` times the work that was waiting before it when it came. So cheap requests,
    whose prefixes are cached, may overtake in numbers, and nobody waits much longer than in order
    of arrival.

    Whoever overtakes a waiting request overtakes all that wait before it. So it is enough to watch
    the first. Any other request is then bounded, up to one overtaker, by its own limits or by those
    of a request that was waiting when it came.
    """

    def __init__(self, max_overtaken: int, max_delay: float) -> None:
        self._max_overtaken = max_overtaken
        self._max_delay = max_delay
        self._work: dict[int, int] = {}
        self._allowed: dict[int, float] = {}
        self._waiting = 0
        """Work of all who wait."""
        self._overtakers: list[int] = []
        """Numbers of admitted requests that came after the first waiting one, ascending."""
        self._delays: dict[int, int] = {}
        """Work of each overtaker."""
        self._delay = 0
        """Work of all overtakers."""

    def arrives(self, number: int, work: int) -> None:
        """A request is queued; its `number` is higher than all before."""
        self._allowed[number] = self._max_delay * self._waiting
        self._work[number] = work
        self._waiting += work

    def renew(self, number: int, work: int) -> None:
        """A waiting request's work has changed, because more or less of it is cached."""
        self._waiting += work - self._work[number]
        self._work[number] = work

    def overtakes(self, number: int) -> None:
        """A request other than the first is admitted; call `leaves` for it next."""
        work = self._work[number]
        insort(self._overtakers, number)
        self._delays[number] = work
        self._delay += work

    def leaves(self, number: int, first: int | None) -> None:
        """A request waits no longer; `first` is the first that still does."""
        self._waiting -= self._work.pop(number)
        del self._allowed[number]
        # The first left: those between it and the new first overtook nobody who waits.
        stop = len(self._overtakers) if first is None else bisect_left(self._overtakers, first)
        for each in self._overtakers[:stop]:
            self._delay -= self._delays.pop(each)
        del self._overtakers[:stop]

    def is_exhausted(self, first: int) -> bool:
        """Whether nobody but the first may be admitted now."""
        return len(self._overtakers) >= self._max_overtaken and self._delay >= self._allowed[first]


# Prompt order -------------------------------------------------------------------------------------
#
# Waiting sequences in lexicographic order of their prompts.


_KEY_TOKENS = 4096


class PromptOrder:
    """The depth-first order of the tree that the prompts form: neighbours share most.

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
        """Let `following` continue from here."""
        self._cursor = (self._key_of[number], number)

    def following(self) -> int:
        """The number that comes next, wrapping around. The order must not be empty."""
        return self._keys[bisect_left(self._keys, self._cursor) % len(self._keys)][1]

    def neighbours(self, sequence: RequestState) -> tuple[Iterator[int], Iterator[int]]:
        """Numbers before and after `sequence` (which need not be here itself), nearest first. In
        both directions the shared prefix only gets shorter."""
        at = bisect_left(self._keys, (key_of(sequence), -1))
        before = (self._keys[i][1] for i in range(at - 1, -1, -1))
        behind = (self._keys[i][1] for i in range(at, len(self._keys)))
        return before, behind


def key_of(sequence: RequestState) -> bytes:
    """Bytes whose order is that of the prompts, token by token, within each namespace."""
    tokens = sequence.tokens[: min(sequence.length, _KEY_TOKENS)]
    request = sequence.request
    place = f"{request.adapter}\0{request.namespace}\0".encode()
    return place + tokens.astype(">i4").tobytes()


# Waiting ------------------------------------------------------------------------------------------


REFRESHED = 32
"""Estimates renewed per step, round robin: the cost does not grow with the queue."""

_NEIGHBOURS = 256
"""How many neighbours on either side are considered when a prompt has been computed."""
_RETRIES = 8
"""How often the best estimate is renewed before the best one known is offered."""


class WaitingQueue:
    """Sequences in order of policy; `Patience` says how far they may overtake each other.

    - `fcfs`: order of arrival.
    - `lpm`: longest cached prefix first, then order of arrival. A heap holds the estimates. When a
      prompt has been computed, those who share more with it than was cached get a new estimate at
      once; `REFRESHED` others are renewed per step, and the best one before it is offered.
    - `dfs`: lexicographic order of the prompts, going on from the last one admitted and around.
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
        """Numbers of those who are not offered now."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._all.values())

    @property
    def first(self) -> RequestState | None:
        """The one that came first."""
        return next(iter(self._all.values()), None)

    def ahead(self, sequence: RequestState) -> Iterator[RequestState]:
        """Those that are surely admitted before `sequence`, were it added now: all, unless it may
        overtake them."""
        if self._policy == "fcfs":
            yield from self
        elif self._policy == "lpm":
            mine = self._estimate(sequence)
            for number, other in self._all.items():
                if self._estimates[number] >= mine:
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
        """Renew some estimates; call once per step in which there is room for more requests."""
        if self._policy != "lpm":
            return
        for _ in range(min(REFRESHED, len(self._all))):
            number = self._rotation.popleft()
            while number not in self._all:  # left the queue since
                number = self._rotation.popleft()
            self._rotation.append(number)
            self._set_estimate(number, self._estimate(self._all[number]))

    def computed(self, sequence: RequestState) -> None:
        """All tokens of an admitted `sequence` are in the tree, or will be with this step."""
        if self._policy != "lpm" or not self._all:
            return
        known = sequence.cached_tokens
        for side in self._prompts.neighbours(sequence):
            for number in islice(side, _NEIGHBOURS):
                other = self._all[number]
                limit = min(sequence.length, other.match_limit())
                shared = common_prefix(sequence.tokens[:limit], other.tokens[:limit])
                # Those further away share no more, and were told of what was cached before.
                if shared <= known or other.namespace != sequence.namespace:
                    break
                if self._estimates[number] < shared:
                    self._set_estimate(number, shared)

    def peek(self) -> RequestState | None:
        """The sequence to admit next; None if there is none, or none but those that are set aside
        and those that may not overtake them."""
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
        """Offer others until `bring_back`."""
        self._aside.add(sequence.number)

    def bring_back(self, sequence: RequestState) -> None:
        """A sequence that was set aside may be offered again."""
        number = sequence.number
        self._aside.discard(number)
        if number in self._estimates:
            heapq.heappush(self._heap, (-self._estimates[number], number))

    def take(self, sequence: RequestState) -> None:
        """`sequence` is admitted."""
        number = sequence.number
        if self._policy == "dfs":
            self._prompts.go_to(number)
            self._patience.renew(number, work_of(sequence.length, self._estimate(sequence)))
        # In order of arrival nobody is overtaken, but by a request that is computed alone.
        if self._policy != "fcfs" and number != next(iter(self._all)):
            self._patience.overtakes(number)
        self.remove(sequence)

    def remove(self, sequence: RequestState) -> None:
        """`sequence` leaves the queue, admitted or not."""
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

    # ------------------------------------------------------------ longest prefix

    def _set_estimate(self, number: int, estimate: int) -> None:
        if self._estimates.get(number) != estimate:
            self._estimates[number] = estimate
            self._patience.renew(number, work_of(self._all[number].length, estimate))
            heapq.heappush(self._heap, (-estimate, number))
            if len(self._heap) > 4 * len(self._all) + 1024:
                self._heap = [(-value, key) for key, value in self._estimates.items()]
                heapq.heapify(self._heap)

    def _longest(self) -> RequestState | None:
        """The sequence with the best renewed estimate; after `_RETRIES` the best one known."""
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
        """Whether an entry of the heap is out of date, or of one that is set aside."""
        return number in self._aside or self._estimates.get(number) != -negative


# Clients ------------------------------------------------------------------------------------------
#
# The queue of the clients of one priority, who take turns.


_TOLD = 16
"""The queues of so many clients learn of a computed prompt at once, others at their turn."""
_REMEMBERED = 4096
"""So many clients who do not wait keep their clocks, until nobody waits."""


class FairQueue:
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
        self, make: Callable[[], WaitingQueue], estimate: Callable[[RequestState], int]
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

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    @property
    def first(self) -> RequestState | None:
        """Of the requests of the client who comes next, the one that came first."""
        queue = self._next()
        return None if queue is None else queue.first

    def share(self, client: str) -> tuple[int, int]:
        """How many requests of the client wait, and how many clients have some."""
        queue = self._queues.get(client)
        return 0 if queue is None else len(queue), len(self._queues)

    def ahead(self, sequence: RequestState) -> Iterator[RequestState]:
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
        """Renew some estimates; call once per step in which there is room for more requests."""
        queue = self._next()
        if queue is not None:
            queue.refresh()

    def computed(self, sequence: RequestState) -> None:
        """All tokens of an admitted `sequence` are in the tree, or will be with this step."""
        for queue in islice(self._queues.values(), _TOLD):
            if len(queue) > 1:  # else there is no order to change
                queue.computed(sequence)

    def peek(self) -> RequestState | None:
        """The sequence to admit next."""
        queue = self._next()
        found = None if queue is None else queue.peek()
        if found is None and queue is not None:  # they are set aside: it is others' turn
            by_clock = sorted(self._queues.items(), key=lambda item: self._clocks[item[0]])
            found = next((one for _, other in by_clock if (one := other.peek())), None)
        return found

    def set_aside(self, sequence: RequestState) -> None:
        """See `WaitingQueue.set_aside`."""
        self._queues[sequence.request.client].set_aside(sequence)

    def bring_back(self, sequence: RequestState) -> None:
        """See `WaitingQueue.bring_back`."""
        self._queues[sequence.request.client].bring_back(sequence)

    def take(self, sequence: RequestState) -> None:
        """`sequence` is admitted."""
        client = sequence.request.client
        self._queues[client].take(sequence)
        work = work_of(sequence.length, self._estimate(sequence))
        self._now = max(self._now + work // len(self._queues), self._clocks[client])
        self._set_clock(client, self._clocks[client] + work)
        self._left(client)

    def remove(self, sequence: RequestState) -> None:
        """`sequence` leaves the queue, not admitted."""
        client = sequence.request.client
        self._queues[client].remove(sequence)
        self._left(client)

    def ended(self, sequence: RequestState) -> None:
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


# Priorities ---------------------------------------------------------------------------------------
#
# The queue of all priorities.


class PriorityQueues:
    """`ClientQueues` for each priority; what they promise holds among requests of one priority.

    Among priorities a step is worth `seconds` of waiting: the queue comes first whose first request
    came earliest, had each come so much earlier for each step. So a request whose client's turn it
    is waits for later ones of higher priority only if they came within that time, and nobody waits
    for ever.
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
        """Renew some estimates; call once per step in which there is room for more requests."""
        self._first().refresh()

    def computed(self, sequence: RequestState) -> None:
        """All tokens of an admitted `sequence` are in the tree, or will be with this step."""
        for queue in self._queues.values():
            queue.computed(sequence)

    def peek(self) -> RequestState | None:
        """The sequence to admit next."""
        found = self._first().peek()
        if found is None and len(self._queues) > 1:
            queues = (queue for _, _, queue in sorted(self._turns()))
            found = next((one for queue in queues if (one := queue.peek())), None)
        return found

    def set_aside(self, sequence: RequestState) -> None:
        """Offer others until `bring_back`: what the sequence needs is being read."""
        self._queues[sequence.request.handling.priority].set_aside(sequence)

    def bring_back(self, sequence: RequestState) -> None:
        """A sequence that was set aside may be offered again."""
        self._queues[sequence.request.handling.priority].bring_back(sequence)

    def take(self, sequence: RequestState) -> None:
        """`sequence` is admitted."""
        self._queues[sequence.request.handling.priority].take(sequence)
        self._drop_empty(sequence.request.handling.priority)

    def remove(self, sequence: RequestState) -> None:
        """`sequence` leaves the queue, not admitted."""
        self._queues[sequence.request.handling.priority].remove(sequence)
        self._drop_empty(sequence.request.handling.priority)

    def ahead(self, sequence: RequestState) -> Iterator[RequestState]:
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

    def ended(self, sequence: RequestState) -> None:
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

    def _first(self) -> FairQueue:
        if len(self._queues) == 1:
            return self._plain
        return min(self._turns(), default=(0.0, 0, self._plain))[2]

    def _turns(self) -> Iterator[tuple[float, int, FairQueue]]:
        """When it is whose turn, the highest priority first of those that are equal."""
        for priority, queue in self._queues.items():
            if (head := queue.first) is not None:
                yield self._turn(head), -priority, queue

    def _turn(self, sequence: RequestState) -> float:
        """When it came, moved by its priority."""
        return sequence.arrived - self._seconds * sequence.request.handling.priority

    def _drop_empty(self, priority: int) -> None:
        if priority and not len(self._queues[priority]):
            del self._queues[priority]


# Prompt work --------------------------------------------------------------------------------------
#
# How many tokens of waiting prompts are to be computed.


STALE_SECONDS = 0.25
"""How old an estimate of a waiting prompt may be: to look all of them up for each request that
comes would take longer than to compute some."""


class PromptWork:
    """Tokens of prompts that are neither cached nor shared with a prompt that counts already.

    What was found of a waiting prompt holds for a while; of the one that is asked for by `of_next`
    it is looked up each time.
    """

    def __init__(self, cached: Callable[[RequestState], int]) -> None:
        """`cached`: how many leading tokens of a sequence need not be computed."""
        self._cached = cached
        self._tokens: dict[int, int] = {}
        self._order: list[tuple[bytes, int]] = []
        self._known: dict[int, RequestState] = {}
        self._since = float("-inf")

    def of_waiting(self, sequences: Iterable[RequestState], now: float) -> int:
        """Of all of them together, at least."""
        if now - self._since > STALE_SECONDS:
            self.forget()
            self._since = now
        return sum(self._of(one) for one in sequences)

    def of_next(self, sequence: RequestState) -> int:
        """Of a sequence that comes behind those that `of_waiting` was asked for."""
        return self._beside_neighbours(sequence, bisect_left(self._order, (key_of(sequence), -1)))

    def forget(self) -> None:
        """What is cached, or who waits, has changed by much."""
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
        """`at`: its place among those that are known, in lexicographic order: neighbours share
        most."""
        known = self._cached(sequence)
        for other in self._neighbours(at):
            if other.namespace == sequence.namespace:
                shorter = min(other.length, sequence.length)
                shared = common_prefix(other.tokens[:shorter], sequence.tokens[:shorter])
                known = max(known, shared)
        return max(sequence.length - known, 0)

    def _neighbours(self, at: int) -> list[RequestState]:
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
