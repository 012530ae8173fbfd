"""Handing events over, for all sessions in one callback of the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Deliveries:
    """Calls those who have something to deliver, once in a turn of the event loop.

    A step of the engine has events for hundreds of sessions: a callback each would cost as much as
    the events.
    """

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def soon(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` in the next turn; what it raises is logged."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(deliver)

    def _run(self) -> None:
        due, self._due = self._due, []
        for deliver in due:
            try:
                deliver()
            except Exception:
                log.exception("events were not delivered")
