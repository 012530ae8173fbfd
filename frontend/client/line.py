"""The socket of a connection: frames out, frames in, and word of a cut."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Self

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from rootlace.client.channel import Counters
from rootlace.wire import protocol
from rootlace.wire.errors import ProtocolError, RootlaceError, ServerUnavailable
from rootlace.wire.sockets import MessageReader


class Line:
    """A ZeroMQ DEALER in the running event loop; entering the block connects it to `address`.

    What stands behind `#` there is the server's public key (CURVE, hexadecimal): what is said is
    encrypted then, and nobody else can answer in the server's place.

    `receive` gets the events of each frame that comes, `lose` why no more of them will come.
    """

    def __init__(
        self,
        address: str,
        counters: Counters,
        receive: Callable[[list[protocol.Event]], None],
        lose: Callable[[RootlaceError], None],
    ) -> None:
        self.last_heard = 0.0
        self._address, _, key = address.partition("#")
        self._counters = counters
        self._receive = receive
        self._lose = lose
        # Frames from before the peers have greeted each other. ZeroMQ never lets go of a socket
        # that has some, and whose greeting was refused.
        self._unsent: list[bytes] | None = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, "[" in address)
        # A gateway forgets a peer's branches when the peer goes: there is nothing to reconnect to.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = z85.encode(bytes.fromhex(key))
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._reader = MessageReader(socket, self._take)
        self._watcher = MessageReader(monitor, self._changed)

    def __enter__(self) -> Self:
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._lose(ServerUnavailable(f"cannot connect to {self._address}: {error}"))
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
        self._watcher.close()
        self._context.destroy(linger=500)

    def send(self, ops: list[msgspec.Raw]) -> None:
        """Send one frame."""
        self._counters.messages_sent += 1
        self._counters.ops_sent += len(ops)
        # Without a high-water mark, only a line that is cut makes it wait, and `_changed` is told.
        frame = protocol.encode(ops)
        if self._unsent is not None:
            self._unsent.append(frame)
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
        self._reader.look()

    def _take(self, frames: list[bytes]) -> None:
        self._counters.messages_received += 1
        self.last_heard = time.monotonic()
        try:
            events = protocol.decode_events(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"{self._address} sent what cannot be decoded: {error}"
            self._lose(ProtocolError(reason))
            return
        self._receive(events)

    def _changed(self, frames: list[bytes]) -> None:
        """The peers greeted each other, or one is gone."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            unsent, self._unsent = self._unsent or [], None
            for frame in unsent:
                self._socket.send(frame)
            self._reader.look()
            return
        if event not in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            reason = (
                f"what answers at {self._address} is not a runtime's socket for programs, or does"
                " not encrypt with the same key: the server names its address with its key behind #"
            )
        elif self.last_heard:
            reason = f"the runtime at {self._address} is gone"
        else:
            reason = f"cannot connect to {self._address}: nobody answers there"
        self._lose(ServerUnavailable(reason))
