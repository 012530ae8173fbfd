"""The gateway's ends of the two pipes to one engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq

from rootlace.runtime.contracts.messages import FromEngine, ToEngine, decode_from_engine, encode
from rootlace.wire.sockets import MessageReader

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.001


class Pipes:
    """Sends messages and hears those that come, on the event loop that it was made on.

    All messages of one turn of the event loop leave as one frame.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        to_engine: str,
        from_engine: str,
        on_message: Callable[[FromEngine], None],
    ) -> None:
        """Binds the two addresses. What `on_message` raises is logged."""
        self._push, self._pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            # Nothing is dropped between the two: admission bounds what can be under way.
            socket.set_hwm(0)
            socket.linger = 0
        self._push.bind(to_engine)
        self._pull.bind(from_engine)
        self._on_message = on_message
        self._reader = MessageReader(self._pull, self._take)
        self._outgoing: list[ToEngine] = []
        self._flush_scheduled = False
        self._closed = False

    def send(self, message: ToEngine) -> None:
        """Queue a message. Does nothing once closed."""
        self._outgoing.append(message)
        if not self._flush_scheduled and not self._closed:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def send_now(self, message: ToEngine) -> None:
        """Send a message ahead of those queued; it is lost if the engine's end is not there."""
        with contextlib.suppress(zmq.ZMQError):
            self._push.send(encode([message]), zmq.NOBLOCK)

    def close(self) -> None:
        """Idempotent. What is queued is lost."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._push.close()
        self._pull.close()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._closed:
            return
        try:
            # Without a high-water mark this fails only while the engine's end is not there yet.
            self._push.send(encode(self._outgoing), zmq.NOBLOCK)
        except zmq.Again:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
            return
        self._outgoing = []

    def _take(self, frames: list[bytes]) -> None:
        for message in decode_from_engine(frames[0]):
            try:
                self._on_message(message)
            except Exception:
                log.exception("handling %s failed", type(message).__name__)
