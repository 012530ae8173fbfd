"""Questions to the engine that wait for an answer: flush, statistics."""

from __future__ import annotations

import asyncio
from typing import Any

from rootlace.wire.errors import ServerUnavailable


class EngineDied(ServerUnavailable):
    """Who was asked died; the next one may answer."""


class Questions:
    """Tickets, and who waits for the answer that carries them."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._settled = asyncio.Event()
        """Whether there is an engine, or will not be one any more."""
        self._gone: ServerUnavailable | None = None

    def resume(self) -> None:
        """There is an engine."""
        self._gone = None
        self._settled.set()

    async def until_up(self, patience: float) -> None:
        """Wait for the next engine, as requests do. Raises ServerUnavailable if there is none in
        so many seconds."""
        try:
            await asyncio.wait_for(self._settled.wait(), patience)
        except TimeoutError:
            raise ServerUnavailable("the engine is not running") from None
        if self._gone is not None:
            raise self._gone

    def open(self) -> int:
        """A new ticket."""
        self._last += 1
        self._open[self._last] = asyncio.get_running_loop().create_future()
        return self._last

    async def answer_to(self, ticket: int, patience: float | None) -> Any:
        """Raises ServerUnavailable if there is none within `patience` seconds, or if nobody will
        answer."""
        try:
            return await asyncio.wait_for(self._open[ticket], patience)
        except TimeoutError:
            raise ServerUnavailable(f"the engine has not answered for {patience:g} s") from None
        finally:
            self._open.pop(ticket, None)

    def answer(self, ticket: int, value: Any) -> None:
        future = self._open.get(ticket)
        if future is not None and not future.done():
            future.set_result(value)

    def fail(self, error: ServerUnavailable, for_good: bool = False) -> None:
        """Nobody will answer; `for_good`: nor will another engine."""
        self._settled.clear()
        if for_good:
            self._gone = error
            self._settled.set()
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
