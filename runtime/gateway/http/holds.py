"""Branches of requests that have ended, which stay in the cache for others to go on from."""

from __future__ import annotations

import asyncio

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.session import Session

MAX_HELD = 256
_PART_OF_CACHE = 4
"""All that is held is at most one part in so many of what the cache holds."""


class Holds:
    """Keeps sessions of such branches open: a session is a program that still runs, whose path in
    the cache goes last.

    Each is held for `hold_seconds`. The oldest are let go where there would be too many, or where
    they would take too much of the cache. What was let go counts as what requests of no program
    left behind.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._held: dict[Session, tuple[int, asyncio.TimerHandle]] = {}
        self._tokens = 0

    def add(self, session: Session, tokens: int) -> None:
        """Hold a session that has so many `tokens` for itself."""
        seconds = self._gateway.config.hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, self.let_go, session)
        self._held[session] = tokens, timer
        self._tokens += tokens
        most = self._gateway.model_info.capacity_tokens // _PART_OF_CACHE
        while self._held and (len(self._held) > MAX_HELD or self._tokens > most):
            self.let_go(next(iter(self._held)))

    def let_go(self, session: Session | None) -> None:
        """Close the session, if it is held."""
        if session is not None and session in self._held:
            tokens, timer = self._held.pop(session)
            timer.cancel()
            self._tokens -= tokens
            session.close()
