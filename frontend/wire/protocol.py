"""The wire between a program and the gateway.

A client holds *branches*: growing token sequences with a place in the cache's tree. It sends lists
of operations and receives lists of events; every operation gets exactly one terminal event
(`Done`, `Generated`, `Selected`, `Explained`, `Embedded`, `Status` or `Failed`). Operations are
pipelined: the gateway runs the operations of one branch in the order they were sent, and a branch
starts where its parent stood when the parent reached the `Open`.

One ZeroMQ message is one frame: a MessagePack array of operations (client to gateway) or of
events (gateway to client). The first message of a connection holds exactly one `Hello`; the gateway
answers with `Welcome`, or with `Failed(op=0)` and forgets the peer. Nothing is ever pickled.
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
# What the cache says of one prompt.


Reason = Literal[
    "whole", "new", "differs", "evicted", "flushed", "expired", "namespace", "scored", "disabled"
]

Scope = Literal["own", "all"]
"""Whether a report looks into the prompt's own namespace alone, or into others as well."""


class CacheReport(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Length of a prompt's cached prefix, and the reason why it ends there.

    The first `matched` of `limit` tokens were cached (the prompt's last token is always computed,
    for its logits are wanted). `reason` is the first that applies:

    - "disabled": the cache is switched off.
    - "whole": all of them were cached.
    - "scored": those behind may be cached; they were computed because log-probabilities of the
      prompt, or a vector made of all its tokens, were asked for.
    - "evicted", "flushed", "expired": `lost` tokens more had been, until `lost_seconds` ago.
      Evicted: to make room for a request, that of the program `lost_to` if it was of the same
      namespace. Expired: their request had given them so long to live.
    - "differs": something else followed there; `instead` are its first tokens, in the continuation
      used last, out of `continuations`.
    - "namespace": `elsewhere` tokens are cached in another namespace.
    - "new": nothing had followed there yet.

    Other fields are set wherever they apply. Texts, if the server gives them: what stands `before`
    the end of the match, what the prompt `goes_on` with, and what is `cached_instead`.
    `from_disk` of the tokens that were cached had been given up and were read back, from a disk or
    from main memory; `on_disk` tokens behind them lie there.
    `saved_seconds`: about how long it would have taken to compute what was cached. `advice`: what
    to change, where this and earlier prompts would share much but for an early difference.
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
    """The report as a sentence or two for people."""
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
    """Whether excerpts show the same text as far as both go; parts of characters show none."""
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
"""`rootlace.types.constraint_kinds` describes each."""


class Constraint(_Wire):
    """A constraint on the generated text.

    `source` is the pattern (`regex`: Python's syntax), the schema as JSON text (`json_schema`), a
    JSON array of strings (`choices`), the grammar (`ebnf`: Lark or GBNF) or a JSON object with
    `structures` and `triggers` (`structural_tag`, as sglang's). `whitespace` is that of JSON.

    What token masks cannot enforce of a schema is checked while the text is generated, and a text
    that fails is retracted; with `strict` such a schema is refused instead. `jump_forward` says
    whether text that the constraint forces is appended without sampling it: "canonical" (as the
    tokens the tokenizer would give it) or "off". Where one that is `optional` cannot be enforced,
    the text is free.
    """

    kind: ConstraintKind
    source: str
    whitespace: Literal["compact", "flexible"] = "flexible"
    strict: bool = False
    jump_forward: Literal["canonical", "off"] = "canonical"
    optional: bool = False


# How a constraint is enforced; the other fields say what it is.
CONSTRAINT_OPTIONS = ("whitespace", "strict", "jump_forward")


# ---------------------------------------------------------------- what an Append carries


class Text(_Wire, tag="text"):
    """Text. Special tokens in it are recognised only with `special` (templates, not content)."""

    text: str
    special: bool = False


MAX_TOKENS = 2**22
"""Most token ids of one part; a longer list is refused before any of it is made."""


class Tokens(_Wire, tag="tokens"):
    """Token ids as they are."""

    ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]


class Image(_Wire, tag="image"):
    """A picture, by its address or as it is. Only for models that see (`ModelInfo.images`)."""

    url: str = ""
    data: bytes = b""
    media_type: str = ""


class Quote(_Wire, tag="quote"):
    """The text that another branch of this connection gained since it was opened (for joins)."""

    branch: int


Part = Text | Tokens | Image | Quote

# ---------------------------------------------------------------- operations


class _Op(_Wire):
    op: int


class Hello(_Op, tag="hello"):
    """First message of a connection. `op` is 0. `model`: the name of that which all its branches
    are of; the first of several, if it is left out. It is loaded where it was not.

    `session` is a name of the client's own making that nobody can guess. Where the `Welcome` says
    that it is kept, a client that lost its connection, or whose server was restarted, says hello
    with the same name and with how many terminal events it has `heard`; then it sends again, in
    their order, all operations that it has none for. Those that had ended get the event that they
    got then, those that ran go on from where they were, and so do streams: `chunks` says how much
    of them the client has, as (operation, sample, characters, tokens). The ids of operations and
    branches of a session are never used again. `state_lost`: the server cannot go on with it.
    """

    version: int
    api_key: str = ""
    client: str = ""
    model: str = ""
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    heard: int | None = None
    chunks: tuple[tuple[int, int, int, int], ...] = ()


class Open(_Op, tag="open"):
    """A new branch. With a parent (a fork) it starts where the parent ends at this operation.

    `program` groups the branches of one program run: it is a hint to the cache (a live program's
    path is kept, a closed program's private suffix is evicted first). `namespace` separates
    tenants: branches of different namespaces never share KV. A child inherits both.

    All that the branch holds is computed with the `adapter` of this name, "": without one; None:
    with the parent's. A child with another adapter than its parent starts with the same text, of
    which it computes everything anew: KV of different adapters is never shared.

    Without `share` the branch and its descendants have a namespace of their own, which is forgotten
    when the last of them is closed.
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
    """Compute the KV of what the branch holds so far, except text that may still merge."""

    branch: int
    handling: Handling = PLAIN


class Thoughts(_Wire):
    """What a model writes to itself before its answer, up to `end`. `begin` begins it; it is
    empty where the branch ends with that, and else there need be no thoughts.

    Within them no stop string, pattern or token of the parameters ends the text, and the constraint
    begins behind them, behind `gap` (unless the model writes white space there itself). `then` is
    written for the model before what the constraint holds. Behind `budget` tokens they are ended
    with `close` and `gap`.
    """

    end: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    begin: Annotated[str, msgspec.Meta(max_length=256)] = ""
    gap: str = ""
    then: str = ""
    close: str = ""
    budget: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Generate(_Op, tag="generate"):
    """Sample; the text of the first sample becomes part of the branch.

    With `cache_report`, the result says why so much of the prompt was cached, and no more; with
    `tell_cached`, the first chunk of a stream says how much. A timeout counts from when the gateway
    receives the operation; what else is in `handling.cache` than `share` holds for its prompt.

    The output may be much like the text `prediction`: where it is, it comes faster. Whatever is
    predicted, the output is the same. `thoughts` may come before what is asked for.
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

    With a `temperature` above 0 the choice is drawn: softmax of the scores divided by it. The same
    `seed` at the same place draws the same. A pin that `handling` asks for is left out.
    """

    branch: int
    choices: tuple[str, ...]
    name: str = ""
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    handling: Handling = PLAIN
    seed: int | None = None


class Explain(_Op, tag="explain"):
    """Ask how far the branch as it is now is cached, and why no further; answered by `Explained`.
    Nothing is computed."""

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
    """Forget every cached prefix that no running request uses."""


class Unpin(_Op, tag="unpin"):
    """Let what was pinned under the id `pin` go, of which `namespace` is that of its branch."""

    pin: str
    namespace: str = ""


class GetStatus(_Op, tag="status"):
    """Ask for the runtime's counters (answered by `Status`)."""


class Embed(_Op, tag="embed"):
    """Ask for a vector of each of the `inputs` (answered by `Embedded`): that which the model was
    trained for (`pooling` None; the last token's, if nothing says so), the final hidden state of
    its last token, the mean of those of all its tokens, or, of a model that classifies texts, the
    scores of its labels. With `normalise` a vector has the length 1. `namespace` and `adapter` are
    as in `Open`.
    """

    inputs: tuple[Text | Tokens, ...]
    pooling: VectorKind | None = None
    normalise: bool = False
    namespace: str = ""
    adapter: str = ""


class Ping(_Op, tag="ping"):
    """Keeps the connection alive; answered by `Done`. `heard`: so many terminal events of the
    session the client has, and they need not be kept any longer."""

    heard: int = 0


class Goodbye(_Op, tag="goodbye"):
    """The client leaves: every branch of the connection is cancelled and closed."""


Op = (
    Hello
    | Open
    | Append
    | Prefill
    | Generate
    | Select
    | Explain
    | Close
    | Cancel
    | FlushCache
    | Unpin
    | GetStatus
    | Embed
    | Ping
    | Goodbye
)

# ---------------------------------------------------------------- events


class RoleFormat(_Wire):
    """Text before and after the content of a message of one role."""

    begin: str
    end: str


class ChatFormat(_Wire):
    """How the model's chat template writes a conversation, as text with special tokens.

    A conversation is `opening`, then `default_system` unless its first message is a system message,
    then `roles[role].begin + content + roles[role].end` per message. `tools`: how tools are listed
    and called.
    """

    opening: str = ""
    default_system: str = ""
    roles: dict[str, RoleFormat] = msgspec.field(default_factory=dict)
    tools: ToolFormat = ToolFormat()


class ModelInfo(_Wire):
    """The served model. `capacity_tokens` is the size of the KV cache, `block_size` that of its
    blocks, both in tokens; `chat` has no roles where the model has no chat template. `adapters` are
    the names of those that branches may have. `labels`: the model generates no text, but gives one
    so many scores (0: it embeds texts only). `images`: whether it takes them. `caching`: whether
    prefixes are reused. `sampling`: what requests that do not say otherwise are sampled with, by
    the names of `SamplingParams`; `sampling_from`: where each comes from."""

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
    """`logprob` is None for a prompt's first token. `top` holds (id, logprob, text), best first.
    `forced`: the constraint left no other token, so it was not sampled. `drafted`: the source in
    `DRAFT_SOURCES` of a token computed ahead, where the operation asks for a cache report."""

    token_id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float, str], ...] = ()
    forced: bool = False
    drafted: str = ""


DRAFT_SOURCES = ("prediction", "tree", "output", "model")
"""Where tokens computed ahead come from: the client's prediction, what other requests of the
namespace hold, what the request itself holds, a draft model."""


class Usage(_Wire):
    """Tokens of one operation. Prompt tokens include cached ones, completion tokens forced ones.
    `written`: those computed for each beginning of the prompt that was to be pinned. `accepted` of
    the completion tokens were computed ahead because they were predicted, and so were `rejected`
    others, which are not among them. `drafts`: the same two numbers for each other source of
    `DRAFT_SOURCES` that was drafted from."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    written: tuple[int, ...] = ()
    accepted: int = 0
    rejected: int = 0
    drafts: dict[str, tuple[int, int]] = {}


class Timing(_Wire):
    """Seconds from when the operation's turn came on its branch: until admission, until the first
    token, until the end. `progress`: (seconds, tokens of the first sample that there were).
    `clock`: whether the runtime measured them, or who asked a service that tells no times."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    progress: tuple[tuple[float, int], ...] = ()
    clock: Literal["server", "client"] = "server"


class Output(_Wire):
    """One sample. `matched` is the stop string or the stop token's id that ended it.

    `token_ids` (and, in parallel, `logprobs`) include the tokens of the stop, which `text` leaves
    out. `forced_tokens` of them followed from the constraint and were not sampled: those at the
    indices `forced_at`. `drafted_at`: those that were drafted, with an index of `DRAFT_SOURCES`.
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
    """The answer to `Hello`: the gateway's protocol version, what it serves, and whether the
    `session` is kept for a client that comes back."""

    version: int
    model: ModelInfo
    kept: bool = False


class Chunk(_Event, tag="chunk"):
    """New text of sample `index` of a streaming `Generate`. All chunks together are the output.

    In the first chunk of a `Generate` with `tell_cached`: how long the prompt is, and how much of
    it was cached.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


class Done(_Event, tag="done"):
    """The operation succeeded and has no other result. For `Prefill`, `usage` is set."""

    usage: Usage | None = None


class RequestFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine tells of a request beside its tokens. Results carry the facts whole.

    A new fact is defined here, filled in by `scheduler/output.py` and printed in replies.
    `cached_tokens` of the prompt were not computed. `queued`: seconds from arrival to admission.
    `report` says why no more was cached, and `pin` is the id of what was pinned, where asked for.
    """

    cached_tokens: int = 0
    queued: float = 0.0
    report: CacheReport | None = None
    pin: str = ""


class Generated(_Event, tag="generated"):
    """The samples of a `Generate`; `prompt_logprobs` from the index that it asked for; `facts` of
    its first sample."""

    outputs: tuple[Output, ...]
    usage: Usage
    timing: Timing = Timing()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    facts: RequestFacts = RequestFacts()


class Selected(_Event, tag="selected"):
    """`scores` are in the order of the choices; `token_logprobs` holds each one's scored tokens."""

    choice: str
    index: int
    scores: tuple[float, ...]
    usage: Usage
    token_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    timing: Timing = Timing()


class Explained(_Event, tag="explained"):
    """Length of a branch's cached prefix."""

    report: CacheReport


class Status(_Event, tag="status_reply"):
    """Counters since start; docs/operations.md lists what they count."""

    values: dict[str, Any]


class Embedded(_Event, tag="embedded"):
    """A vector for each input: float32, the lowest byte first."""

    vectors: tuple[bytes, ...]
    usage: Usage


class Failed(_Event, tag="failed"):
    """Terminal. `op` 0: about the connection, or about a message that could not be decoded."""

    code: str
    message: str
    param: str | None = None
    """The field of the operation that is wrong, where that is known."""

    @classmethod
    def of(cls, op: int, error: RootlaceError) -> Failed:
        return cls(op, error.code, str(error), getattr(error, "param", None))


Event = Welcome | Chunk | Done | Generated | Selected | Explained | Status | Embedded | Failed

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[Event])


def encode(messages: list[Op] | list[Event] | list[msgspec.Raw]) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


def pack(message: Op) -> msgspec.Raw:
    """One message as it will stand in a frame.

    Raises UnicodeEncodeError for a lone surrogate, OverflowError for a number over 64 bits, and
    TypeError for an object of no type that messages have.
    """
    return msgspec.Raw(_encoder.encode(message))


def decode_events(frame: bytes) -> list[Event]:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _events.decode(frame)
