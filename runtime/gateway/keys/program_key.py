"""The key pair that encrypts programs' connections: ZeroMQ's CURVE, https://rfc.zeromq.org/spec/26."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from rootlace.wire.errors import InvalidRequest


def read_program_key(path: str) -> bytes:
    """The secret key (Z85, 40 characters) in the file at `path`, which is made where there is none.

    Raises InvalidRequest for a file that cannot be read or made, that others may read, or that
    holds something else.
    """
    try:
        _make(path)
        mode = Path(path).stat().st_mode
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise InvalidRequest(f"the key of programs at {path}: {error.strerror}") from error
    if mode & 0o077:
        raise InvalidRequest(f"others may read {path}, a secret key: chmod 600 {path}")
    try:
        zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise InvalidRequest(f"{path} holds no secret key of CURVE") from None
    return secret


def public_part(secret: bytes) -> str:
    """The public key of a secret one, in hexadecimal: clients find it behind `#` in the address."""
    return z85.decode(zmq.curve_public(secret)).hex()


def _make(path: str) -> None:
    """Write a new key, whole, which nobody else can read for a moment either."""
    file = Path(path)
    if file.exists():
        return
    handle, name = tempfile.mkstemp(dir=file.parent)  # of mode 0600
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(zmq.curve_keypair()[1] + b"\n")
        with suppress(FileExistsError):  # another process was faster
            file.hardlink_to(new)
    finally:
        new.unlink()
