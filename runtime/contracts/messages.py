"""What gateway and engine say to each other, over two ZeroMQ pipes (PUSH/PULL, ipc).

One message is one frame: a MessagePack array. Token ids travel as raw little-endian int32 bytes.
The engine knows nothing of branches, text or clients: a request is its token ids, and `output_ids`
lets a request resume where another engine left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from rootlace.wire.protocol import Constraint, SamplingParams


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


# ---------------------------------------------------------------- gateway -> engine


class Submit(_Message, tag="submit"):
    """Start a request.

    `token_ids` is the prompt; `output_ids` what was already generated for it (resumption).
    `params.n` is 1 here: the gateway makes n requests. `params.seed` is set, `params.max_tokens`
    is a number, and `params.stop_token_ids` holds every id that ends the request (EOS included
    unless ignored); stop strings are the gateway's business. `max_tokens=0` only computes the
    prompt. The first token is told at once, the others `emit_every` at a time, at most every
    `emit_seconds`, and at the end all: where nobody waits for single tokens, they need not cost
    both sides a message each.
    """

    rid: int
    token_ids: bytes
    params: SamplingParams
    output_ids: bytes = b""
    constraint: Constraint | None = None
    namespace: str = ""
    program: str = ""
    emit_every: Annotated[int, msgspec.Meta(ge=1)] = 1
    emit_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Abort(_Message, tag="abort"):
    """End requests; each one still running gets a final update with `finish="abort"`."""

    rids: tuple[int, ...]


class ReleaseProgram(_Message, tag="release"):
    """The program ended: prefixes that only it used may go first."""

    program: str


class Flush(_Message, tag="flush"):
    """Answered by `Flushed`."""

    ticket: int


class GetStats(_Message, tag="stats"):
    """Answered by `Stats`."""

    ticket: int


class Stop(_Message, tag="stop"):
    """Finish the step under way and exit."""


ToEngine = Submit | Abort | ReleaseProgram | Flush | GetStats | Stop

# ---------------------------------------------------------------- engine -> gateway


class Ready(_Message, tag="ready"):
    """The model is loaded and the pool made."""

    pid: int
    num_blocks: int
    block_size: int
    context_length: int
    capacity_tokens: int
    vocab_size: int
    device: str
    dtype: str


class TokenScore(_Message):
    """Log-probability of one token and the best alternatives as (id, logprob)."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Update(_Message, tag="update"):
    """News of one request: new tokens, and at the end why it ended.

    `finish` is "stop", "length", "abort" or "error" (then `code` and `error` say what). On "stop"
    by a token, that token is in `token_ids` and `matched` names it. `cached_tokens` and `queued`
    (seconds from arrival to admission) come with the first update, `prompt_scores` with the last
    prompt chunk. `forced` are the indices of those of `token_ids` that the constraint forced.
    """

    rid: int
    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    cached_tokens: int | None = None
    forced: tuple[int, ...] = ()
    queued: float | None = None
    finish: str | None = None
    matched: int | None = None
    code: str = ""
    error: str = ""


class Flushed(_Message, tag="flushed"):
    ticket: int


class Stats(_Message, tag="stats"):
    ticket: int
    values: dict[str, Any]


class Heartbeat(_Message, tag="heartbeat"):
    """Sent about once a second, from the loop itself: a hung loop goes silent."""

    step: int


FromEngine = Ready | Update | Flushed | Stats | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    return _from_engine.decode(frame)


def pack_ids(ids: np.ndarray | list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """int32 array, read-only view of `data`."""
    return np.frombuffer(data, dtype="<i4")
