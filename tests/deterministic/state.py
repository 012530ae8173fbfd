"""Parts of `--state` in a simulated world: a disk's thread, and a gateway's death."""

from __future__ import annotations

import math
import random
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rootlace.runtime.server.session_store import SessionStore

if TYPE_CHECKING:
    from tests.deterministic.clock import VirtualLoop


class Disk:
    """A disk with the state."""

    full = False

    def commit(
        self,
        commit: Callable[[SessionStore, sqlite3.Connection], None],
        store: SessionStore,
        file: sqlite3.Connection,
    ) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        commit(store, file)


class DiskThread:
    """Stands for a pool of one thread: calls run a little later, in order."""

    def __init__(self, loop: VirtualLoop, dice: random.Random) -> None:
        self._loop = loop
        self._dice = dice
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, call, args))
        self._loop.call_later(self._dice.uniform(1e-3, 2.0), self._next)
        return future

    def shutdown(self) -> None:
        while self._waiting:
            self._next()

    def die(self) -> None:
        self._waiting.clear()

    def _next(self) -> None:
        if not self._waiting:
            return
        future, call, args = self._waiting.popleft()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)


def kill(store: SessionStore) -> None:
    """Kill the store's process: unwritten state is lost, and nothing more is written."""
    thread: Any = store._thread
    thread.die()
    store._retry.at = math.inf
    store._held.close()
