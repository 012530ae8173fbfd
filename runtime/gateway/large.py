"""Much work at once, for which no other client should have to wait: done elsewhere, or in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

INLINE_ROWS = 2048
"""Of one or two microseconds each; a thread's round trip costs less than more of them."""
TURN_SECONDS = 0.005
"""Work that is many small pieces lets others have a turn of the event loop after so long."""


async def call_for(rows: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what has so many rows to work on: here if they are few, else in a thread."""
    if rows <= INLINE_ROWS:
        return call(*args, **kwargs)
    return await asyncio.to_thread(call, *args, **kwargs)


class Turn:
    """A turn of the event loop, of work that is many small pieces."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + TURN_SECONDS

    @property
    def over(self) -> bool:
        """Whether others should have theirs."""
        return self._clock() >= self._end

    def next(self) -> asyncio.Future[None]:
        """Done in the next one, which begins then."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        loop.call_soon(self._begin, turn)
        return turn

    def _begin(self, turn: asyncio.Future[None]) -> None:
        self._end = self._clock() + TURN_SECONDS
        if not turn.done():
            turn.set_result(None)
