"""One end of the two pipes between a gateway and an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Self

import zmq

from rootlace.runtime.contracts.messages import decode_from_engine, encode
from rootlace.wire.sockets import MessageReader

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.001


class Pipes:
    """Sends messages and hears those that come, on the event loop that it was made on: the
    gateway's end, of `ToEngine` and `FromEngine`, unless another `decode` is given.

    All messages of one turn of the event loop leave as one frame.
    """

    def __init__(
        self,
        push: zmq.Socket[bytes],
        pull: zmq.Socket[bytes],
        on_message: Callable[[Any], None],
        decode: Callable[[bytes], Iterable[Any]] = decode_from_engine,
    ) -> None:
        """Of two sockets, which it closes. What `on_message` raises is logged."""
        self._push, self._pull = push, pull
        self._on_message = on_message
        self._decode = decode
        self._reader = MessageReader(self._pull, self._take)
        self._outgoing: list[Any] = []
        self._flush_scheduled = False
        self._closed = False

    @classmethod
    def bind(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        to_engine: str,
        from_engine: str,
        on_message: Callable[[Any], None],
    ) -> Self:
        """At two addresses of this machine."""
        push, pull = new_sockets(context)
        push.bind(to_engine)
        pull.bind(from_engine)
        return cls(push, pull, on_message)

    def send(self, message: Any) -> None:
        """Queue a message. Does nothing once closed."""
        self._outgoing.append(message)
        if not self._flush_scheduled and not self._closed:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def send_now(self, message: Any) -> None:
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
        for message in self._decode(frames[0]):
            try:
                self._on_message(message)
            except Exception:
                log.exception("handling %s failed", type(message).__name__)


def new_sockets(
    context: zmq.Context[zmq.Socket[bytes]],
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """One to push with, and one to pull with."""
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        # Nothing is dropped between the two: admission bounds what can be under way.
        socket.set_hwm(0)
        socket.linger = 0
    return push, pull
