"""What gateway and engine say to each other, over two ZeroMQ pipes (PUSH/PULL over ipc or tcp).

One message is one frame: a MessagePack array. Arrays of numbers travel as raw bytes. The engine
knows nothing of branches, text or clients: a request is its token ids, and `output_ids` lets a
request resume where another engine left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.step_cost import StepCost
from rootlace.runtime.contracts.tree_page import PinnedPrefix, TreePage
from rootlace.runtime.contracts.update import Update
from rootlace.wire.cache_report import CacheReport, Scope


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


# ---------------------------------------------------------------- gateway -> engine


class Abort(_Message, tag="abort"):
    """End requests; each one still running gets a final update with `finish="abort"`."""

    rids: tuple[int, ...]


class ReleaseProgram(_Message, tag="release"):
    """The program ended: prefixes that only it used may go first, unless they are still `wanted`
    as much as those of others."""

    program: str
    wanted: bool = False


class ForgetNamespace(_Message, tag="forget"):
    """Nobody will use the namespace again: all that it holds may go."""

    namespace: str


class GetPins(_Message, tag="pins"):
    """Answered by `Pinned`."""

    ticket: int


class Unpin(_Message, tag="unpin"):
    """Let a pin of this namespace (None: of any) go. Answered by `Unpinned`."""

    ticket: int
    pin: str
    namespace: str | None = None


class Flush(_Message, tag="flush"):
    """Answered by `Flushed`."""

    ticket: int


class GetStats(_Message, tag="stats"):
    """Answered by `Stats`."""

    ticket: int


class Explain(_Message, tag="explain", eq=False):
    """Why the prompt `token_ids` (int32) would be cached as far as it would be. Answered by
    `Explained`."""

    ticket: int
    token_ids: np.ndarray
    namespace: str = ""
    adapter: str = ""
    scope: Scope = "own"


class GetTree(_Message, tag="tree"):
    """Ask for a page of the tree: at most `limit` nodes of one namespace (None: of all), from the
    roots or below the node `under`. Answered by `Tree`."""

    ticket: int
    namespace: str | None = None
    under: int = 0
    limit: int = 200


class Pause(_Message, tag="pause"):
    """Compute nothing, `paused`, until told to go on; requests and their KV stay as they are."""

    paused: bool


class TellCache(_Message, tag="tell"):
    """Say all that the cache holds: some of what was said of it was lost. Answered by a
    `CacheChanged` that is `fresh`."""


class HandOver(_Message, tag="hand_over", eq=False):
    """Copy the blocks from number `first` on of `token_ids` (int32), as far as they are cached,
    into these `slots` of its own, or of all engines, one each. Answered by `HandedOver`."""

    ticket: int
    token_ids: np.ndarray
    first: int
    slots: tuple[int, ...]
    namespace: str = ""
    adapter: str = ""


class Offered(_Message, tag="offered", eq=False):
    """For the request `rid`, which comes next: the blocks from number `first` on of `token_ids`
    (int32) were copied into these slots of the engine whose `Ready.handed_at` is `source`, and have
    these checksums."""

    rid: int
    token_ids: np.ndarray
    first: int
    places: tuple[tuple[int, int], ...]
    namespace: str = ""
    adapter: str = ""
    source: bytes = b""


class Stop(_Message, tag="stop"):
    """Finish the step under way and exit."""


ToEngine = (
    Request
    | Abort
    | ReleaseProgram
    | ForgetNamespace
    | GetPins
    | Unpin
    | Flush
    | GetStats
    | Explain
    | GetTree
    | Pause
    | TellCache
    | HandOver
    | Offered
    | Stop
)

# ---------------------------------------------------------------- engine -> gateway


class Ready(_Message, tag="ready"):
    """The model is loaded and the pool made. `labels`: how many scores its head gives a text; 0: it
    has no head; None: it gives logits of tokens. `adapters` are the names of those that requests
    may ask for; where anything lies below the pool, `adapter_contents` are theirs (`kv_space`).
    `handed_slots`: for blocks that it gives to other engines, which are told `handed_at`
    (`contracts.transfer`)."""

    pid: int
    num_blocks: int
    block_size: int
    context_length: int
    capacity_tokens: int
    vocab_size: int
    device: str
    dtype: str
    hidden_size: int = 0
    labels: int | None = None
    adapters: tuple[str, ...] = ()
    handed_slots: int = 0
    handed_at: bytes = b""
    adapter_contents: dict[str, bytes] = {}


class Flushed(_Message, tag="flushed"):
    ticket: int


class Stats(_Message, tag="stats"):
    ticket: int
    values: dict[str, Any]


class Explained(_Message, tag="explained"):
    ticket: int
    report: CacheReport


class Tree(_Message, tag="tree"):
    ticket: int
    page: TreePage


class Pinned(_Message, tag="pinned"):
    ticket: int
    pins: tuple[PinnedPrefix, ...]


class Unpinned(_Message, tag="unpinned"):
    """`found`: there was such a pin."""

    ticket: int
    found: bool


class PinsLost(_Message, tag="pins_lost"):
    """A step failed, and all KV is lost: so many pins with it, all that were told of before."""

    count: int


class HandedOver(_Message, tag="handed_over"):
    """As many blocks lie in the first of the slots as there are checksums."""

    ticket: int
    checksums: tuple[int, ...]


class Heartbeat(_Message, tag="heartbeat"):
    """Sent about once a second, whatever the engine's loop is doing.

    `turns` counts the loop's turns, idle ones too: where it stands still, the loop is hung or in a
    long step. A process that is suspended, or whose interpreter is held, sends none.
    """

    turns: int


class Below(NamedTuple):
    """What can be read at a level below the pool since the last of these, and what no longer can:
    the first 8 bytes (uint64) of keys of prefixes (`cache.prefix_keys`). A block takes `seconds` to
    be read; inf: nothing is read there any more. The level has so many `slots`."""

    level: int
    slots: int
    seconds: float
    added: np.ndarray
    removed: np.ndarray


class CacheChanged(_Message, tag="changed", eq=False):
    """Digests (uint64) of prefixes that the cache holds since the last of these messages, and of
    those that it no longer does, and the same of what lies `below` the pool, for each level that
    changed; `fresh`: nothing that was said before counts, of neither. Their `number`s
    follow each other. Sent before what requests are told of the steps that changed it, by an engine
    that is one of several of a model."""

    number: int
    added: np.ndarray
    removed: np.ndarray
    fresh: bool = False
    below: tuple[Below, ...] = ()


class CostMeasured(_Message, tag="cost", eq=False):
    """What the engine's steps took of late. Sent now and then, by one of several of a model."""

    cost: StepCost


class Leaving(_Message, tag="leaving"):
    """Sent by whoever has the engine started, on another machine: give it nothing new. Answered by
    `Stop` when it has ended what it has."""


class Died(_Message, tag="died"):
    """Sent by whoever had the engine started: its process ended with `code`, in steps with
    `in_step`, requests and how long they were to become."""

    code: int | None
    in_step: dict[int, int]


FromEngine = (
    Ready
    | Update
    | Flushed
    | Stats
    | Explained
    | Tree
    | Pinned
    | Unpinned
    | PinsLost
    | HandedOver
    | Heartbeat
    | CacheChanged
    | CostMeasured
    | Leaving
    | Died
)

_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("<i4", "<f4", "<u8")}


def _pack(value: Any) -> Any:
    """An array as its dtype, shape and bytes; everything else, msgspec knows."""
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        raise NotImplementedError(f"{type(value).__name__} does not travel between processes")
    return value.dtype.str, value.shape, value.tobytes()


def _unpack(kind: type, value: Any) -> Any:
    """Read-only views of what was received. Raises ValueError where it is no array."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} is not received")
    try:
        dtype, shape, data = value
        return np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an array: {error!r}") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_to_engine = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=_unpack)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine], dec_hook=_unpack)


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    """Raises `msgspec.DecodeError`."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    """Raises `msgspec.DecodeError`."""
    return _from_engine.decode(frame)
