"""State shared by all models of a server, and bounds that leave other clients their share.

Sections: drain, server state, shares, rare log, time, large.
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
    """Do nothing: a callback where nobody wants to be called."""


# Drain --------------------------------------------------------------------------------------------
#
# Drain: a stopping server lets running work end first.


_LOOK_SECONDS = 0.02


class Drain:
    """State of the drain: whether new work is refused, and how many HTTP requests run."""

    def __init__(self) -> None:
        self.begun = False
        self.requests = 0

    def refusal(self) -> ServerUnavailable:
        """Return the error of new work once the drain has begun."""
        return ServerUnavailable("the server is stopping and takes no new work")

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count an HTTP request while the block runs. Raises `refusal` once the drain has begun."""
        if self.begun:
            raise self.refusal()
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    async def run(self, busy: Callable[[], bool], seconds: float, stop: asyncio.Event) -> None:
        """Refuse new work, and wait until no request runs and `busy` is false. Ends early after
        `seconds`, or once `stop` is set."""
        self.begun = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (self.requests or busy()) and loop.time() < end and not stop.is_set():
            await asyncio.sleep(_LOOK_SECONDS)


# Server state -------------------------------------------------------------------------------------


class ServerState:
    """Keys, drain, spans and request metrics of all models; each model has further metrics.

    Programs connect to `program_address`, once that is known.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.metrics = Metrics()
        self.keys = Keys(config.api_key, config.keys_file, self.metrics.key_used)
        self.drain = Drain()
        self.spans = Spans.to(config.otlp)
        self.program_address: str | None = None


# Shares -------------------------------------------------------------------------------------------
#
# Fair shares of a bounded resource.


def kept_for_others(own: int, owners: int, taken: int, limit: int, more: int = 1) -> bool:
    """Return whether `more` for an owner with `own` would come from the last eighth of `limit`, for
    owners below the mean. All `owners` together hold `taken`. Does not check the bound: `taken +
    more` may exceed `limit`."""
    return taken + more > plenty(limit) and own * max(owners, 1) >= taken


def plenty(limit: int) -> int:
    """Return the number up to which `kept_for_others` is false for everybody."""
    return limit - limit // 8


# Rare log -----------------------------------------------------------------------------------------


SECONDS = 60.0


class RareLog:
    """Logger of at most one line a minute, with the number of calls since the last line."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next = 0.0
        self._times = 0

    def warn(self, text: str, *values: object) -> None:
        self._times += 1
        now = time.monotonic()
        if now >= self._next:
            counted = f"{text} (%d times since this was last said)"
            self._log.warning(counted, *values, self._times)
            self._next, self._times = now + SECONDS, 0


# Time ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_time(seconds: float | None) -> AsyncIterator[None]:
    """Raise DeadlineExceeded where the block takes longer than `seconds`; None: no bound."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if seconds is None or not limit.expired():
            raise
        raise DeadlineExceeded.after(seconds) from None


# Large --------------------------------------------------------------------------------------------
#
# Large work, so that no other client waits: run in a thread, or in parts.


T = TypeVar("T")
P = ParamSpec("P")

INLINE_ROWS = 2048
"""Most rows handled in place: at one or two microseconds a row, more cost more than a thread."""
TURN_SECONDS = 0.005
"""Time after which work of many small pieces gives others a turn of the event loop."""


async def call_for(rows: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `call`, which works on `rows` rows: here if they are few, else in a thread."""
    if rows <= INLINE_ROWS:
        return call(*args, **kwargs)
    return await asyncio.to_thread(call, *args, **kwargs)


class Turn:
    """Turn of the event loop for work of many small pieces."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + TURN_SECONDS
        self._waiting = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for a turn with time left, one task after another: of thousands of waiting tasks,
        one wakes per turn."""
        async with self._waiting:
            while self.over:
                await self.next()

    @property
    def over(self) -> bool:
        """Return whether the time of this turn has passed."""
        return self._clock() >= self._end

    def next(self) -> asyncio.Future[None]:
        """Return a future that is done in the loop's next turn, which becomes the current one."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        loop.call_soon(self._begin, turn)
        return turn

    def _begin(self, turn: asyncio.Future[None]) -> None:
        self._end = self._clock() + TURN_SECONDS
        if not turn.done():
            turn.set_result(None)
