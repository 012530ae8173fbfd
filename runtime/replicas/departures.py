"""Engines that are to end when what they have is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05


class Departures:
    """Lets each go once it holds nothing. Belongs to one event loop."""

    def __init__(
        self,
        down: Callable[[int], None],
        holds: Callable[[int], bool],
        release: Callable[[int], None],
    ) -> None:
        """`down`: have it given nothing new; `release` is called when it `holds` nothing."""
        self._down = down
        self._holds = holds
        self._release = release
        self._waiting: dict[int, asyncio.Task[None]] = {}

    def begin(self, at: int) -> None:
        """This one gets nothing new, and is to go; idempotent."""
        if at not in self._waiting:
            log.warning("replica %d is to leave", at)
            self._down(at)
            self._waiting[at] = asyncio.create_task(self._wait(at))

    def gone(self, at: int) -> None:
        """It has ended, one way or another."""
        if (waiting := self._waiting.pop(at, None)) is not None:
            waiting.cancel()

    def close(self) -> None:
        for at in list(self._waiting):
            self.gone(at)

    async def _wait(self, at: int) -> None:
        while self._holds(at):
            await asyncio.sleep(_LOOK_SECONDS)
        self._release(at)
