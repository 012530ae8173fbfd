"""ZeroMQ: sockets read in an asyncio event loop without a future per message, and encrypted TCP.

`zmq.asyncio` makes futures for each message and wakes tasks that await them. These cost several
times as much as reading the message, and a model's steps send thousands of messages a minute.

TCP between a runtime's processes on several machines is encrypted (CURVE). The server tells an
address and its public key only to the process that is meant to connect.

Sections: reader, pipes, encrypted TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import zmq

# Reader -------------------------------------------------------------------------------------------


BURST = 16
"""Messages read before the event loop may do other work."""


class MessageReader:
    """Reader of a socket: calls `take` with each message's frames, in the loop that made the
    reader.

    The socket's descriptor signals a change only once, and any call on the socket may use that
    signal up. So senders on the socket call `look` afterwards. `take` may close the reader.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], take: Callable[[list[Any]], object], copy: bool = True
    ) -> None:
        """Without `copy`, frames are `zmq.Frame`s, which know their sender."""
        self._socket = socket
        self._take = take
        self._copy = copy
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = socket.get(zmq.FD)  # type: ignore[assignment]
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)
        self._schedule()  # earlier messages are not signalled

    def look(self) -> None:
        """Read soon if a message has come."""
        if not self._scheduled:
            events = self._socket.get(zmq.EVENTS)
            if events & zmq.POLLIN:  # type: ignore[operator,arg-type]
                self._schedule()

    def close(self) -> None:
        """Stop reading; called before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(BURST):
            if self._closed:
                return
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK, self._copy)
            except zmq.Again:
                return
            try:
                self._take(message)
            except BaseException:
                # The descriptor may not signal the messages behind this one again.
                if not self._closed:
                    self._schedule()
                raise
        if not self._closed:
            self._schedule()


# Pipes --------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

RETRY_SECONDS = 0.001


class Pipes:
    """Two sockets that send and receive messages on the event loop that made this object.

    `encode` and `decode` define the frames. All messages of one turn of the event loop leave as one
    frame.
    """

    def __init__(
        self,
        push: zmq.Socket[bytes],
        pull: zmq.Socket[bytes],
        on_message: Callable[[Any], None],
        encode: Callable[[list[Any]], bytes],
        decode: Callable[[bytes], Iterable[Any]],
    ) -> None:
        """Own and close two sockets; exceptions of `on_message` are logged."""
        self._push, self._pull = push, pull
        self.on_message = on_message
        self._encode, self._decode = encode, decode
        self._reader = MessageReader(self._pull, self._take)
        self._outgoing: list[Any] = []
        self._flush_scheduled = False
        self._closed = False

    def send(self, message: Any) -> None:
        """Queue a message; does nothing once closed."""
        self._outgoing.append(message)
        if not self._flush_scheduled and not self._closed:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def send_now(self, message: Any) -> None:
        """Send a message ahead of queued ones; lost if the other end is missing."""
        with contextlib.suppress(zmq.ZMQError):
            self._push.send(self._encode([message]), zmq.NOBLOCK)

    def close(self) -> None:
        """Close and drop queued messages. Idempotent."""
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
            # Without a high-water mark this fails only while the other end is not there yet.
            self._push.send(self._encode(self._outgoing), zmq.NOBLOCK)
        except zmq.Again:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
            return
        self._outgoing = []

    def _take(self, frames: list[bytes]) -> None:
        for message in self._decode(frames[0]):
            try:
                self.on_message(message)
            except Exception:
                log.exception("handling %s failed", type(message).__name__)


def new_pair(
    context: zmq.Context[zmq.Socket[bytes]],
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Make a socket to push with, and one to pull with."""
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        # Nothing is dropped between the two: admission bounds the messages in flight.
        socket.set_hwm(0)
        socket.linger = 0
    return push, pull


# Encrypted TCP ------------------------------------------------------------------------------------


HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000
"""Silence after which a machine that vanished without a word is given up."""


def bind(socket: zmq.Socket[Any], host: str, secret: bytes) -> str:
    """Bind to a free port of the interface `host`; return the address. Raises ZMQError."""
    socket.curve_server = True
    socket.curve_secretkey = secret
    _set_heartbeat(socket)
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: zmq.Socket[Any], address: str, public_key: bytes) -> None:
    """Connect once: messages lost with a connection must not go to a later peer."""
    socket.curve_serverkey = public_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    _set_heartbeat(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.connect(address)


def _set_heartbeat(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
