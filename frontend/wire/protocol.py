"""Wire between a program and the server.

A client holds *branches*: growing token sequences with a place in the cache's tree. The client
sends lists of operations and receives lists of events. Every operation gets exactly one terminal
event (`Done`, `Generated`, `Selected`, `Explained`, `Embedded`, `Status` or `Failed`). Operations
are pipelined. The server runs the operations of one branch in the order they were sent. A branch
starts where its parent stood when the parent reached the `Open`.

One ZeroMQ message is one frame: a MessagePack array of operations (client to server) or of events
(server to client). The first message of a connection holds exactly one `Hello`. The server answers
with `Welcome`, or with `Failed(op=0)` and forgets the peer. Nothing is ever pickled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from rootlace.wire.errors import RootlaceError
from rootlace.wire.sampling import PLAIN, Handling
from rootlace.wire.sampling import SamplingParams as SamplingParams
from rootlace.wire.tool_calls import ToolFormat

# Cache report -------------------------------------------------------------------------------------
#
# Facts about one prompt in the cache.


Reason = Literal[
    "whole", "new", "differs", "evicted", "flushed", "expired", "namespace", "scored", "disabled"
]

Scope = Literal["own", "all"]
"""Namespaces that a report may look into: the prompt's own alone, or all."""


class CacheReport(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Length of a prompt's cached prefix, and the reason why it ends there.

    The first `matched` of `limit` tokens were cached (the prompt's last token is always computed,
    for its logits). `reason` is the first that applies:

    - "disabled": the cache is switched off.
    - "whole": all tokens were cached.
    - "scored": further tokens may be cached; the request computed them for log-probabilities of
      the prompt, or for a vector of all tokens.
    - "evicted", "flushed", "expired": `lost` more tokens were cached until `lost_seconds` ago.
      Evicted: to make room for a request, of the program `lost_to` if its namespace is the same.
      Expired: at the end of the lifetime that their request gave them.
    - "differs": something else followed in the cache; `instead` are its first tokens, in the last
      used of `continuations`.
    - "namespace": `elsewhere` tokens are cached in another namespace.
    - "new": nothing had followed there yet.

    Other fields are set wherever they apply. Texts, if the server gives them: the text `before` the
    end of the match, the prompt's text behind it (`goes_on`), and the cache's (`cached_instead`).
    `from_disk` of the cached tokens had been evicted and were read back, from a disk or main
    memory; `on_disk` tokens behind them are there. `saved_seconds`: estimated time to compute the
    cached tokens. `advice`: the change by which this and earlier prompts would share much more.
    """

    matched: int
    limit: int
    reason: Reason
    instead: tuple[int, ...] = ()
    continuations: int = 0
    lost: int = 0
    lost_seconds: float = 0.0
    lost_to: str = ""
    elsewhere: int = 0
    from_disk: int = 0
    on_disk: int = 0
    before: str = ""
    goes_on: str = ""
    cached_instead: str = ""
    saved_seconds: float = 0.0
    advice: str = ""


def describe(report: CacheReport) -> str:
    """Describe the report in a sentence or two for people."""
    matched, rest = report.matched, report.limit - report.matched
    cached = f"{matched:,} of {report.limit:,} tokens were cached"
    if report.from_disk:
        cached += f" ({report.from_disk:,} of them read from disk)"
    if report.on_disk:
        cached += f", {report.on_disk:,} more are on disk"
    if report.saved_seconds >= 0.001:
        cached += f", which saved about {report.saved_seconds:.3g} s"
    if report.reason == "whole":
        return f"{cached}."
    if report.reason == "disabled":
        return "The cache is switched off."
    if report.reason in ("evicted", "flushed", "expired"):
        ago = f"{report.lost_seconds:.3g} s ago"
        why = "when the cache was flushed"
        if report.reason == "expired":
            why = "when their time to live was over"
        elif report.reason == "evicted":
            whom = f"the program {report.lost_to}" if report.lost_to else "another request"
            why = f"to make room for {whom}"
        return f"{cached}; {report.lost:,} more had been until {ago}, and were given up {why}."
    if report.reason == "scored":
        return f"{cached}; the others were computed because the prompt's own figures were wanted."
    at = f"Behind {report.before!r} the prompt goes on" if matched else "The prompt begins"
    at += f" with {report.goes_on!r}"
    if report.reason == "differs":
        others = report.continuations - 1
        more = f" (and {others} other continuation{'s' if others > 1 else ''})" if others else ""
        if _same_text(report.goes_on, report.cached_instead):
            return (
                f"{cached}. {at}, which the cache has in other tokens{more}: there it was generated"
                " or cut apart elsewhere. Only equal tokens are shared."
            )
        return f"{cached}. {at}, where the cache has {report.cached_instead!r}{more}."
    if report.reason == "namespace":
        return f"{cached}; {report.elsewhere:,} are cached, but in another namespace."
    if not matched:
        return f"None of the {report.limit:,} tokens were cached."
    return f"{cached}; the {rest:,} behind them are new."


def _same_text(one: str, other: str) -> bool:
    """Return whether excerpts agree as far as both go; parts of characters never agree."""
    shown = min(len(one), len(other))
    return shown > 0 and one[:shown] == other[:shown] and "\ufffd" not in one[:shown]


# Protocol -----------------------------------------------------------------------------------------


PROTOCOL_VERSION = 2

FinishReason = Literal["stop", "length", "abort"]
ChoicesMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
VectorKind = Literal["last", "mean", "labels"]


class _Wire(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of everything on the wire: immutable, defaults left out, unknown fields refused."""


ConstraintKind = Literal["regex", "json_schema", "choices", "ebnf", "structural_tag"]
"""`rootlace.types.constraint_kinds` describes each kind."""


class Constraint(_Wire):
    """Constraint on generated text.

    `source` is the pattern (`regex`: Python's syntax), the schema as JSON text (`json_schema`), a
    JSON array of strings (`choices`), the grammar (`ebnf`: Lark or GBNF) or a JSON object with
    `structures` and `triggers` (`structural_tag`, as sglang's). `whitespace` applies to JSON.

    Parts of a schema that token masks cannot enforce are checked during generation, and a failing
    text is rolled back; `strict` refuses such a schema instead. `jump_forward`: "canonical" appends
    forced text without sampling, as the tokens that the tokenizer would give; "off" samples it. If
    an `optional` constraint cannot be enforced, the text is free.
    """

    kind: ConstraintKind
    source: str
    whitespace: Literal["compact", "flexible"] = "flexible"
    strict: bool = False
    jump_forward: Literal["canonical", "off"] = "canonical"
    optional: bool = False


# Fields that say how a constraint is enforced; the other fields say what it is.
CONSTRAINT_OPTIONS = ("whitespace", "strict", "jump_forward")


# ---------------------------------------------------------------- what an Append carries


class Text(_Wire, tag="text"):
    """Text. Special tokens in it are recognised only with `special` (templates, not content)."""

    text: str
    special: bool = False


MAX_TOKENS = 2**22
"""Most token ids of one part; a longer list is refused before any of it is decoded."""


class Tokens(_Wire, tag="tokens"):
    """Token ids."""

    ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]


class Image(_Wire, tag="image"):
    """Image, by its address or as data. Only for models that see (`ModelInfo.images`)."""

    url: str = ""
    data: bytes = b""
    media_type: str = ""


class Quote(_Wire, tag="quote"):
    """Text that another branch of this connection gained since it was opened (for joins)."""

    branch: int


Part = Text | Tokens | Image | Quote

# ---------------------------------------------------------------- operations


class _Op(_Wire):
    op: int


class Hello(_Op, tag="hello"):
    """First message of a connection; `op` is 0. `model` names the model of all its branches, by
    default the server's first; the server loads it where necessary.

    `session` is an unguessable name that the client chooses. If `Welcome.kept` is true, a client
    can come back after a lost connection or a restart of the server. The client then says hello
    with the same name and with the number of terminal events that it has `heard`. The client sends
    all operations without a terminal event again, in their order. Ended operations get the same
    event as before; running ones go on from where they were, streams too. `chunks` holds the
    received part of streams as (operation, sample, characters, tokens). No id of an operation or
    branch is used twice in a session. `state_lost`: the server cannot go on with the session.
    """

    version: int
    api_key: str = ""
    client: str = ""
    model: str = ""
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    heard: int | None = None
    chunks: tuple[tuple[int, int, int, int], ...] = ()


class Open(_Op, tag="open"):
    """Open a branch. With a parent (a fork) it starts where the parent ends at this operation.

    `program` groups the branches of one program run, as a hint to the cache: a live program's path
    is kept, a closed program's private suffix is evicted first. `namespace` separates tenants:
    branches of different namespaces never share KV. A child inherits both.

    All of the branch is computed with `adapter`; "": without one; None: with the parent's. A child
    with another adapter than its parent starts with the same text, and computes all of it anew: KV
    of different adapters is never shared.

    Without `share` the branch and its descendants have a private namespace. Closing the last of
    them forgets it.
    """

    branch: int
    parent: int | None = None
    program: str = ""
    namespace: str = ""
    adapter: str | None = None
    share: bool = True


class Append(_Op, tag="append"):
    """Add `parts` to the branch, in order."""

    branch: int
    parts: tuple[Part, ...]


class Prefill(_Op, tag="prefill"):
    """Compute the KV of the branch so far, except text that may still merge with later text."""

    branch: int
    handling: Handling = PLAIN


class Thoughts(_Wire):
    """Thoughts (reasoning) of a model before its answer, ending with `end`. `begin` starts them,
    and is empty where the branch already ends with it. With a `begin`, the model may have no
    thoughts.

    Within thoughts no stop string, pattern or stop token ends the text. The constraint begins
    behind them, behind `gap` (unless the model writes white space there itself). `then` is written
    for the model before the constrained text. After `budget` tokens the thoughts are ended with
    `close` and `gap`.
    """

    end: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    begin: Annotated[str, msgspec.Meta(max_length=256)] = ""
    gap: str = ""
    then: str = ""
    close: str = ""
    budget: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Generate(_Op, tag="generate"):
    """Sample; the text of the first sample becomes part of the branch.

    With `cache_report`, the result explains the cached length of the prompt; with `tell_cached`, a
    stream's first chunk states it. A timeout counts from when the server receives the operation.
    The pin and the `ttl` of `handling.cache` apply to the prompt.

    Where the output repeats the text `prediction`, it comes faster; a prediction never changes the
    output. `thoughts` may come before the answer.
    """

    branch: int
    name: str = ""
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    stream: bool = False
    cache_report: bool = False
    tell_cached: bool = False
    handling: Handling = PLAIN
    prediction: str = ""
    thoughts: Thoughts | None = None


class Select(_Op, tag="select"):
    """Score `choices` as continuations of the branch and append the best one.

    With a `temperature` above 0 the choice is drawn from softmax(scores / temperature). The same
    `seed` at the same place draws the same choice. A pin in `handling` is ignored.
    """

    branch: int
    choices: tuple[str, ...]
    name: str = ""
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    handling: Handling = PLAIN
    seed: int | None = None


class Explain(_Op, tag="explain"):
    """Ask for the branch's cached length, and why it is no longer; answered by `Explained`.
    Computes nothing."""

    branch: int


class Close(_Op, tag="close"):
    """Free the branch once its operations are over; children are not affected."""

    branch: int


class Cancel(_Op, tag="cancel"):
    """Abort the branch: its running and queued operations fail with `cancelled`.

    A branch whose `Close` still waits behind such operations can be cancelled, too.
    """

    branch: int


class FlushCache(_Op, tag="flush"):
    """Evict every cached prefix that no running request uses."""


class Unpin(_Op, tag="unpin"):
    """Release the pin with the id `pin`; `namespace` is its branch's."""

    pin: str
    namespace: str = ""


class GetStatus(_Op, tag="status"):
    """Ask for the runtime's counters (answered by `Status`)."""


class Embed(_Op, tag="embed"):
    """Ask for a vector of each of the `inputs` (answered by `Embedded`). `pooling`: "last", the
    final hidden state of the last token; "mean", the mean over all tokens; "labels", the label
    scores of a text classifier; None, as the model was trained (by default "last"). With
    `normalise` a vector has length 1. `namespace` and `adapter` are as in `Open`."""

    inputs: tuple[Text | Tokens, ...]
    pooling: VectorKind | None = None
    normalise: bool = False
    namespace: str = ""
    adapter: str = ""


class Ping(_Op, tag="ping"):
    """Keep the connection alive; answered by `Done`. The client has `heard` terminal events of the
    session, which the server need not keep any longer."""

    heard: int = 0


class Goodbye(_Op, tag="goodbye"):
    """Leave: every branch of the connection is cancelled and closed."""


_OfBranch = Open | Append | Prefill | Generate | Select | Explain | Close | Cancel
_OfServer = FlushCache | Unpin | GetStatus | Embed
Op = Hello | _OfBranch | _OfServer | Ping | Goodbye

# ---------------------------------------------------------------- events


class RoleFormat(_Wire):
    """Text before and after the content of a message of one role."""

    begin: str
    end: str


class ChatFormat(_Wire):
    """The model's chat template as text with special tokens.

    A conversation is `opening`, then `default_system` unless its first message is a system message,
    then `roles[role].begin + content + roles[role].end` per message. `tools`: how tools are listed
    and called.
    """

    opening: str = ""
    default_system: str = ""
    roles: dict[str, RoleFormat] = msgspec.field(default_factory=dict)
    tools: ToolFormat = ToolFormat()


class ModelInfo(_Wire):
    """Served model. `capacity_tokens` is the size of the KV cache, `block_size` that of a block,
    both in tokens. `chat` has no roles if the model has no chat template. `adapters`: names of the
    adapters that branches may have. `labels`: number of scores of a model that generates no text
    (0: it only embeds texts). `images`: whether it takes images. `caching`: whether prefixes are
    reused. `sampling`: default sampling of requests, by the names of `SamplingParams`;
    `sampling_from`: where each default comes from."""

    name: str
    path: str
    context_length: int
    vocab_size: int
    capacity_tokens: int
    block_size: int
    chat: ChatFormat = ChatFormat()
    adapters: tuple[str, ...] = ()
    labels: int | None = None
    images: bool = False
    caching: bool = True
    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    sampling_from: dict[str, str] = msgspec.field(default_factory=dict)


class TokenLogprob(_Wire):
    """Log-probability of a token. `logprob` is None for a prompt's first token. `top` holds (id,
    logprob, text), best first. `forced`: the constraint left no other token. `drafted`: source in
    `DRAFT_SOURCES` of a drafted token, if the operation asks for a cache report."""

    token_id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float, str], ...] = ()
    forced: bool = False
    drafted: str = ""


DRAFT_SOURCES = ("prediction", "tree", "output", "model")
"""Sources of drafted tokens: the client's prediction, other requests of the namespace, the
request's own tokens, a draft model."""


class Usage(_Wire):
    """Token counts of one operation. Prompt tokens include cached ones, completion tokens forced
    ones. `written`: tokens computed for each beginning of the prompt that was to be pinned.
    `accepted`: completion tokens that the client's prediction gave ahead. `rejected`: predicted
    tokens computed in vain. `drafts`: (accepted, rejected) of each other source of `DRAFT_SOURCES`
    in use."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    written: tuple[int, ...] = ()
    accepted: int = 0
    rejected: int = 0
    drafts: dict[str, tuple[int, int]] = {}


class Timing(_Wire):
    """Seconds since the operation's turn on its branch came: until admission, first token, and end.
    `progress`: (seconds, tokens so far) of the first sample. `clock`: measured by the runtime, or
    by the client of a service that reports no times."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    progress: tuple[tuple[float, int], ...] = ()
    clock: Literal["server", "client"] = "server"


class Output(_Wire):
    """One sample. `matched` is the stop string, or the stop token's id, that ended it.

    `token_ids` (and, in parallel, `logprobs`) include the tokens of the stop, which `text` leaves
    out. `forced_tokens` of them, at the indices `forced_at`, followed from the constraint without
    sampling. `drafted_at`: (index of a drafted token, index of its source in `DRAFT_SOURCES`).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    forced_tokens: int = 0
    forced_at: tuple[int, ...] = ()
    drafted_at: tuple[tuple[int, int], ...] = ()


class _Event(_Wire):
    op: int


class Welcome(_Event, tag="welcome"):
    """Answer to `Hello`: the server's protocol version, its model, and whether the `session` is
    kept for a client that comes back."""

    version: int
    model: ModelInfo
    kept: bool = False


class Chunk(_Event, tag="chunk"):
    """New text of sample `index` of a streaming `Generate`. All chunks together are the output.

    The first chunk of a `Generate` with `tell_cached` has the prompt's and its cached prefix's
    lengths in tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


class Done(_Event, tag="done"):
    """Success without another result. For `Prefill`, `usage` is set."""

    usage: Usage | None = None


class RequestFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts of a request from the engine, beside its tokens. Results carry the facts whole.

    A new fact is defined here, filled in by `scheduler/output.py` and printed in replies.
    `cached_tokens` of the prompt were not computed. `queued`: seconds from arrival to admission.
    `report` explains the cached length, and `pin` is the id of the pin, where asked for.
    """

    cached_tokens: int = 0
    queued: float = 0.0
    report: CacheReport | None = None
    pin: str = ""


class Generated(_Event, tag="generated"):
    """Samples of a `Generate`; `prompt_logprobs` begin at the index that it asked for; `facts` are
    those of the first sample."""

    outputs: tuple[Output, ...]
    usage: Usage
    timing: Timing = Timing()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    facts: RequestFacts = RequestFacts()


class Selected(_Event, tag="selected"):
    """Result of a `Select`. `scores` and `token_logprobs` (scored tokens) are by choice."""

    choice: str
    index: int
    scores: tuple[float, ...]
    usage: Usage
    token_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    timing: Timing = Timing()


class Explained(_Event, tag="explained"):
    """Cached length of a branch, explained."""

    report: CacheReport


class Status(_Event, tag="status_reply"):
    """Counters since start; docs/operations.md lists them."""

    values: dict[str, Any]


class Embedded(_Event, tag="embedded"):
    """One vector per input: float32, little-endian."""

    vectors: tuple[bytes, ...]
    usage: Usage


class Failed(_Event, tag="failed"):
    """Failure of an operation. `op` 0: of the connection, or a message that cannot be decoded."""

    code: str
    message: str
    param: str | None = None
    """Wrong field of the operation, where known."""

    @classmethod
    def of(cls, op: int, error: RootlaceError) -> Failed:
        return cls(op, error.code, str(error), getattr(error, "param", None))


Event = Welcome | Chunk | Done | Generated | Selected | Explained | Status | Embedded | Failed

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[Event])


def encode(messages: list[Op] | list[Event] | list[msgspec.Raw]) -> bytes:
    """Encode one frame."""
    return _encoder.encode(messages)


def pack(message: Op) -> msgspec.Raw:
    """Encode one message for a frame.

    Raises UnicodeEncodeError for a lone surrogate, OverflowError for a number over 64 bits, and
    TypeError for an object that is no message.
    """
    return msgspec.Raw(_encoder.encode(message))


def decode_events(frame: bytes) -> list[Event]:
    """Decode a frame. Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _events.decode(frame)
