"""The TCP connections of programs, as the system has them.

ZeroMQ bounds a frame, but neither how many frames a message has, all of which it keeps until the
last one has come, nor how many connections there are. It tells their descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from rootlace.runtime.gateway.rare_log import RareLog
from rootlace.wire.sockets import MessageReader

log = logging.getLogger(__name__)

SPARE = 64
"""So many more connections there may be than clients: who is refused hears why."""
UNKNOWN_BYTES = 2 * 2**20
"""What a peer may send that has no session: a hello is smaller."""
SLACK_BYTES = 2**20
"""What encryption and the heads of frames add to a message."""
MESSAGES = 16
"""Unfinished ones of the largest size, of all peers together."""

_EVENT = struct.Struct("=HI")
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128
"""Of `tcpi_bytes_received` in Linux's `struct tcp_info` (linux/tcp.h)."""
_INFO_BYTES = 256
_NOWHERE = struct.pack("=H14x", socket.AF_UNSPEC)
"""Who connects there is disconnected: connect(2)."""


@dataclass
class _Peer:
    """`known`: it has a session, of the last `identity` that it gave; for how many seconds it had
    none, it is `strange`. `whole`: so many bytes had come when it was last looked at with a message
    that was whole, which it has sent since the look before if it was `heard`."""

    name: object = None
    identity: bytes = b""
    known: bool = False
    heard: bool = False
    whole: int = 0
    received: int = 0
    strange: float = 0.0

    @property
    def unfinished(self) -> int:
        """Bytes at least of a message that is not whole."""
        return self.received - self.whole


class ProgramPeers:
    """Those of one bound socket. Ends connections on which more comes of a message than one may
    have, or which have no session for as long as a client may be silent; and the oldest that have
    none where there are `SPARE` more than clients may be, or a quarter of all descriptors."""

    def __init__(
        self,
        bound: zmq.Socket[bytes],
        port: int,
        config: GatewayConfig,
        has_session: Callable[[bytes], bool],
    ) -> None:
        self._port = port
        self._most = min(config.max_connections + SPARE, processes.descriptors() // 4)
        self._message_bytes = config.max_message_bytes
        self._patience = config.client_timeout
        self._has_session = has_session
        self._peers: dict[int, _Peer] = {}
        self._rare = RareLog(log)
        self._bound = bound
        self._monitor = bound.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._reader = MessageReader(self._monitor, self._note)

    def heard(self, descriptor: int, identity: bytes) -> None:
        """A whole message came from there, and was handled."""
        peer = self._peers.setdefault(descriptor, _Peer())
        peer.heard, peer.identity, peer.known = True, identity, self._has_session(identity)

    def look(self, seconds: float) -> None:
        """Look at all of them; the last time was so many seconds ago."""
        for descriptor in list(self._peers):
            connection = self._open(descriptor)
            if connection is None:
                del self._peers[descriptor]
                continue
            with connection:
                peer = self._update(descriptor, connection, seconds)
                if (reason := self._fault(peer)) is not None:
                    self._end(descriptor, connection, reason)
        unfinished = sum(peer.unfinished for peer in self._peers.values())
        while unfinished > MESSAGES * self._message_bytes:
            largest = max(self._peers, key=lambda one: self._peers[one].unfinished)
            unfinished -= self._peers[largest].unfinished
            self._end_at(largest, "it has sent most of all that is not whole")

    def close(self) -> None:
        """To be called before the socket is closed."""
        self._reader.close()
        self._bound.disable_monitor()
        self._monitor.close()

    def _note(self, frames: list[bytes]) -> None:
        kind, descriptor = _EVENT.unpack(frames[0])
        if kind == zmq.EVENT_DISCONNECTED:
            self._peers.pop(descriptor, None)
            return
        if len(self._peers) >= self._most:
            unknown = (at for at, peer in self._peers.items() if not peer.known)
            oldest = next(unknown, descriptor)
            self._end_at(oldest, f"there are {len(self._peers)} connections")
            if oldest == descriptor:
                return
        self._peers.setdefault(descriptor, _Peer())

    def _update(self, descriptor: int, connection: socket.socket, seconds: float) -> _Peer:
        peer, name = self._peers[descriptor], connection.getpeername()
        if peer.name not in (None, name):  # the descriptor is another connection's now
            peer = self._peers[descriptor] = _Peer(identity=peer.identity, heard=peer.heard)
        peer.name = name
        peer.known = self._has_session(peer.identity)
        peer.strange = 0.0 if peer.known else peer.strange + seconds
        peer.received = _received(connection)
        if peer.heard:
            peer.whole, peer.heard = peer.received, False
        return peer

    def _fault(self, peer: _Peer) -> str | None:
        most = 2 * self._message_bytes + SLACK_BYTES if peer.known else UNKNOWN_BYTES
        if peer.unfinished > most:
            return f"{peer.unfinished} bytes have come of a message that is not whole"
        if peer.strange > self._patience:
            return f"it has had no session for {peer.strange:.0f} s"
        return None

    def _end_at(self, descriptor: int, reason: str) -> None:
        connection = self._open(descriptor)
        if connection is None:
            self._peers.pop(descriptor, None)
            return
        with connection:
            self._end(descriptor, connection, reason)

    def _end(self, descriptor: int, connection: socket.socket, reason: str) -> None:
        """ZeroMQ finds the connection closed, and forgets what it has of it."""
        self._rare.warn("a connection of a program is closed: %s", reason)
        self._peers.pop(descriptor, None)
        _abort(connection)

    def _open(self, descriptor: int) -> socket.socket | None:
        """A connection of ZeroMQ's, under a descriptor of ours; None if it is not one any more."""
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return None
        try:
            connection.getpeername()
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and connection.getsockname()[1] == self._port:
                return connection
        except OSError:
            pass
        connection.close()
        return None


def _abort(connection: socket.socket) -> None:
    """End a connection at once. After a `shutdown`, ZeroMQ would read on as long as more comes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).connect(connection.fileno(), _NOWHERE, len(_NOWHERE))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _received(connection: socket.socket) -> int:
    """All bytes that ever came; 0 where the system does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _RECEIVED_AT + _RECEIVED.size:
        return 0
    return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
