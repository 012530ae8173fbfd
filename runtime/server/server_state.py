"""What all models of a server share, and how much work at once leaves others their part.

Sections: drain, house, shares, rare log, time, large.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec, TypeVar

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import Keys
from rootlace.runtime.server.telemetry import Metrics, Spans
from rootlace.wire.errors import DeadlineExceeded, ServerUnavailable


def nothing(*_: object) -> None:
    """Called in the place of what would be told."""


# Drain --------------------------------------------------------------------------------------------
#
# The end of a server that lets what is running end first.


_LOOK_SECONDS = 0.02


class Drain:
    """Whether new work is refused, and how many HTTP requests are being answered."""

    def __init__(self) -> None:
        self.begun = False
        self.requests = 0

    def refusal(self) -> ServerUnavailable:
        """What new work fails with once the drain has begun."""
        return ServerUnavailable("the server is stopping and takes no new work")

    @contextmanager
    def request(self) -> Iterator[None]:
        """While the block runs, an HTTP request is being answered. Raises `refusal`."""
        if self.begun:
            raise self.refusal()
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    async def run(self, busy: Callable[[], bool], seconds: float, stop: asyncio.Event) -> None:
        """Refuse new work, and wait until no request is left and nothing else is `busy`, until
        `seconds` are over, or until `stop` is set."""
        self.begun = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (self.requests or busy()) and loop.time() < end and not stop.is_set():
            await asyncio.sleep(_LOOK_SECONDS)


# House --------------------------------------------------------------------------------------------


class ServerState:
    """`metrics` are those of requests and keys; each model has its own of what it computes."""

    def __init__(self, config: GatewayConfig) -> None:
        self.metrics = Metrics()
        self.keys = Keys(config.api_key, config.keys_file, self.metrics.key_used)
        self.drain = Drain()
        self.spans = Spans.to(config.otlp)


# Shares -------------------------------------------------------------------------------------------
#
# How what is bounded for all is shared by those who take of it.


def kept_for_others(own: int, owners: int, taken: int, most: int, more: int = 1) -> bool:
    """Whether `more` for one that has `own` would be of the last eighth of `most`, which is for
    those that have less than the mean. Of all, `taken` are taken, by `owners`; whether there are
    `more` left at all is not asked."""
    return taken + more > plenty(most) and own * max(owners, 1) >= taken


def plenty(most: int) -> int:
    """As long as no more are taken, `kept_for_others` need not be asked."""
    return most - most // 8


# Rare log -----------------------------------------------------------------------------------------


SECONDS = 60.0


class RareLog:
    """Logs one line a minute at most, with how often there was something to say."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next = 0.0
        self._times = 0

    def warn(self, text: str, *values: object) -> None:
        self._times += 1
        now = time.monotonic()
        if now >= self._next:
            said = f"{text} (%d times since this was last said)"
            self._log.warning(said, *values, self._times)
            self._next, self._times = now + SECONDS, 0


# Time ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_time(seconds: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded where the block takes longer; None: it may take any time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if seconds is None or not limit.expired():
            raise
        raise DeadlineExceeded.after(seconds) from None


# Large --------------------------------------------------------------------------------------------
#
# Much work at once, for which no other client should have to wait: done elsewhere, or in parts.


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
        self._waiting = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for a turn that has time left, one task after another: of thousands that wait, one
        is woken in a turn."""
        async with self._waiting:
            while self.over:
                await self.next()

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
