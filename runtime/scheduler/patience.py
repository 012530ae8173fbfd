"""How much later requests may delay an earlier one."""

from __future__ import annotations

from bisect import bisect_left, insort

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
