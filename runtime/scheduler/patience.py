"""How much later requests may delay an earlier one."""

from __future__ import annotations

from bisect import bisect_left, insort

COMPUTED, CACHED = 8, 1
"""Work of a token: one that is cached has its price too, since it takes room and is attended to."""


def work_of(length: int, cached: int) -> int:
    """Of a request with so many tokens, so many of them cached."""
    return COMPUTED * (length - cached) + CACHED * cached


class Patience:
    """Whether the first of those who wait has been overtaken enough.

    A request may be overtaken by `max_overtaken` later ones. It may be overtaken by more as long as
    their work is less than `max_delay` times the work that was waiting before it when it came. So
    they may be many where they are cheap, their prefixes being cached, and nobody waits much longer
    than in order of arrival.

    Of two that wait the earlier one has been overtaken by all who overtook the later one. So only
    the first is watched, and what is said of a request holds, up to one overtaker, with its own
    bounds or those of one that was waiting when it came.
    """

    def __init__(self, max_overtaken: int, max_delay: float) -> None:
        self._max_overtaken = max_overtaken
        self._max_delay = max_delay
        self._work: dict[int, int] = {}
        self._allowed: dict[int, float] = {}
        self._waiting = 0
        """Work of all who wait."""
        self._overtakers: list[int] = []
        """Numbers of admitted requests that came after the first, ascending."""
        self._delays: dict[int, int] = {}
        self._delay = 0

    def arrives(self, number: int, work: int) -> None:
        """Numbers ascend."""
        self._allowed[number] = self._max_delay * self._waiting
        self._work[number] = work
        self._waiting += work

    def renew(self, number: int, work: int) -> None:
        """The work of a request that waits is another now."""
        self._waiting += work - self._work[number]
        self._work[number] = work

    def overtakes(self, number: int) -> None:
        """A request that is not the first is admitted; it `leaves` next."""
        work = self._work[number]
        insort(self._overtakers, number)
        self._delays[number] = work
        self._delay += work

    def leaves(self, number: int, first: int | None) -> None:
        """A request waits no more; `first` is the first of those who do."""
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
