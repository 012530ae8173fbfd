"""The ROUTER socket that programs connect to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import zmq

from rootlace.runtime.gateway.keys.program_key import public_part
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sockets import MessageReader

# Frames for one client that wait in ZeroMQ's queue. What is more waits in the server's.
SEND_HWM = 1000


class ProgramSocket:
    """`on_message` is given the frames of each message, the sender's identity first, and the
    sender's address, "" where there is none."""

    def __init__(self, on_message: Callable[[list[bytes], str], None]) -> None:
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: MessageReader | None = None
        self._remote = False

    def bind(self, address: str, max_message_bytes: int, secret: bytes | None = None) -> str:
        """Returns the address that clients connect to (port 0 becomes a real one).

        With a `secret` key of CURVE (Z85), connections are encrypted, and the public key stands
        behind `#` in the address. Raises InvalidRequest where the address cannot be bound.
        """
        socket = self._context.socket(zmq.ROUTER)
        if secret is not None:
            socket.curve_server = True
            socket.curve_secretkey = secret
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.IPV6, "[" in address)
        # Larger ones are cut off by ZeroMQ; up to here they get an answer that says why.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_message_bytes)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise InvalidRequest(f"cannot listen on {address}: {error}") from error
        self._socket = socket
        self._remote = address.startswith("tcp:")
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._reader = MessageReader(socket, self._take, copy=False)
        bound = endpoint.rstrip(b"\0").decode()
        return bound if secret is None else f"{bound}#{public_part(secret)}"

    def _take(self, frames: list[zmq.Frame]) -> None:
        address = ""
        if self._remote:
            with contextlib.suppress(zmq.ZMQError):  # a message without a body has none
                address = str(frames[-1].get("Peer-Address"))
        self._on_message([frame.bytes for frame in frames], address)

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
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close()
        self._context.term()
