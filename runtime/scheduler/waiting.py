"""The queue of requests that were not admitted yet, and in which order they are."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from rootlace.runtime.config import Policy
from rootlace.runtime.scheduler.sequence import Sequence

REFRESHED = 32
"""Estimates brought up to date per step (round robin), so that a long queue costs no more."""

_RETRIES = 8
_KEY_TOKENS = 4096


class WaitingQueue:
    """Sequences in order of policy; none is overtaken by more than `max_overtaken` later ones.

    The bound: of any two waiting sequences the earlier one has been overtaken at least as often,
    since whoever came after the later one came after both. So only the head (the earliest) has to
    be watched: when it has been overtaken `max_overtaken` times, nobody but it is offered.

    - `fcfs`: order of arrival.
    - `lpm`: longest cached prefix first, then order of arrival. Estimates are cached in a heap;
      `REFRESHED` of them are renewed per step, and the best one before it is offered.
    - `dfs`: lexicographic order of the prompts, going on from the last one admitted and around:
      that is depth-first order in the tree they make together. Costs O(log n) comparisons of
      prompts (their first 4096 tokens).
    """

    def __init__(
        self, policy: Policy, max_overtaken: int, estimate: Callable[[Sequence], int]
    ) -> None:
        self._policy = policy
        self._max_overtaken = max_overtaken
        self._estimate = estimate
        self._all: OrderedDict[int, Sequence] = OrderedDict()  # by arrival number
        self._overtakers: list[int] = []
        """Arrival numbers of admitted sequences that came after the head, ascending."""
        self._estimates: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._rotation: deque[int] = deque()
        self._keys: list[tuple[bytes, int]] = []
        self._key_of: dict[int, bytes] = {}
        self._cursor: tuple[bytes, int] = (b"", -1)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def add(self, sequence: Sequence) -> None:
        number = sequence.number
        self._all[number] = sequence
        if self._policy == "lpm":
            self._rotation.append(number)
            self._set_estimate(number, self._estimate(sequence))
        elif self._policy == "dfs":
            key = _depth_first_key(sequence)
            self._key_of[number] = key
            insort(self._keys, (key, number))

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

    def peek(self) -> Sequence | None:
        """Who is to be admitted next."""
        if not self._all:
            return None
        head = next(iter(self._all.values()))
        if self._policy == "fcfs" or len(self._overtakers) >= self._max_overtaken:
            return head
        if self._policy == "dfs":
            at = bisect_left(self._keys, self._cursor)
            return self._all[self._keys[at % len(self._keys)][1]]
        return self._longest() or head

    def take(self, sequence: Sequence) -> None:
        """`sequence` is admitted."""
        number = sequence.number
        head = next(iter(self._all))
        if number != head:
            insort(self._overtakers, number)
        if self._policy == "dfs":
            self._cursor = (self._key_of[number], number)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """`sequence` leaves the queue, admitted or not."""
        number = sequence.number
        del self._all[number]
        self._estimates.pop(number, None)
        key = self._key_of.pop(number, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, (key, number))]
        if not self._all:
            self._overtakers.clear()
            self._heap.clear()
            self._rotation.clear()
            return
        head = next(iter(self._all))
        if head > number:  # the head left: those between it and the new head overtook nobody
            del self._overtakers[: bisect_left(self._overtakers, head)]

    # ------------------------------------------------------------ longest prefix

    def _set_estimate(self, number: int, estimate: int) -> None:
        if self._estimates.get(number) != estimate:
            self._estimates[number] = estimate
            heapq.heappush(self._heap, (-estimate, number))
            if len(self._heap) > 4 * len(self._all) + 1024:
                self._heap = [(-value, key) for key, value in self._estimates.items()]
                heapq.heapify(self._heap)

    def _longest(self) -> Sequence | None:
        """The sequence with the best estimate, renewed; after some tries the best known one."""
        best = None
        for _ in range(_RETRIES):
            while self._heap and self._estimates.get(self._heap[0][1]) != -self._heap[0][0]:
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


def _depth_first_key(sequence: Sequence) -> bytes:
    """Bytes whose order is that of the prompts, token by token, within each namespace."""
    tokens = sequence.tokens[: min(sequence.length, _KEY_TOKENS)]
    return sequence.request.namespace.encode() + b"\0" + tokens.astype(">i4").tobytes()
