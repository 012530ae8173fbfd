"""The queue of requests of one priority that were not admitted yet, and in which order they are."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice

from rootlace.runtime.cache.tree import common_prefix
from rootlace.runtime.config import Policy
from rootlace.runtime.scheduler.patience import Patience, work_of
from rootlace.runtime.scheduler.prompt_order import PromptOrder
from rootlace.runtime.scheduler.sequence import Sequence

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
        estimate: Callable[[Sequence], int],
    ) -> None:
        self._policy = policy
        self._estimate = estimate
        self._all: OrderedDict[int, Sequence] = OrderedDict()  # by arrival number
        self._patience = Patience(max_overtaken, max_delay)
        self._prompts = PromptOrder()
        self._estimates: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._rotation: deque[int] = deque()
        self._aside: set[int] = set()
        """Numbers of those who are not offered now."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    @property
    def first(self) -> Sequence | None:
        """The one that came first."""
        return next(iter(self._all.values()), None)

    def ahead(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those that are surely admitted before `sequence`, were it added now: all, unless it may
        overtake them."""
        if self._policy == "fcfs":
            yield from self
        elif self._policy == "lpm":
            mine = self._estimate(sequence)
            for number, other in self._all.items():
                if self._estimates[number] >= mine:
                    yield other

    def add(self, sequence: Sequence) -> None:
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

    def computed(self, sequence: Sequence) -> None:
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

    def peek(self) -> Sequence | None:
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

    def set_aside(self, sequence: Sequence) -> None:
        """Offer others until `bring_back`."""
        self._aside.add(sequence.number)

    def bring_back(self, sequence: Sequence) -> None:
        """A sequence that was set aside may be offered again."""
        number = sequence.number
        self._aside.discard(number)
        if number in self._estimates:
            heapq.heappush(self._heap, (-self._estimates[number], number))

    def take(self, sequence: Sequence) -> None:
        """`sequence` is admitted."""
        number = sequence.number
        if self._policy == "dfs":
            self._prompts.go_to(number)
            self._patience.renew(number, work_of(sequence.length, self._estimate(sequence)))
        # In order of arrival nobody is overtaken, but by a request that is computed alone.
        if self._policy != "fcfs" and number != next(iter(self._all)):
            self._patience.overtakes(number)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
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

    def _longest(self) -> Sequence | None:
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
