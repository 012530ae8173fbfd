"""The two pipes between a gateway and an engine on another machine: TCP, encrypted (CURVE)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from rootlace.runtime import curve
from rootlace.runtime.contracts.messages import decode_to_engine
from rootlace.runtime.engine.client.pipes import Pipes, new_sockets
from rootlace.wire.sockets import MessageReader

_LOOK_SECONDS = 0.02
CONNECT_SECONDS = 20.0
"""The other end has so long to come."""


class LineAddress(msgspec.Struct, frozen=True):
    """What the other end needs in order to connect, and nobody else may know."""

    to_engine: str
    from_engine: str
    public_key: bytes


class Line:
    """One end. `on_lost` is called if the other end does not come, or is gone."""

    def __init__(self, push: zmq.Socket[bytes], pipes: Pipes, on_lost: Callable[[], None]) -> None:
        self.pipes = pipes
        self._push = push
        self._on_lost = on_lost
        self.there = self._closed = False
        self._monitor: Any = push.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._reader = MessageReader(self._monitor, self._hear)
        asyncio.get_running_loop().call_later(CONNECT_SECONDS, self._look)

    @classmethod
    def open(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> tuple[Line, LineAddress]:
        """The gateway's end, at two free ports of the interface `host`."""
        public, secret = zmq.curve_keypair()
        push, pull = new_sockets(context)
        there, back = (curve.bind(socket, host, secret) for socket in (push, pull))
        return cls(push, Pipes(push, pull, on_message), on_lost), LineAddress(there, back, public)

    @classmethod
    def connect(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: LineAddress,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> Line:
        """The engine's end."""
        push, pull = new_sockets(context)
        for socket, target in ((push, address.from_engine), (pull, address.to_engine)):
            socket.setsockopt(zmq.IMMEDIATE, 1)
            curve.connect(socket, target, address.public_key)
        return cls(push, Pipes(push, pull, on_message, decode_to_engine), on_lost)

    def close(self, linger: int = 0) -> None:
        """Idempotent. What is under way has so many milliseconds to arrive."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._push.disable_monitor()
            self._monitor.close()
            self._push.linger = linger
            self.pipes.close()

    def _hear(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.there = True  # nobody else knows the key
        elif self.there:
            # The socket itself hears of it a little later than its monitor.
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """A stranger that knocks at the port comes and goes, too: what counts is whether there is
        somebody to send to."""
        if not self._closed and not self._push.get(zmq.EVENTS) & zmq.POLLOUT:  # type: ignore[operator,arg-type]
            self.there = False
            self._on_lost()
