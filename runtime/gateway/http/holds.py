"""Branches of requests that have ended, which stay in the cache for others to go on from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

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
        self._held: dict[ExitStack, int] = {}
        """What lets each go, and its tokens."""
        self._tokens = 0

    def add(self, session: Session, tokens: int) -> Callable[[], None]:
        """Hold a session that has so many `tokens` for itself. What this returns closes it, and
        keeps nothing in memory once it is closed: neither the session nor its model."""
        held = ExitStack()
        seconds = self._gateway.config.hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, held.close)
        for let_go in (session.close, timer.cancel):
            held.callback(let_go)
        held.callback(self._forget, held)
        self._held[held] = tokens
        self._tokens += tokens
        most = self._gateway.model_info.capacity_tokens // _PART_OF_CACHE
        while self._held and (len(self._held) > MAX_HELD or self._tokens > most):
            next(iter(self._held)).close()
        return held.close

    def _forget(self, held: ExitStack) -> None:
        self._tokens -= self._held.pop(held)
