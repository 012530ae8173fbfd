"""The product's connection without its thread, in the world's event loop."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import zmq

from rootlace.client.connection import Connection, Line
from rootlace.wire.errors import RootlaceError, ServerUnavailable
from rootlace.wire.protocol import Event, Failed, Op


@dataclass(eq=False)
class Sent:
    """Operation with all its received events.

    `life`: number of the client's connection; `socket`: the connection's descriptor; `lost`:
    whether the connection was lost at the operation's end.
    """

    op: Op
    at: float
    life: int
    socket: int
    events: list[Event] = field(default_factory=list)
    ended: float | None = None
    lost: bool = False

    @property
    def end(self) -> Event | None:
        """The terminal event."""
        return self.events[-1] if self.ended is not None else None

    @property
    def failure(self) -> Failed | None:
        end = self.end
        return end if isinstance(end, Failed) else None


class SimulatedConnection(Connection):
    """A connection: `begin` connects; `task` is done when the connection has ended."""

    task: asyncio.Task[None]
    descriptor: Any = -1
    """Descriptor of the socket."""

    @classmethod
    def begin(cls, address: str, loop: asyncio.AbstractEventLoop) -> SimulatedConnection:
        with patch("asyncio.SelectorEventLoop", lambda: loop):
            return cls(address)

    def _connect(self, timeout: float) -> None:
        self._thread = threading.current_thread()
        self.task = self._loop.create_task(self._live())
        self._deadline = self._loop.call_later(timeout, self._give_up, timeout)

    async def _write_when_welcome(self, line: Line) -> None:
        self.descriptor = line._socket.get(zmq.FD)
        await super()._write_when_welcome(line)

    def _give_up(self, timeout: float) -> None:
        if not self._started.is_set():
            self._lose(ServerUnavailable(f"{self.address} did not answer in {timeout:g} s"))

    @property
    def lost(self) -> RootlaceError | None:
        return self._lost

    def vanish(self) -> None:
        """Kill the client's process."""
        self.task.cancel()

    async def settled(self) -> None:
        """Wait until the connection is welcome, or lost."""
        while self._lost is None and not self._started.is_set():
            await asyncio.sleep(0.001)
        self._deadline.cancel()
