"""The ROUTER socket that programs connect to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import zmq

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.gateway.keys.program_key import public_part
from rootlace.runtime.gateway.program_peers import ProgramPeers
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sockets import MessageReader

# Frames for one client that wait in ZeroMQ's queue. What is more waits in the server's.
SEND_HWM = 1000


class ProgramSocket:
    """`on_message` is given the frames of each message, the sender's identity first, and the
    sender's address, "" where there is none. `has_session` says whether an identity has one."""

    def __init__(
        self,
        on_message: Callable[[list[bytes], str], None],
        has_session: Callable[[bytes], bool],
    ) -> None:
        self._on_message = on_message
        self._has_session = has_session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: MessageReader | None = None
        self._peers: ProgramPeers | None = None

    def bind(self, config: GatewayConfig, secret: bytes | None = None) -> str:
        """Returns the address that clients connect to (port 0 becomes a real one).

        With a `secret` key of CURVE (Z85), connections are encrypted, and the public key stands
        behind `#` in the address. Raises InvalidRequest where the address cannot be bound.
        """
        address = config.program_address
        socket = self._context.socket(zmq.ROUTER)
        if secret is not None:
            socket.curve_server = True
            socket.curve_secretkey = secret
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.IPV6, "[" in address)
        # Larger ones are cut off by ZeroMQ; up to here they get an answer that says why.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * config.max_message_bytes)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise InvalidRequest(f"cannot listen on {address}: {error}") from error
        self._socket = socket
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        bound = endpoint.rstrip(b"\0").decode()
        if bound.startswith("tcp:"):
            port = int(bound.rpartition(":")[2])
            self._peers = ProgramPeers(socket, port, config, self._has_session)
        self._reader = MessageReader(socket, self._take, copy=False)
        return bound if secret is None else f"{bound}#{public_part(secret)}"

    def look(self, seconds: float) -> None:
        """Look after connections; the last time was so many seconds ago."""
        if self._peers is not None:
            self._peers.look(seconds)

    def _take(self, frames: list[zmq.Frame]) -> None:
        address, descriptor = "", -1
        if self._peers is not None:
            with contextlib.suppress(zmq.ZMQError):  # a message without a body has none
                address = str(frames[-1].get("Peer-Address"))
                descriptor = int(frames[-1].get(zmq.SRCFD))
        self._on_message([frame.bytes for frame in frames], address)
        if self._peers is not None and descriptor >= 0:
            self._peers.heard(descriptor, frames[0].bytes)

    def send(self, identity: bytes, frame: bytes) -> zmq.ZMQError | None:
        """Send without waiting. Returns what went wrong: a full queue, or a peer that is gone."""
        assert self._socket is not None and self._reader is not None
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error
        finally:
            self._reader.look()
        return None

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close()
        self._context.term()
