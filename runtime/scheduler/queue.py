"""Queue of requests that were not admitted yet: the order of admission, and of preemption.

 priority   earliest first request first; each step of priority counts as seconds of waiting
   client   least work admitted and generated while others waited: first among keys and addresses,
            then among a key's addresses, then among an address's connections
     policy   fcfs, lpm (longest cached prefix) or dfs (order of prompts)

An ageing rule bounds the policy: few requests, or little work, overtake the first request of a
client, which then goes before all others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from rootlace.runtime.cache.radix_tree import common_prefix
from rootlace.runtime.config import SchedulerConfig
from rootlace.runtime.scheduler.request import Place, RequestState

COMPUTED, CACHED = 8, 1
"""Cost per token: 8 computed, 1 cached, as a cached token takes blocks and attention."""
REFRESHED = 32
"""Estimates renewed per step, round robin: the cost does not grow with the queue."""

_KEY_TOKENS = 4096
_NEIGHBOURS = 256
"""Neighbours on either side compared with a prompt that was computed."""
_TOLD = 64
"""Most clients notified of a computed prompt."""
_RETRIES = 8
"""Renewals of the best estimate before the queue offers the best known request."""
_REMEMBERED = 1024
"""Clocks kept for clients that do not wait."""
_SPARE = 64
"""Least deadlines kept of requests that left the queue."""


def work_of(length: int, cached: int) -> int:
    """Return the cost of a request of `length` tokens, `cached` of which are in the tree."""
    return COMPUTED * (length - cached) + CACHED * cached


def first_victim(running: list[RequestState]) -> RequestState | None:
    """Return the running request to preempt first; None if there is only the oldest, `running[0]`.

    The victim has the lowest priority, then the fewest tokens to compute again, then the latest
    admission. Preempting a request helps if the request holds blocks of its own or wants one.
    """

    def rank(sequence: RequestState) -> tuple[bool, int, int, int]:
        priority, loss = sequence.request.handling.priority, _loss(sequence)
        return not (loss > 0 or sequence.decoding), priority, loss, -sequence.order

    return min(running[1:], key=rank, default=None)


def _loss(sequence: RequestState) -> int:
    """Count the computed tokens of `sequence` that no other running sequence shares."""
    node = sequence.node
    if node is None:
        return sequence.computed
    while node.locks == 1 and node.parent is not None:
        node = node.parent
    return sequence.computed - node.end


# One client ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    """Waiting request among its client's requests; numbers by `work_of`. `key`: bytes that sort
    like the prompts. `allowed`: work that may overtake the request."""

    sequence: RequestState
    key: bytes = b""
    estimate: int = 0
    work: int = 0
    allowed: float = 0.0


class ClientQueue:
    """Waiting requests of one client and priority, in order of policy.

    - `fcfs`: order of arrival.
    - `lpm`: longest cached prefix first, then order of arrival. A heap holds the estimates. After a
     prefill, requests that share more with the new prompt than was cached get a new estimate.
     `REFRESHED` others are renewed per step, and the best one before the queue offers it.
    - `dfs`: lexicographic order of the prompts, continuing from the last admitted one and around.

    *Ageing.* `max_overtaken` later requests may overtake a request. More may, while their total
    work is less than `max_delay` times the work queued before the request on its arrival. A request
    that overtakes another overtakes all before it, so only the first request is watched. Any other
    request is bounded, up to one overtaker, by its own limits or by those of a request queued
    before it.

    A request that is alone needs no estimate.
    """

    def __init__(self, config: SchedulerConfig, estimate: Callable[[RequestState], int]) -> None:
        """`estimate`: count of cached leading tokens of a sequence."""
        self._policy = config.policy
        self._max_overtaken = config.max_overtaken
        self._max_delay = config.max_delay
        self._estimate = estimate
        self.requests: OrderedDict[int, _Waiting] = OrderedDict()  # by arrival number
        self._work = 0
        """Total work of the waiting requests."""
        self._overtakers: list[tuple[int, int]] = []
        """(number, work) of admitted requests that came after the first waiting one, ascending."""
        self._delay = 0
        """Total work of the overtakers."""
        self._prompts: list[tuple[bytes, int]] = []
        self._cursor: tuple[bytes, int] = (b"", -1)
        """Place of the prompt admitted last."""
        self._heap: list[tuple[int, int]] = []
        self._rotation: deque[int] = deque()
        self.deferred: set[int] = set()
        self.held = False
        """Whether the queue offers no request."""

    @property
    def first(self) -> RequestState:
        """Return the earliest waiting request; there must be one."""
        return next(iter(self.requests.values())).sequence

    def add(self, sequence: RequestState) -> None:
        number = sequence.number
        self.requests[number] = _Waiting(sequence)
        if self._policy == "fcfs" or len(self.requests) == 1:
            return
        if len(self.requests) == 2:
            self._compare(next(iter(self.requests)))
        self._compare(number)

    def _compare(self, number: int) -> None:
        """Sort a request among the client's requests, unless it is sorted already."""
        one = self.requests[number]
        if one.key:
            return
        one.key = _key_of(one.sequence)
        one.allowed = self._max_delay * self._work
        one.estimate = -1
        insort(self._prompts, (one.key, number))
        self._rotation.append(number)
        self._renew(number, self._estimate(one.sequence))

    def _renew(self, number: int, estimate: int) -> None:
        """Note how much of a waiting prompt is cached."""
        one = self.requests[number]
        if one.estimate == estimate:
            return
        work = work_of(one.sequence.length, estimate)
        self._work += work - one.work
        one.estimate, one.work = estimate, work
        if self._policy == "lpm":
            heapq.heappush(self._heap, (-estimate, number))
            if len(self._heap) > 4 * len(self.requests) + 1024:
                ordered = [(-each.estimate, key) for key, each in self.requests.items()]
                self._heap = sorted(ordered)

    def refresh(self) -> None:
        """Renew some estimates."""
        if self._policy != "lpm" or len(self.requests) == 1:
            return
        for _ in range(min(REFRESHED, len(self.requests))):
            number = self._rotation.popleft()
            while number not in self.requests:  # left the queue since
                number = self._rotation.popleft()
            self._rotation.append(number)
            self._renew(number, self._estimate(self.requests[number].sequence))

    def computed(self, sequence: RequestState) -> None:
        """Update estimates after all tokens of `sequence` entered the tree, or will this step."""
        if self._policy != "lpm":
            return
        known, prompts = sequence.cached_tokens, self._prompts
        at = bisect_left(prompts, (_key_of(sequence), -1))
        # In both directions the shared prefix only gets shorter.
        for side in (range(at - 1, -1, -1), range(at, len(prompts))):
            for place in side[:_NEIGHBOURS]:
                number = prompts[place][1]
                one = self.requests[number]
                limit = min(sequence.length, one.sequence.match_limit())
                shared = common_prefix(sequence.tokens[:limit], one.sequence.tokens[:limit])
                # Neighbours further away share no more, and know the prefix cached before.
                if shared <= known or one.sequence.namespace != sequence.namespace:
                    break
                if one.estimate < shared:
                    self._renew(number, shared)

    def peek(self) -> RequestState | None:
        """Return the request to admit next; None if the policy allows none. None means that the
        remaining requests are deferred, or may not overtake deferred ones."""
        if self.held:
            return None
        number, first = next(iter(self.requests.items()))
        if len(self.requests) == 1:
            return None if number in self.deferred else first.sequence
        if self._policy != "fcfs":
            spent = len(self._overtakers) >= self._max_overtaken
            if spent and self._delay >= first.allowed:
                return None if number in self.deferred else first.sequence
        if self._policy == "dfs":
            at = bisect_left(self._prompts, self._cursor) % len(self._prompts)
            number = self._prompts[at][1]
            return None if number in self.deferred else self.requests[number].sequence
        best = self._longest() if self._policy == "lpm" else None
        if best is not None or not self.deferred:
            return best or first.sequence
        others = (one for key, one in self.requests.items() if key not in self.deferred)
        return next((one.sequence for one in others), None)

    def restore(self) -> None:
        """Offer deferred requests again."""
        self.held = False
        if self._policy == "lpm" and self.deferred:
            # Entries of deferred requests may have been dropped from the heap, or not.
            self._heap = [(-one.estimate, key) for key, one in self.requests.items()]
            heapq.heapify(self._heap)
        self.deferred.clear()

    def take(self, sequence: RequestState) -> None:
        """Remove an admitted `sequence`."""
        number = sequence.number
        if self._policy == "dfs":
            self._cursor = (self.requests[number].key or _key_of(sequence), number)
            if self.requests[number].key:
                self._renew(number, self._estimate(sequence))
        # In order of arrival only a request computed alone overtakes others.
        if self._policy != "fcfs" and number != next(iter(self.requests)):
            work = self.requests[number].work
            insort(self._overtakers, (number, work))
            self._delay += work
        self.remove(sequence)

    def remove(self, sequence: RequestState) -> None:
        """Remove `sequence`, admitted or not."""
        number = sequence.number
        one = self.requests.pop(number)
        self.deferred.discard(number)
        if one.key:
            self._work -= one.work
            del self._prompts[bisect_left(self._prompts, (one.key, number))]
        # Overtakers older than the new first request overtook no waiting request.
        if self._overtakers:
            first = next(iter(self.requests), self._overtakers[-1][0] + 1)
            over = bisect_left(self._overtakers, (first, 0))
            self._delay -= sum(work for _, work in self._overtakers[:over])
            del self._overtakers[:over]

    def _longest(self) -> RequestState | None:
        """Return the request of the best renewed estimate; after `_RETRIES`, of the best known
        estimate."""
        best = None
        for _ in range(_RETRIES):
            while self._heap:
                estimate, number = self._heap[0]
                one = self.requests.get(number)
                if one and one.estimate == -estimate and number not in self.deferred:
                    break
                heapq.heappop(self._heap)
            if not self._heap:
                break
            best = self.requests[number].sequence
            renewed = self._estimate(best)
            self._renew(number, renewed)
            if renewed >= -estimate:
                break
        return best


def _key_of(sequence: RequestState) -> bytes:
    """Return bytes that sort like the prompts, token by token, within each namespace."""
    tokens = sequence.tokens[: min(sequence.length, _KEY_TOKENS)]
    request = sequence.request
    place = f"{request.adapter}\0{request.namespace}\0".encode()
    return place + tokens.astype(">i4").tobytes()


# All clients --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Turns:
    """Members of one level in start-time fair queueing; `below` shares a member's part the same
    way.

    A clock per member counts the work of its requests at admission, and the work of their outputs
    at the end. Two orders alternate. In one order, the member with the smallest clock is next. In
    the other, the member whose clock would be smallest after its next request. The size of that
    request is a guess: that of the member's last request, or of the first in its queue. So a short
    request waits for no round of long ones, and a long one for two rounds of short ones at most.

    An idle member earns no credit: its clock restarts at the clock of the member admitted last, or
    at the mean share admitted since (as in WF2Q+). Without the mean share, new members would always
    start at the same place, before all others. So of two members that wait with one priority, one
    exceeds the other by at most one request of each (and their outputs).
    """

    places: dict[tuple[bool, str], float] = field(default_factory=dict)
    """Map from order and member to the member's clock, or its clock behind the next request. Holds
    waiting members, and members that waited since the queue was last empty."""
    now: dict[int, float] = field(default_factory=dict)
    """Map from priority to the starting value of a member's clock."""
    waiting: dict[tuple[int, str], int] = field(default_factory=dict)
    """Map from priority and member to the number of the member's queues."""
    below: dict[str, _Turns] = field(default_factory=dict)
    heaps: dict[tuple[int, bool], list[tuple[float, int, str]]] = field(default_factory=dict)
    """Map from priority and order to entries: clock, or clock behind the next request; number of
    the entry; member. An entry is outdated if the member's clock differs."""
    by_end: dict[int, bool] = field(default_factory=dict)
    """Map from priority to the next order: by the clock after the next request, or by the clock."""
    entries: int = 0

    def begin(self, priority: int, name: str, work: float) -> None:
        """Begin a member's queue with a request of `work`."""
        queues = self.waiting.get((priority, name), 0)
        self.waiting[priority, name] = queues + 1
        if not queues:
            for by_end in (False, True):
                self.heaps.setdefault((priority, by_end), [])
            self.by_end.setdefault(priority, False)
            clock = max(self.places.get((False, name), 0.0), self.now.get(priority, 0.0))
            self._set_clock(name, clock, work)

    def end(self, priority: int, name: str) -> None:
        """End an empty queue of a member."""
        if self.waiting[priority, name] > 1:
            self.waiting[priority, name] -= 1
            return
        del self.waiting[priority, name]
        if not any((each, name) in self.waiting for each, _ in self.heaps):
            self.below.pop(name, None)
        self._forget()

    def charge(self, priority: int, name: str, work: int, *, in_turn: bool) -> None:
        """Charge the member for its request, admitted in its turn or before others."""
        before = self.places[False, name]
        now = self.now.get(priority, 0.0)
        self.now[priority] = max(now + work / len(self.waiting), before)
        self._set_clock(name, before + work, work)
        if in_turn:
            self.by_end[priority] = not self.by_end[priority]

    def charge_late(self, name: str, work: int) -> None:
        """Charge a member for work beyond the charge on admission."""
        if self.waiting:
            clock = self.places.get((False, name), 0.0)
            ahead = self.places.get((True, name), clock) - clock
            self._set_clock(name, max(clock, min(self.now.values(), default=0.0)) + work, ahead)
            self._forget()

    def _forget(self) -> None:
        """Forget members that do not wait, if there are many."""
        if len(self.places) > 2 * (len(self.waiting) + _REMEMBERED):
            members = {member for _, member in self.waiting}
            self.places = {key: at for key, at in self.places.items() if key[1] in members}

    def _set_clock(self, name: str, clock: float, work: float) -> None:
        self.places[False, name], self.places[True, name] = clock, clock + work
        for (priority, by_end), heap in self.heaps.items():
            if (priority, name) not in self.waiting:
                continue
            self.entries += 1
            heapq.heappush(heap, (self.places[by_end, name], self.entries, name))
            if len(heap) > 2 * len(self.waiting) + _REMEMBERED:
                current = [one for one in heap if self._is_current(priority, by_end, one)]
                heap[:] = {one[2]: one for one in sorted(current, reverse=True)}.values()
                heapq.heapify(heap)

    def next(self, priority: int) -> str:
        """Return the member in turn, of a waiting priority."""
        by_end = self.by_end[priority]
        heap = self.heaps[priority, by_end]
        while not self._is_current(priority, by_end, heap[0]):
            heapq.heappop(heap)
        return heap[0][2]

    def _is_current(self, priority: int, by_end: bool, entry: tuple[float, int, str]) -> bool:
        at, _, name = entry
        return (priority, name) in self.waiting and self.places[by_end, name] == at


class WaitingQueue:
    """All waiting requests: by priority, within a priority by client, within a client by policy.

    *Priority.* One step is worth `priority_seconds` of waiting. So a request waits for later
    requests of higher priority only within that time, and no request waits for ever.

    *Clients* take turns (`_Turns`) by the parts of a request's `place`: keys and addresses, within
    a key its addresses, and within an address its connections. So a client that shares an address
    with others, behind a proxy, does not hold all of the address.
    """

    def __init__(self, config: SchedulerConfig, estimate: Callable[[RequestState], int]) -> None:
        """`estimate`: count of cached leading tokens of a sequence."""
        self._config = config
        self._estimate = estimate
        self._queues: dict[tuple[int, Place], ClientQueue] = {}
        """Map from priority and client to the client's queue; no queue is empty."""
        self._turns = _Turns()
        self._held: Counter[Place] = Counter()
        """Count of waiting requests by client, and by key or address."""
        self._arrivals: dict[int, list[tuple[float, int, Place]]] = {}
        """Map from priority to a heap of (arrival, number, client), with some requests that left.
        """
        self._others: list[ClientQueue] | None = None
        """Clients with requests to offer, in order of their turns, the first one last. None after a
        request came, left or was offered again."""
        self.count = 0
        self._deadlines: list[tuple[float, int, RequestState]] = []
        """Heap of deadlines of waiting requests, and of some requests that left the queue."""

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            for one in queue.requests.values():
                yield one.sequence

    def add(self, sequence: RequestState) -> None:
        self._others = None
        handling = sequence.request.handling
        priority, place = key = handling.priority, sequence.place
        arrivals = self._arrivals.setdefault(priority, [])
        heapq.heappush(arrivals, (sequence.arrived, sequence.number, place))
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ClientQueue(self._config, self._estimate)
            # A request that is alone waits for no turn.
            work = work_of(sequence.length, self._estimate(sequence)) if self.count else 0
            turns = self._turns
            for name in place:
                turns.begin(priority, name, work)
                turns = turns.below.setdefault(name, _Turns())
        queue.add(sequence)
        self.count += 1
        self._held[place] += 1
        self._held[place[:1]] += 1
        if len(arrivals) > 2 * self.count + _SPARE:
            arrivals[:] = [one for one in arrivals if self._is_queued(priority, one)]
            heapq.heapify(arrivals)
        if handling.timeout is not None:
            deadline = sequence.arrived + handling.timeout
            heapq.heappush(self._deadlines, (deadline, sequence.number, sequence))
            if len(self._deadlines) > 2 * self.count + _SPARE:
                # Entries of requests that left the queue would stay until their deadlines.
                self._deadlines = [entry for entry in self._deadlines if _waits(entry[2])]
                heapq.heapify(self._deadlines)

    def peek(self) -> RequestState | None:
        """Return the request to admit next; None if none can be."""
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue.peek()
        if not self._queues:
            return None
        priorities = self._by_turn()
        if (first := self._next(priorities[0]).peek()) is not None:
            return first
        # All deferred: the next client's turn.
        if self._others is None:
            turn = {priority: at for at, priority in enumerate(priorities)}
            ordered = sorted(
                (turn[priority], self._rank(priority, place), at)
                for at, (priority, place) in enumerate(self._queues)
            )
            queues = list(self._queues.values())
            self._others = [queues[at] for _, _, at in reversed(ordered)]
        while self._others:
            if (first := self._others[-1].peek()) is not None:
                return first
            self._others.pop()
        return None

    def peek_beside(self, held: Collection[Place], levels: int) -> RequestState | None:
        """Return the first request that a client of `beside` offers."""
        offered = (queue.peek() for queue in self.beside(held, levels))
        return next((found for found in offered if found is not None), None)

    def beside(self, held: Collection[Place], levels: int) -> list[ClientQueue]:
        """Return clients whose first `levels` names are not in `held`, in order of their turns.
        O(clients).

        A connection counts only with one waiting request, or with at most half the mean number: a
        connection with many requests gets a row in its turn.
        """
        few = max(1.0, 0.5 * self.count / max(len(self._queues), 1))
        turn = {priority: at for at, priority in enumerate(self._by_turn())}
        queues = [
            (turn[priority], self._rank(priority, place), at, queue)
            for at, ((priority, place), queue) in enumerate(self._queues.items())
            if place[:levels] not in held and (levels == 1 or self._held[place] <= few)
        ]
        return [queue for _, _, _, queue in sorted(queues)]

    def _rank(self, priority: int, place: Place) -> list[float]:
        """Return the client's rank in the next order, level by level."""
        return [turns.places[turns.by_end[priority], name] for turns, name in self._path(place)]

    def _by_turn(self) -> list[int]:
        """Return the priorities of waiting requests, in order of their turns."""
        seconds = self._config.priority_seconds
        turns = []
        for priority, arrivals in list(self._arrivals.items()):
            while arrivals and not self._is_queued(priority, arrivals[0]):
                heapq.heappop(arrivals)
            if arrivals:
                turns.append((arrivals[0][0] - seconds * priority, -priority))
            else:
                del self._arrivals[priority]
        return [-priority for _, priority in sorted(turns)]

    def _is_queued(self, priority: int, arrival: tuple[float, int, Place]) -> bool:
        queue = self._queues.get((priority, arrival[2]))
        return queue is not None and arrival[1] in queue.requests

    def _path(self, place: Place) -> Iterator[tuple[_Turns, str]]:
        """Yield a client's levels with its names there, up to the first without waiting clients."""
        turns: _Turns | None = self._turns
        for name in place:
            if turns is None:
                return
            yield turns, name
            turns = turns.below.get(name)

    def _next(self, priority: int) -> ClientQueue:
        """Return the queue of the client in turn, at a waiting priority."""
        turns, place = self._turns, []
        while turns.waiting:
            place.append(turns.next(priority))
            turns = turns.below[place[-1]]
        return self._queues[priority, tuple(place)]

    def refresh(self) -> None:
        """Renew some estimates; call once per step that can admit several requests."""
        self._next(self._by_turn()[0]).refresh()

    def computed(self, sequence: RequestState) -> None:
        """Update estimates after all tokens of `sequence` entered the tree, or will this step."""
        for queue in islice(self._queues.values(), _TOLD):
            if len(queue.requests) > 1:  # a single request has no order to change
                queue.computed(sequence)

    def defer(self, sequence: RequestState) -> None:
        """Offer other requests until `restore`, while the blocks of `sequence` are being read."""
        self._queue_of(sequence).deferred.add(sequence.number)

    def hold(self, sequence: RequestState) -> None:
        """Offer nothing of the client of `sequence` until `restore`."""
        self._queue_of(sequence).held = True

    def restore(self, deferred: list[RequestState]) -> None:
        """Offer deferred requests again, and all of their clients."""
        self._others = None
        for sequence in deferred:
            self._queue_of(sequence).restore()

    def take(self, sequence: RequestState, *, in_turn: bool = True) -> None:
        """Remove `sequence`, admitted in the turn of its client or before other clients."""
        if self.count > 1:
            work = work_of(sequence.length, self._estimate(sequence))
            priority = sequence.request.handling.priority
            for turns, name in self._path(sequence.place):
                turns.charge(priority, name, work, in_turn=in_turn)
        self._queue_of(sequence).take(sequence)
        self._left(sequence)

    def remove(self, sequence: RequestState) -> None:
        """Remove a `sequence` that was not admitted."""
        self._queue_of(sequence).remove(sequence)
        self._left(sequence)

    def ended(self, sequence: RequestState) -> None:
        """Charge the outputs of an ended `sequence` to its client."""
        if sequence.outputs:
            for turns, name in self._path(sequence.place):
                turns.charge_late(name, COMPUTED * sequence.outputs)

    def crowds_out(self, place: Place, max_waiting: int) -> bool:
        """Return whether a queue of `max_waiting` refuses another request of a client.

        The last eighth is for clients with fewer waiting requests than the mean client of their key
        or address. Half of this eighth is for keys and addresses with fewer requests than their
        mean.
        """
        spare = max_waiting - self.count
        if spare > max_waiting // 8:
            return False
        whole, held = self._held[place[:1]], self._held[place]
        if spare <= 0 or whole * len(self._turns.waiting) < self.count:
            return spare <= 0
        if spare <= max_waiting // 16 or place[0] not in self._turns.below:
            return True
        within = self._turns.below[place[0]].below.values()
        return held * sum(len(turns.waiting) for turns in within) >= whole

    def late(self, now: float, seconds: Callable[[RequestState], float]) -> list[RequestState]:
        """Remove and return requests that would miss their deadlines even if admitted now.
        `seconds`: expected time from the admission of a request to its end."""
        late: list[RequestState] = []
        heap = self._deadlines
        while heap and (not _waits(heap[0][2]) or heap[0][0] < now + seconds(heap[0][2])):
            sequence = heapq.heappop(heap)[2]
            if _waits(sequence):
                self.remove(sequence)
                late.append(sequence)
        return late

    def _queue_of(self, sequence: RequestState) -> ClientQueue:
        return self._queues[sequence.request.handling.priority, sequence.place]

    def _left(self, sequence: RequestState) -> None:
        """Update the clients after one of the requests left the queue."""
        self._others = None
        self.count -= 1
        priority, place = key = sequence.request.handling.priority, sequence.place
        for held in (place, place[:1]):
            self._held[held] -= 1
            if not self._held[held]:
                del self._held[held]
        if self._queues[key].requests:
            return
        del self._queues[key]
        if not self._queues:  # no other client is left to compare
            self._turns = _Turns()
            self._arrivals.clear()
            return
        for turns, name in list(self._path(place)):
            turns.end(priority, name)


def _waits(sequence: RequestState) -> bool:
    return sequence.order < 0 and not sequence.finished
