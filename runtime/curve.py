"""TCP between processes of a runtime on several machines, encrypted (CURVE).

Whoever is told an address and its public key, by the gateway, is who is meant to connect: nobody
else learns the key.
"""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000
"""A machine that vanishes without a word is noticed by what it does not send."""


def bind(socket: zmq.Socket[Any], host: str, secret: bytes) -> str:
    """To a free port of the interface `host`: the address to connect to. Raises ZMQError."""
    socket.curve_server = True
    socket.curve_secretkey = secret
    _set_heartbeat(socket)
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: zmq.Socket[Any], address: str, public_key: bytes) -> None:
    """Once: what is lost with a connection is not to be sent to whoever is there later."""
    socket.curve_serverkey = public_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    _set_heartbeat(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.connect(address)


def _set_heartbeat(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
