"""TCP connections of programs, with bounds that ZeroMQ lacks.

ZeroMQ bounds the size of a frame, but not the number of a message's frames or of connections.
ZeroMQ keeps frames until the message's last one has come. Its monitor reveals descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from rootlace.runtime import processes
from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.server_state import RareLog
from rootlace.wire.sockets import MessageReader

log = logging.getLogger(__name__)

SPARE = 64
"""Connections allowed beyond the most clients, so that a refused client hears why."""
UNKNOWN_BYTES = 2 * 2**20
"""Most bytes of an unfinished message from a peer without a session: a hello is smaller."""
SLACK_BYTES = 2**20
"""Bytes that encryption and frame headers may add to a message."""
MESSAGES = 16
"""Most unfinished messages of the largest size, of all peers together."""

_EVENT = struct.Struct("=HI")
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info` (linux/tcp.h)."""
_INFO_BYTES = 256
_NOWHERE = struct.pack("=H14x", socket.AF_UNSPEC)
"""Address that disconnects a socket which connects to it: connect(2)."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


@dataclass
class _Peer:
    """Peer on a connection. `known`: its last `identity` has a session. `strange`: seconds without
    a session. `heard`: a whole message came since the last look. `whole`: bytes received by the
    last look with a whole message."""

    name: object = None
    identity: bytes = b""
    known: bool = False
    heard: bool = False
    whole: int = 0
    received: int = 0
    strange: float = 0.0

    @property
    def unfinished(self) -> int:
        """Lower bound on the bytes of an unfinished message."""
        return self.received - self.whole


class ProgramPeers:
    """Peers of one bound socket. Ends connections with more bytes of a message than a message may
    have, or without a session for `client_timeout`. Beyond `SPARE` more than the most clients, or a
    quarter of all descriptors, the oldest connection without a session ends."""

    def __init__(
        self,
        bound: zmq.Socket[bytes],
        port: int,
        config: GatewayConfig,
        has_session: Callable[[bytes], bool],
    ) -> None:
        self._port = port
        self._max_peers = min(config.max_connections + SPARE, processes.descriptors() // 4)
        self._message_bytes = config.max_message_bytes
        self._patience = config.client_timeout
        self._has_session = has_session
        self._peers: dict[int, _Peer] = {}
        self._before: dict[int, bytes] = {}
        """Identity of the last connection that had a descriptor and is gone: its messages may still
        come."""
        self._rare = RareLog(log)
        self._bound = bound
        # If events are not read, ZeroMQ blocks within one once the queue is full, and
        # `disable_monitor` waits for it. 0 means no bound here.
        events = f"inproc://program-peers-{id(bound)}"
        bound.monitor(events, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = bound.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(events)
        self._reader = MessageReader(self._monitor, self._note)

    def heard(self, descriptor: int, identity: bytes) -> None:
        """Note that a whole message from a connection was handled."""
        if descriptor not in self._peers:
            # The connection's acceptance was reported before, but perhaps not read yet.
            with contextlib.suppress(zmq.Again):
                while True:
                    self._note(self._monitor.recv_multipart(zmq.NOBLOCK))
        peer = self._peers.get(descriptor)
        if peer is None:  # the peer has gone since
            return
        # ZeroMQ gives no identity twice, but a client with an identity of its own may come back.
        if identity[:1] == b"\0" and identity == self._before.get(descriptor):
            return
        peer.heard, peer.identity, peer.known = True, identity, self._has_session(identity)

    def look(self, seconds: float) -> None:
        """Check all peers; the last check was `seconds` ago. Ends early without a descriptor to
        check with."""
        for descriptor in list(self._peers):
            try:
                connection, name = self._open(descriptor)
                with connection:
                    peer = self._update(descriptor, connection, name, seconds)
                    if (reason := self._fault(peer)) is not None:
                        self._end(descriptor, connection, reason)
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    return
                self._forget(descriptor)
        unfinished = sum(peer.unfinished for peer in self._peers.values())
        while unfinished > MESSAGES * self._message_bytes:
            largest = max(self._peers, key=lambda one: self._peers[one].unfinished)
            unfinished -= self._peers[largest].unfinished
            if not self._end_at(largest, "it has sent most of all that is not whole"):
                return

    def close(self) -> None:
        """Stop watching; called before the socket is closed."""
        self._reader.close()
        self._bound.disable_monitor()
        self._monitor.close()

    def _note(self, frames: list[bytes]) -> None:
        kind, descriptor = _EVENT.unpack(frames[0])
        self._forget(descriptor)  # the descriptor's last peer is gone
        if kind == zmq.EVENT_DISCONNECTED:
            return
        self._peers[descriptor] = _Peer()
        if len(self._peers) > self._max_peers:
            oldest = next(at for at, peer in self._peers.items() if not peer.known)
            self._end_at(oldest, f"there are {len(self._peers)} connections")

    def _update(
        self, descriptor: int, connection: socket.socket, name: object, seconds: float
    ) -> _Peer:
        peer = self._peers[descriptor]
        if peer.name not in (None, name):  # the descriptor is another connection's now
            self._forget(descriptor)
            peer = self._peers[descriptor] = _Peer()
        peer.name = name
        peer.known = self._has_session(peer.identity)
        peer.strange = 0.0 if peer.known else peer.strange + seconds
        peer.received = _received(connection)
        if peer.heard:
            peer.whole, peer.heard = peer.received, False
        return peer

    def _fault(self, peer: _Peer) -> str | None:
        limit = 2 * self._message_bytes + SLACK_BYTES if peer.known else UNKNOWN_BYTES
        if peer.unfinished > limit:
            return f"{peer.unfinished} bytes have come of a message that is not whole"
        if peer.strange > self._patience:
            return f"it has had no session for {peer.strange:.0f} s"
        return None

    def _end_at(self, descriptor: int, reason: str) -> bool:
        """End a connection; return False if no descriptor is left for it."""
        try:
            connection, _ = self._open(descriptor)
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                return False
            self._forget(descriptor)
            return True
        with connection:
            self._end(descriptor, connection, reason)
        return True

    def _end(self, descriptor: int, connection: socket.socket, reason: str) -> None:
        """End a connection; ZeroMQ then finds it closed, and frees its messages."""
        self._rare.warn("a connection of a program is closed: %s", reason)
        self._forget(descriptor)
        _abort(connection)

    def _forget(self, descriptor: int) -> None:
        peer = self._peers.pop(descriptor, None)
        if peer is not None and peer.identity:
            self._before[descriptor] = peer.identity

    def _open(self, descriptor: int) -> tuple[socket.socket, object]:
        """Duplicate a descriptor of ZeroMQ's, and return the connection and its peer's name. Raises
        OSError if it is not a connection any more, or if no descriptor is left."""
        copy = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise
        try:
            name = connection.getpeername()
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not inet or connection.getsockname()[1] != self._port:
                raise OSError(errno.ENOTCONN, "no connection of this socket")
        except OSError:
            connection.close()
            raise
        return connection, name


def _abort(connection: socket.socket) -> None:
    """End a connection at once. After a mere `shutdown`, ZeroMQ would read on while bytes come."""
    if sys.platform == "linux":
        ctypes.CDLL(None).connect(connection.fileno(), _NOWHERE, len(_NOWHERE))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _received(connection: socket.socket) -> int:
    """Return the bytes received in all; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _RECEIVED_AT + _RECEIVED.size:
        return 0
    return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
