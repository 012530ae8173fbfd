"""The records of a journal: how one client's branches grow, and what it has been told.

Branches and operations have the client's ids, of which it uses none twice.
"""

from __future__ import annotations

import msgspec

from rootlace.runtime.server.tokenizer import Piece

Error = tuple[str, str]
"""Code and message."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    session: int


class Begun(_Record, frozen=True, tag=1):
    """A client connected for the first time. `key` is the name that it gave itself, `owner` whose
    API key it has, `model` whose token ids its branches hold."""

    key: str
    owner: str
    model: str = ""


class Ended(_Record, frozen=True, tag=2):
    """It said goodbye, or did not come back."""


class Heard(_Record, frozen=True, tag=3):
    """It has the first `count` of all answers that it was sent. Where it has `resumed`, the others
    were lost with its connection."""

    count: int
    resumed: bool = False


class Opened(_Record, frozen=True, tag=4):
    """A branch; with a `parent` it holds what that one does at this record, and its operation
    `op` has succeeded."""

    branch: int
    op: int
    program: str = ""
    namespace: str = ""
    adapter: str = ""
    private: bool = False
    parent: int | None = None


class Grown(_Record, frozen=True, tag=5):
    """A branch has these `ids` (int32) more, or those of the segments of these numbers, and gained
    these texts and ids more; the other fields are as they are now (see `BranchState`)."""

    branch: int
    ids: bytes | tuple[int, ...] = b""
    pending: tuple[Piece, ...] = ()
    begin: bool | None = None
    gained: tuple[Piece | bytes, ...] = ()
    paid: int = 0


class Finished(_Record, frozen=True, tag=6):
    """An operation of a branch (None: one that is closed) ended with this `event`, as a frame of
    the wire. `broken`: why every later one will fail. `op` 0: this alone."""

    branch: int | None
    op: int
    event: bytes
    broken: Error | None = None
    closed: bool = False


class Emitted(_Record, frozen=True, tag=7):
    """The client was sent the answer to an operation."""

    op: int


class Told(_Record, frozen=True, tag=8):
    """The engine's `update` (a message of its pipe) for sample `index` of a generation."""

    op: int
    index: int
    update: bytes


class Quoted(_Record, frozen=True, tag=9):
    """What the `at`th quote of an append found, or why there is nothing to find."""

    op: int
    at: int
    pieces: tuple[Piece, ...] = ()
    error: Error | None = None


class Segment(_Record, frozen=True, tag=10):
    """Ids (int32) that several branches share. `session` is 0."""

    number: int
    ids: bytes


Record = Begun | Ended | Heard | Opened | Grown | Finished | Emitted | Told | Quoted | Segment

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


def encode(records: list[Record]) -> bytes:
    return _encoder.encode(records)


def decode(data: bytes) -> list[Record]:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _decoder.decode(data)
