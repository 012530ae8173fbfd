"""What gateway and engine say to each other, over two ZeroMQ pipes (PUSH/PULL over ipc or tcp).

One message is one frame: a MessagePack array. Arrays of numbers travel as raw bytes. The engine
knows nothing of branches, text or clients: a request is its token ids, and `output_ids` lets a
request resume where another engine left it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from rootlace.runtime.contracts.plan import StepCost, TokenScores
from rootlace.wire.protocol import CacheReport, Constraint, SamplingParams, Scope
from rootlace.wire.sampling import PLAIN, Handling

# Request ------------------------------------------------------------------------------------------
#
# What is asked of the engine: one sequence to complete.


NO_TOKENS = np.empty(0, np.int32)

Pooling = Literal["none", "last", "mean", "labels"]
"""What a request asks for in place of tokens: the final hidden state of its last token, the mean of
those of all tokens, or the scores that a classifier's head gives the last one."""


def kv_namespace(namespace: str, adapter: str) -> Hashable:
    """Whose KV a request may share: that of its tenant's requests with the same adapter."""
    return (adapter, namespace) if adapter else namespace


def adapter_and_namespace(kv: Hashable) -> tuple[str, str]:
    """Of what `kv_namespace` gave, adapter and namespace."""
    return kv if isinstance(kv, tuple) else ("", str(kv or ""))


def kv_space(kv: Hashable, contents: Mapping[str, bytes] | None = None) -> bytes:
    """32 bytes that are others for every namespace and every content of an adapter, of which
    `contents` has digests, 32 bytes each, by name; one that is not there counts by its name."""
    adapter, namespace = adapter_and_namespace(kv)
    # Lengths are fixed, so no two pairs are written alike.
    named = hashlib.blake2b(adapter.encode(), digest_size=32).digest() if adapter else bytes(32)
    content = (contents or {}).get(adapter, named)
    return hashlib.blake2b(content + namespace.encode(), digest_size=32).digest()


def pin_id(kv: Hashable, token_ids: np.ndarray) -> str:
    """The id of a pin: the same for the same tokens (int32) of the same KV."""
    digest = hashlib.blake2b(ascii(kv).encode() + b"\0", digest_size=8)
    digest.update(token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


class ThoughtTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """`protocol.Thoughts` as token ids; `special`: `begin` and `end` are found as these tokens, and
    not as their text. `stops` end no text within."""

    end: tuple[int, ...]
    begin: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    close: tuple[int, ...] = ()
    budget: int | None = None
    stops: tuple[int, ...] = ()
    special: bool = False


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True, eq=False, tag="submit"):
    """One sequence to complete: the gateway makes it, the engine is sent it, the scheduler runs it.

    `token_ids` is the prompt, `output_ids` what another engine already generated for it (both
    int32); the latter counts toward `max_tokens`. In `params`, `n` is 1, `seed` is set,
    `max_tokens` is a number (0: only compute the prompt), and `stop_token_ids` holds every id that
    ends the request (EOS included unless ignored). Stop strings are the gateway's business.

    With `report`, the first update says why so much of the prompt was cached, and no more: as far
    as its `own` namespace shows it, or with a look into `all`.

    The first token is emitted at once, then at least `emit_every` at a time, at most once in
    `emit_seconds`, and at the end whatever is left: where nobody waits for single tokens, they need
    not cost a message each.

    All tokens are computed with the `adapter` of this name ("": without one), and share KV with
    those of requests with the same one alone.

    With a `pooling` it is over when its prompt is computed (`max_tokens` is 0), and its last update
    has the `vector`.

    One that is `suspected` was in a step in which another engine died: it is computed alone until
    what is given is, and its first `suspected` tokens are. One that is `resumed` was another
    engine's: it was admitted there, and is not refused because many wait.

    `handling` is as the client gave it, but for `cache.share`, which the `namespace` says.

    `client` is whose turn it takes among those who wait: the name of an API key, or where the
    request came from. It may have `max_pins` (None: as many as there is room for).

    `prediction` (int32) is what the client expects of the output: it may come faster for it, and is
    no other. `thoughts` come before the answer: the constraint holds behind them.
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
    max_pins: int | None = None
    prediction: np.ndarray = NO_TOKENS
    thoughts: ThoughtTokens | None = None


# Update -------------------------------------------------------------------------------------------
#
# What is new about one request: made by the scheduler, sent by the engine, read by the gateway.


class TokenScore(NamedTuple):
    """Log-probability of one token (None: nothing precedes it) and the best alternatives as
    (id, logprob)."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(msgspec.Struct, omit_defaults=True, eq=False, tag="update"):
    """New tokens, and at the end why the request ended.

    `finish` is "stop", "length", "abort" or "error" (then `code` and `error` say what). On "stop"
    by a token, that token is in `token_ids` and `matched` names it. `forced` are the indices,
    ascending, of those of `token_ids` that the constraint forced. `cached_tokens` and `queued`
    (seconds from arrival to admission) come with the first update, and so does `report`, if the
    request asks for it. `pin`, the id of what it pinned, comes then or with `finish`.

    `scores` has one row per token of `token_ids`. `prompt_targets` (int32) are the prompt's tokens
    from index `prompt_logprobs_from` on, and `prompt_scores` has one row for each of them but for
    the prompt's first token, which has no log-probability. They come with the last prompt chunk.

    `accepted` are the indices, ascending, of those of `token_ids` that were computed before they
    were sampled, because they were predicted; `rejected` says how many more were since the last
    update, which are not in the output.

    `vector` (float32) is what a request with a `pooling` asked for; it comes with `finish`.
    """

    rid: int
    token_ids: tuple[int, ...] = ()
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    prompt_targets: np.ndarray | None = None
    cached_tokens: int | None = None
    forced: tuple[int, ...] = ()
    queued: float | None = None
    report: CacheReport | None = None
    finish: str | None = None
    matched: int | None = None
    vector: np.ndarray | None = None
    accepted: tuple[int, ...] = ()
    rejected: int = 0
    pin: str = ""
    code: str = ""
    error: str = ""

    def token_scores(self) -> list[TokenScore]:
        """One per token of `token_ids`; empty where nobody asked for them."""
        return [] if self.scores is None else _single(self.token_ids, self.scores)

    def prompt_token_scores(self) -> list[TokenScore]:
        """One per token of `prompt_targets`."""
        if self.prompt_targets is None:
            return []
        targets = self.prompt_targets.tolist()
        scored = 0 if self.prompt_scores is None else len(self.prompt_scores.logprobs)
        unscored = len(targets) - scored
        found = [TokenScore(token, None) for token in targets[:unscored]]
        if self.prompt_scores is not None:
            found += _single(targets[unscored:], self.prompt_scores)
        return found


def _single(token_ids: Iterable[int], scores: TokenScores) -> list[TokenScore]:
    top_ids, top_logprobs = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    return [
        TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            token_ids, scores.logprobs.tolist(), top_ids, top_logprobs, strict=True
        )
    ]


# Tree page ----------------------------------------------------------------------------------------
#
# The radix tree as it is shown: a page of its nodes, and what is pinned in it.


class TreeNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """An edge of the tree: the positions `start` to `end` of every sequence through it.

    `head` and `tail` are its first and last tokens (the tail only where the head is not all).
    `parent` is another node's id, 0 at a root. `children` counts all of its own, also those that
    the page leaves out. `from_disk`: so many of its blocks had been given up, and were read back.
    `requests` run through it, `uses` counts those that ever did. `programs` are those that used it
    last and still run. `pins` hold it. `idle_seconds`: since its last use.
    The gateway adds the texts of head and tail, and the `replica` where there are several.
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
    """Some nodes, each behind its parent; `complete` if there are no others. `total` nodes with
    `tokens` tokens are in the tree; None where not all of it was asked for."""

    nodes: tuple[TreeNode, ...]
    complete: bool = True
    total: int | None = None
    tokens: int | None = None


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A prompt of so many `tokens` that is held until `seconds_left` are over, unless its pin is
    released before, by its `id`. `node` is where it ends in the tree."""

    id: str
    namespace: str
    adapter: str
    tokens: int
    node: int
    seconds_left: float


# Step record --------------------------------------------------------------------------------------
#
# Which requests are in the step that an engine computes, for those who find it dead.


STEPS = 2
"""How many steps may be under way: one that runs, and the one behind it."""


class StepRecord:
    """A file that the engine writes in memory shared with whoever reads it after its death.

    An array of int64 [STEPS, 1 + 2 rows]: how many rows each step under way has, their requests,
    and the lengths of their contexts.
    """

    def __init__(self, path: Path, max_rows: int) -> None:
        """Make the file. Steps have at most `max_rows` rows."""
        shape = (STEPS, 1 + 2 * max_rows)
        # Written, not only made so long: where the disk is full, this fails, and no step later.
        np.zeros(shape, np.int64).tofile(path)
        self._map = np.memmap(path, np.int64, "r+", shape=shape)
        # A plain view: indexing a memmap makes an object of its class each time.
        self._rows = self._map.view(np.ndarray)
        self._written: list[np.ndarray | None] = [None] * STEPS

    def begin(self, step: int, rids: np.ndarray, lengths: np.ndarray) -> None:
        """Step number `step` begins, with rows of these requests, which come to these lengths."""
        at, contexts = step % STEPS, 1 + self._rows.shape[1] // 2
        self._rows[at, contexts : contexts + len(rids)] = lengths
        if self._written[at] is not rids:
            self._rows[at, 1 : 1 + len(rids)] = rids
            self._written[at] = rids
        self._rows[at, 0] = len(rids)

    def end(self, step: int) -> None:
        self._rows[step % STEPS, 0] = 0


def read_step_record(path: Path) -> dict[int, int]:
    """The requests of the steps that were under way, and how long their contexts were to be; none
    if there is no such file."""
    try:
        steps = np.fromfile(path, np.int64).reshape(STEPS, -1)
    except (OSError, ValueError):
        return {}
    found: dict[int, int] = {}
    for step in steps:
        rids, lengths = step[1:].reshape(2, -1)[:, : max(int(step[0]), 0)].tolist()
        for rid, length in zip(rids, lengths, strict=True):
            found[rid] = max(length, found.get(rid, 0))
    return found


# Messages -----------------------------------------------------------------------------------------


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
    EngineRequest
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
    | EngineOutput
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
