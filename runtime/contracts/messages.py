"""Messages between gateway and engine, over two ZeroMQ pipes (PUSH/PULL over ipc or tcp).

 gateway --EngineRequest, Abort, Flush, Get...--> engine
 gateway <--EngineOutput, Ready, Heartbeat, ...-- engine

One message is one frame: a MessagePack array. Arrays of numbers travel as raw bytes. The engine
knows no branches, text or clients: a request is its token ids, and `output_ids` lets a request
resume where another engine stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from rootlace.runtime.contracts.plan import StepCost, TokenScores
from rootlace.wire.protocol import CacheReport, Constraint, RequestFacts, SamplingParams, Scope
from rootlace.wire.sampling import PLAIN, Handling

# Request ------------------------------------------------------------------------------------------


NO_TOKENS = np.empty(0, np.int32)

Pooling = Literal["none", "last", "mean", "labels"]
"""Result of a request without outputs.

"last": final hidden state of the last token. "mean": mean of all tokens' states. "labels": scores
of a classifier's head for the last token.
"""


def kv_namespace(namespace: str, adapter: str) -> Hashable:
    """Return the namespace of shareable KV: the tenant's, for one adapter."""
    return (adapter, namespace) if adapter else namespace


def adapter_and_namespace(kv: Hashable) -> tuple[str, str]:
    """Adapter and namespace of a result of `kv_namespace`."""
    return kv if isinstance(kv, tuple) else ("", str(kv or ""))


def kv_space(kv: Hashable, contents: Mapping[str, bytes] | None = None) -> bytes:
    """32 bytes, distinct for every namespace and every content of an adapter.

    `contents`: digests of adapter contents, 32 bytes each, by name; a missing adapter counts by
    name.
    """
    adapter, namespace = adapter_and_namespace(kv)
    # Lengths are fixed, so no two pairs are written alike.
    named = hashlib.blake2b(adapter.encode(), digest_size=32).digest() if adapter else bytes(32)
    content = (contents or {}).get(adapter, named)
    return hashlib.blake2b(content + namespace.encode(), digest_size=32).digest()


def pin_id(kv: Hashable, token_ids: np.ndarray) -> str:
    """Return the id of a pin: the same for the same tokens (int32) of the same KV."""
    digest = hashlib.blake2b(ascii(kv).encode() + b"\0", digest_size=8)
    digest.update(token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


class ThoughtTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """`protocol.Thoughts` as token ids.

    `special`: `begin` and `end` are matched as these tokens, not as their text. `stops` end no text
    within thoughts.
    """

    end: tuple[int, ...]
    begin: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    close: tuple[int, ...] = ()
    budget: int | None = None
    stops: tuple[int, ...] = ()
    special: bool = False


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True, eq=False, tag="submit"):
    """One sequence to complete, from the gateway through the engine to the scheduler.

    `token_ids` is the prompt, `output_ids` the output of an earlier engine (both int32); the latter
    counts toward `max_tokens`. In `params`, `n` is 1, `seed` is set, and `max_tokens` is a number
    (0: only prefill). `stop_token_ids` holds every id that ends the request (EOS included unless
    ignored). The gateway checks stop strings.

    With `report`, the first update explains the length of the cached prefix, from the request's
    `own` namespace or from `all`.

    The first token is emitted at once, later tokens in groups of `emit_every`, at most once in
    `emit_seconds`, and the rest at the end. So streams that need no single tokens save messages.

    All tokens are computed with `adapter` ("": none), and share KV only with requests of the same
    adapter.

    With a `pooling` the request ends after prefill (`max_tokens` is 0), and its last update has the
    `vector`.

    A `suspected` request was in a step in which an engine died. The request is computed alone until
    its known tokens, and its first `suspected` tokens, are computed. A `resumed` request was
    admitted by another engine, so a full queue does not refuse it.

    `handling` is the client's, except for `cache.share`, which `namespace` expresses.

    `client` names the queue among waiting clients: an API key, or the address of the request. The
    client may have `max_pins` pins (None: no limit of its own). `origin` says who within the client
    asks, and takes turns with its others: of a key an address and a connection, of an address a
    connection.

    `prediction` (int32) is the client's guess of the output; a right guess only makes the output
    faster. `thoughts` come before the answer: the constraint holds behind them.
    """

    rid: int
    token_ids: np.ndarray
    params: SamplingParams
    output_ids: np.ndarray = NO_TOKENS
    constraint: Constraint | None = None
    namespace: str = ""
    program: str = ""
    adapter: str = ""
    emit_every: Annotated[int, msgspec.Meta(ge=1)] = 1
    emit_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    pooling: Pooling = "none"
    report: Scope | Literal[""] = ""
    handling: Handling = PLAIN
    suspected: int = 0
    resumed: bool = False
    client: str = ""
    origin: tuple[str, ...] = ()
    max_pins: int | None = None
    prediction: np.ndarray = NO_TOKENS
    thoughts: ThoughtTokens | None = None


# Update -------------------------------------------------------------------------------------------


class TokenScore(NamedTuple):
    """Log-probability of one token (None: no token precedes it) and the best alternatives.

    An alternative is (id, logprob).
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(msgspec.Struct, omit_defaults=True, eq=False, tag="update"):
    """New tokens of a request, and at the end the reason of the end.

    `finish` is "stop", "length", "abort" or "error" (then `code` and `error` say more). On "stop"
    by a token, `token_ids` includes the token and `matched` names it. `forced`: ascending indices
    of `token_ids` that the constraint forced. `facts` come with the first update and, as they are
    then, with `finish`.

    `scores` has one row per token of `token_ids`. `prompt_targets` (int32) are the prompt's tokens
    from index `prompt_logprobs_from` on. `prompt_scores` has one row for each of these except the
    prompt's first token, which has no log-probability. Both come with the last prefill chunk.

    `accepted`: ascending indices of `token_ids` that were drafted, each with the index of its
    source in `DRAFT_SOURCES`. `rejected`: by source, drafted tokens since the last update that are
    not in the output.

    `vector` (float32) is the result of a `pooling`; it comes with `finish`.
    """

    rid: int
    token_ids: tuple[int, ...] = ()
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    prompt_targets: np.ndarray | None = None
    forced: tuple[int, ...] = ()
    facts: RequestFacts | None = None
    finish: str | None = None
    matched: int | None = None
    vector: np.ndarray | None = None
    accepted: tuple[tuple[int, int], ...] = ()
    rejected: tuple[int, ...] = ()
    code: str = ""
    error: str = ""

    def token_scores(self) -> list[TokenScore]:
        """Scores of `token_ids`, one per token; empty if not requested."""
        return [] if self.scores is None else _single(self.token_ids, self.scores)

    def prompt_token_scores(self) -> list[TokenScore]:
        """Scores of `prompt_targets`, one per token."""
        if self.prompt_targets is None:
            return []
        targets = self.prompt_targets.tolist()
        scored = 0 if self.prompt_scores is None else len(self.prompt_scores.logprobs)
        unscored = len(targets) - scored
        scores = [TokenScore(token, None) for token in targets[:unscored]]
        if self.prompt_scores is not None:
            scores += _single(targets[unscored:], self.prompt_scores)
        return scores


def _single(token_ids: Iterable[int], scores: TokenScores) -> list[TokenScore]:
    top_ids, top_logprobs = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    return [
        TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            token_ids, scores.logprobs.tolist(), top_ids, top_logprobs, strict=True
        )
    ]


# Tree page ----------------------------------------------------------------------------------------


class TreeNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """An edge of the tree: the positions `start` to `end` of every sequence through it.

    `head` and `tail` are the first and last tokens (the tail only where the head is not all).
    `parent` is another node's id, 0 at a root. `children` counts all children, also those outside
    the page. `from_disk`: count of blocks that were evicted and read back. `requests`: requests
    running through the node. `uses`: requests ever. `programs`: the last running programs. `pins`:
    pins that hold the node. `idle_seconds`: since its last use. The gateway adds the texts of head
    and tail, and the `replica` where there are several.
    """

    id: int
    parent: int
    namespace: str
    adapter: str
    start: int
    end: int
    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    blocks: int = 0
    from_disk: int = 0
    children: int = 0
    requests: tuple[int, ...] = ()
    locked: bool = False
    uses: int = 0
    programs: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    idle_seconds: float = 0.0
    replica: int | None = None
    head_text: str = ""
    tail_text: str = ""


class TreePage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of tree nodes, each behind its parent; `complete` if there are no other nodes. The
    tree has `total` nodes with `tokens` tokens; None if only a part was requested."""

    nodes: tuple[TreeNode, ...]
    complete: bool = True
    total: int | None = None
    tokens: int | None = None


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A prompt of `tokens` tokens, pinned until `seconds_left` are over or the pin `id` is
    released.

    `node`: the node at which the prompt ends.
    """

    id: str
    namespace: str
    adapter: str
    tokens: int
    node: int
    seconds_left: float


# Step record --------------------------------------------------------------------------------------


STEPS = 2
"""Steps in flight: a running step, and the step behind it."""


def read_step_record(path: Path) -> dict[int, int]:
    """Request -> planned context length of the work that an engine wrote to `path`.

    The file is int64 [STEPS + 1, 1 + 2 rows]: of each step in flight the row count, request ids and
    context lengths. The last row has the request that the engine takes in. Empty without the file.
    """
    try:
        steps = np.fromfile(path, np.int64).reshape(STEPS + 1, -1)
    except (OSError, ValueError):
        return {}
    longest: dict[int, int] = {}
    for step in steps:
        rids, lengths = step[1:].reshape(2, -1)[:, : max(int(step[0]), 0)].tolist()
        for rid, length in zip(rids, lengths, strict=True):
            longest[rid] = max(length, longest.get(rid, 0))
    return longest


# Messages -----------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


# ---------------------------------------------------------------- gateway -> engine


class Abort(_Message, tag="abort"):
    """End requests; each unfinished one gets a final update with `finish="abort"`."""

    rids: tuple[int, ...]


class ReleaseProgram(_Message, tag="release"):
    """Close a program: prefixes that only the program used may go first.

    With `wanted` these prefixes count like those of other requests.
    """

    program: str
    wanted: bool = False


class ForgetNamespace(_Message, tag="forget"):
    """Forget all prefixes of a namespace that no client will use again."""

    namespace: str


class GetPins(_Message, tag="pins"):
    """Answered by `Pinned`."""

    ticket: int


class Unpin(_Message, tag="unpin"):
    """Release a pin of this namespace (None: any). Answered by `Unpinned`."""

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
    """Explain the cached prefix of the prompt `token_ids` (int32). Answered by `Explained`."""

    ticket: int
    token_ids: np.ndarray
    namespace: str = ""
    adapter: str = ""
    scope: Scope = "own"


class GetTree(_Message, tag="tree"):
    """Ask for a page of the tree. Answered by `Tree`.

    The page has at most `limit` nodes of one namespace (None: all), from the roots or below the
    node `under`.
    """

    ticket: int
    namespace: str | None = None
    under: int = 0
    limit: int = 200


class Pause(_Message, tag="pause"):
    """Stop computing while `paused`; requests and their KV stay."""

    paused: bool


class TellCache(_Message, tag="tell"):
    """Report the whole content of the cache, after a lost change.

    Answered by a `CacheChanged` that is `fresh`.
    """


class HandOver(_Message, tag="hand_over", eq=False):
    """Copy the cached blocks from number `first` on of `token_ids` (int32) into `slots`.

    Slots belong to the engine, or to all engines, one block each. Answered by `HandedOver`.
    """

    ticket: int
    token_ids: np.ndarray
    first: int
    slots: tuple[int, ...]
    namespace: str = ""
    adapter: str = ""


class Offered(_Message, tag="offered", eq=False):
    """Offer blocks for the request `rid`, which comes next.

    Blocks from number `first` on of `token_ids` (int32) lie in these slots, with these checksums,
    at the engine whose `Ready.handed_at` is `source`.
    """

    rid: int
    token_ids: np.ndarray
    first: int
    places: tuple[tuple[int, int], ...]
    namespace: str = ""
    adapter: str = ""
    source: bytes = b""


class Stop(_Message, tag="stop"):
    """Finish the step in flight and exit."""


_Questions = GetPins | Unpin | Flush | GetStats | Explain | GetTree | HandOver
_Orders = Abort | ReleaseProgram | ForgetNamespace | Pause | TellCache | Offered | Stop
ToEngine = EngineRequest | _Questions | _Orders

# ---------------------------------------------------------------- engine -> gateway


class Ready(_Message, tag="ready"):
    """The model is loaded and the pool allocated.

    `labels`: count of scores of a classifier's head; 0: no head; None: the model gives logits.
    `adapters`: names that requests may use. `adapter_contents`: their digests, if there are offload
    levels (`kv_space`). `handed_slots`: slots for blocks given to other engines, which need
    `handed_at` (`contracts.block_store`).
    """

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
    """`found`: the pin existed."""

    ticket: int
    found: bool


class PinsLost(_Message, tag="pins_lost"):
    """A step failed and all KV is lost, with `count` pins: all pins reported before."""

    count: int


class HandedOver(_Message, tag="handed_over"):
    """Answer of an engine that handed over blocks: one checksum per block, in the leading slots."""

    ticket: int
    checksums: tuple[int, ...]


class Heartbeat(_Message, tag="heartbeat"):
    """Sent about once a second, whatever the engine's loop is doing.

    `turns` counts the loop's turns, idle ones too: a constant count means a hung loop or a long
    step. A suspended process, or one whose interpreter is held, sends no heartbeat. `step_seconds`:
    how long the steps in flight should take, by what steps took here; -1 if too few were measured.
    """

    turns: int
    step_seconds: float = -1.0


class Below(NamedTuple):
    """Blocks of an offload level that became readable since the last report, and unreadable.

    Blocks are the first 8 bytes (uint64) of keys of prefixes (`cache.prefix_keys`). Reading a block
    takes `seconds`; inf: the level is off. The level has `slots` slots.
    """

    level: int
    slots: int
    seconds: float
    added: np.ndarray
    removed: np.ndarray


class CacheChanged(_Message, tag="changed", eq=False):
    """Changes of the cache since the last message: digests (uint64) of prefixes added and removed.

    `below`: the same for each changed offload level. `fresh`: all earlier messages are void, for
    pool and levels. `blocks`: count of full blocks in the tree; None: unchanged. `number`s are
    consecutive. Sent before the updates of the steps that changed
    the cache, by an engine that is one of several of a model.
    """

    number: int
    added: np.ndarray
    removed: np.ndarray
    fresh: bool = False
    below: tuple[Below, ...] = ()
    blocks: int | None = None


class CostMeasured(_Message, tag="cost", eq=False):
    """Recent cost of the engine's steps, sent now and then by one of several engines of a model."""

    cost: StepCost


class Leaving(_Message, tag="leaving"):
    """Announce that the engine takes no new requests, by its launcher on another machine.

    Answered by `Stop` when the engine's requests have ended.
    """


class Died(_Message, tag="died"):
    """Report that the engine's process ended with `code`, by its launcher.

    `in_step`: requests of its steps in flight, and their planned context lengths.
    """

    code: int | None
    in_step: dict[int, int]


_Answers = Pinned | Unpinned | Flushed | Stats | Explained | Tree | HandedOver
_Reports = PinsLost | Heartbeat | CacheChanged | CostMeasured | Leaving | Died
FromEngine = Ready | EngineOutput | _Answers | _Reports

_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("<i4", "<f4", "<u8")}
_PLAN_DTYPES = _DTYPES | {"<i8": np.dtype("<i8")}


def _pack(value: Any, dtypes: Mapping[str, Any] = _DTYPES) -> Any:
    """Return an array as its dtype, shape and bytes; other types are msgspec's."""
    if not isinstance(value, np.ndarray) or value.dtype.str not in dtypes:
        raise NotImplementedError(f"{type(value).__name__} does not travel between processes")
    return value.dtype.str, value.shape, value.tobytes()


def _unpack(kind: type, value: Any, dtypes: Mapping[str, Any] = _DTYPES) -> Any:
    """Return a read-only view of a received array. Raises ValueError if it is no array."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} is not received")
    try:
        dtype, shape, data = value
        return np.frombuffer(data, dtypes[dtype]).reshape(shape)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an array: {error!r}") from error


encode: Callable[[Sequence[ToEngine] | Sequence[FromEngine]], bytes]
encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=_unpack).decode
"""Decodes a frame. Raises `msgspec.DecodeError`."""
decode_from_engine = msgspec.msgpack.Decoder(list[FromEngine], dec_hook=_unpack).decode
"""Decodes a frame. Raises `msgspec.DecodeError`."""

encode_arrays: Callable[[dict[str, np.ndarray]], bytes]
encode_arrays = msgspec.msgpack.Encoder(enc_hook=partial(_pack, dtypes=_PLAN_DTYPES)).encode
decode_arrays = msgspec.msgpack.Decoder(
    dict[str, np.ndarray], dec_hook=partial(_unpack, dtypes=_PLAN_DTYPES)
).decode
"""Arrays of several names in a frame, beside these messages."""
