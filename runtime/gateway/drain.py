"""The end of a server that lets what is running end first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rootlace.wire.errors import ServerUnavailable

_LOOK_SECONDS = 0.02


class Drain:
    """Whether new work is refused, and how many HTTP requests are being answered."""

    def __init__(self) -> None:
        self.begun = False
        self.requests = 0

    def check(self) -> None:
        """Raises ServerUnavailable once the drain has begun."""
        if self.begun:
            raise ServerUnavailable("the server is stopping and takes no new work")

    @contextmanager
    def request(self) -> Iterator[None]:
        """While the block runs, an HTTP request is being answered. Raises as `check`."""
        self.check()
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
