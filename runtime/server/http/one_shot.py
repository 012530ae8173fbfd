"""One-shot branches: how an HTTP request uses the gateway.

A request is a session of its own that opens one branch per prompt, appends the prompt, generates
and closes: the same path that programs take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Annotated, Generic, Self, TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.server.auth import admitted, caller, owner
from rootlace.runtime.server.generate import MAX_PROMPT_LOGPROBS
from rootlace.runtime.server.http.body import Body, ignored, read_body, source
from rootlace.runtime.server.http.chat_request import Pin, cut
from rootlace.runtime.server.http.constraints import Asked
from rootlace.runtime.server.http.errors import InvalidParameter, RefusedConstraint, named
from rootlace.runtime.server.http.replies import json_response
from rootlace.runtime.server.http.reply_headers import note_found, note_usage
from rootlace.runtime.server.http.request_fields import Prompt, remaining
from rootlace.runtime.server.score import find_vectors
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import Turn
from rootlace.runtime.server.session import Session
from rootlace.wire.errors import InvalidConstraint, InvalidRequest, RootlaceError, from_code
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Chunk,
    Close,
    Constraint,
    Done,
    Event,
    Explain,
    Explained,
    Failed,
    Generate,
    Generated,
    Op,
    Open,
    Output,
    Part,
    Prefill,
    SamplingParams,
    Select,
    Selected,
    Thoughts,
    Usage,
)
from rootlace.wire.sampling import PLAIN, Handling

# Behind prompts -----------------------------------------------------------------------------------
#
# One operation behind each of several prompts, in a session of their own.


_OPS = 4

Result = Explained | Generated | Selected
Ask = Callable[[int, int], Explain | Generate | Select]
"""Makes the operation, given its number and its branch."""


async def behind_prompts(
    gateway: ServedModel,
    asked: Iterable[tuple[tuple[Part, ...], Ask]],
    count: int,
    *,
    namespace: str,
    adapter: str,
    handling: Handling = PLAIN,
    at_once: int = 1,
    free: bool = False,
    param: Callable[[int], str] | None = None,
    choices: str = "choices",
) -> list[Result]:
    """The results, in the order of the `count` prompts. Raises the first error.

    `at_once` prompts at most are under way, so that other requests find room in the queue. `free`:
    nothing is computed, so it is no request of the key's quota. The timeout of `handling` is that
    of all together. `param` names the field that holds a prompt, and `choices` that of choices.
    """
    events: asyncio.Queue[list[Event]] = asyncio.Queue()
    account = caller() if free else admitted()
    session = gateway.open_session(
        events.put_nowait, client="http", account=account, source=source()
    )
    found: dict[int, Result] = {}
    waiting = enumerate(asked)
    clock = asyncio.get_running_loop().time
    started = clock()
    try:
        begun = 0
        turn = Turn()
        while len(found) < count:
            for index, (parts, ask) in islice(waiting, at_once - (begun - len(found))):
                if turn.over:
                    await turn.next()
                begun += 1
                op, branch = index * _OPS + 1, index + 1
                asked_for = ask(op + 2, branch)
                if not isinstance(asked_for, Explain):
                    left = remaining(handling, clock() - started)
                    asked_for = msgspec.structs.replace(asked_for, handling=left)
                session.handle(
                    [
                        Open(
                            op,
                            branch,
                            namespace=namespace,
                            adapter=adapter,
                            share=handling.cache.share,
                        ),
                        Append(op + 1, branch, parts),
                        asked_for,
                        Close(op + 3, branch),
                    ]
                )
            for event in await events.get():
                index = (event.op - 1) // _OPS
                if isinstance(event, Failed):
                    where = param(index) if param is not None and event.op > 0 else None
                    raise named(from_code(event.code, event.message, event.param), where, choices)
                if isinstance(event, Generated | Selected):
                    note_usage(event.usage, None)
                if isinstance(event, Result):
                    found[index] = event
    finally:
        session.close()
    return [found[index] for index in range(count)]


# Holds --------------------------------------------------------------------------------------------
#
# Branches of requests that have ended, which stay in the cache for others to go on from.


MAX_HELD = 256
_PART_OF_CACHE = 4
"""All that is held is at most one part in so many of what the cache holds."""


class PrefixHolds:
    """Keeps sessions of such branches open: a session is a program that still runs, whose path in
    the cache goes last.

    Each is held for `hold_seconds`. The oldest are let go where there would be too many, or where
    they would take too much of the cache. What was let go counts as what requests of no program
    left behind.
    """

    def __init__(self, gateway: ServedModel) -> None:
        self._gateway = gateway
        self._held: dict[ExitStack, int] = {}
        """What lets each go, and its tokens."""
        self._tokens = 0

    def add(self, session: Session, tokens: int) -> Callable[[], None]:
        """Hold a session that has so many `tokens` for itself. What this returns closes it, and
        keeps nothing in memory once it is closed: neither the session nor its model."""
        held = ExitStack()
        seconds = self._gateway.config.hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, held.close)
        for let_go in (session.close, timer.cancel):
            held.callback(let_go)
        held.callback(self._forget, held)
        self._held[held] = tokens
        self._tokens += tokens
        most = self._gateway.model_info.capacity_tokens // _PART_OF_CACHE
        while self._held and (len(self._held) > MAX_HELD or self._tokens > most):
            next(iter(self._held)).close()
        return held.close

    def _forget(self, held: ExitStack) -> None:
        self._tokens -= self._held.pop(held)


# Aborts -------------------------------------------------------------------------------------------
#
# Requests that can be ended by their id (`rid`); `POST /abort`, and sglang's `/abort_request`.


class AbortBody(Body):
    """`POST /abort`."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: Annotated[str | None, ignored("the reason is always 'abort'")] = None


class Aborted(msgspec.Struct):
    """So many requests were ended."""

    aborted: int
    success: bool = True


class Aborts:
    """What is running, by id, and the handler that ends it: of the same API key alone."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Callable[[], None]]] = {}

    @contextmanager
    def running(self, named: Sequence[tuple[str, Callable[[], None]]]) -> Iterator[None]:
        """While the block runs, each id ends what is beside it. Several may have the same id."""
        keys = [((owner(), rid), abort) for rid, abort in named]
        for key, abort in keys:
            self._running.setdefault(key, []).append(abort)
        try:
            yield
        finally:
            for key, abort in keys:
                self._running[key].remove(abort)
                if not self._running[key]:
                    del self._running[key]

    async def handle(self, request: web.Request) -> web.Response:
        body = await read_body(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise InvalidParameter("rid", "give rid, or abort_all")
        asker = owner()
        found = [
            abort
            for key, aborts in self._running.items()
            if key[0] == asker and (body.abort_all or key[1] == body.rid)
            for abort in aborts
        ]
        for abort in found:
            abort()
        return json_response(Aborted(len(found)))


# One shot -----------------------------------------------------------------------------------------


T = TypeVar("T")

MAX_PINS = 4
SAMPLES_AT_ONCE = 32
"""As many begin in one turn of the event loop, or fewer that take long."""
_OPS_PER_JOB = 4 + 2 * MAX_PINS
_GENERATE = 2
"""The field with which an error's message begins where a stop string or pattern is wrong."""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how to continue it. `pins`, at most `MAX_PINS`, are in order; what ends at
    each of them is computed first. With `keep` its branch stays open, that of a program which still
    runs (see `OneShots.keep`). `param` names the field that holds the prompt, and `sampling` is the
    path of the sampling parameters, for errors."""

    parts: tuple[Part, ...]
    params: SamplingParams
    asked: Asked | None = None
    namespace: str = ""
    cache_report: bool = False
    adapter: str = ""
    handling: Handling = PLAIN
    pins: tuple[Pin, ...] = ()
    keep: bool = False
    prediction: str = ""
    thoughts: Thoughts | None = None
    param: str | None = None
    sampling: str = ""


@dataclass(frozen=True)
class Direct(Generic[T]):
    """Who takes what comes in the middle of a stream at once, while `is_open` says so."""

    is_open: Callable[[], bool]
    take: Callable[[T], None]


class OneShots:
    """Jobs under way. Leaving the `with` block cancels what still runs, and closes all branches
    unless `keep` was called.

    Iterating gives `(index of the job, event)` as events arrive, the last of each job being its
    `Generated`, and raises the error of the first job that fails.
    """

    def __init__(
        self, gateway: ServedModel, jobs: Sequence[GenerateRequest], stream: bool = False
    ) -> None:
        self._events: asyncio.Queue[list[Event] | Exception] = asyncio.Queue()
        self._idle = False
        """Whether somebody iterates and waits for events."""
        self._direct: Direct[Chunk] | None = None
        self._jobs = jobs
        for asked in {id(job.asked): job.asked for job in jobs if job.asked}.values():
            asked.check_keywords()
        self._session = gateway.open_session(
            self._hear, client="http", account=admitted(), source=source()
        )
        self._session.stays_wanted = True
        self._kept = False
        self._next_op = len(jobs) * _OPS_PER_JOB + 1
        self._ended: set[int] = set()
        self._written: dict[int, tuple[int, ...]] = {}
        self._aborted: set[int] = set()
        self._scores = 0
        """Log-probabilities of prompts, alternatives included."""
        self._begin(0, stream)

    def _begin(self, index: int, stream: bool) -> None:
        """Begin the jobs from this one on: some now, the rest after what else the loop has to do,
        for each takes time."""
        if self._session.closed:
            return
        samples, turn = 0, Turn()
        while index < len(self._jobs) and samples < SAMPLES_AT_ONCE and not turn.over:
            if index not in self._aborted:
                samples += self._jobs[index].params.n
                try:
                    self._session.handle(_ops(index, self._jobs[index], stream))
                except Exception as error:
                    self._events.put_nowait(error)
                    return
            index += 1
        self._session.admitted = True
        if index < len(self._jobs):
            asyncio.get_running_loop().call_soon(self._begin, index, stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._direct = None  # it knows this
        if not self._kept:
            self._session.close()

    @property
    def keeps(self) -> bool:
        """Whether a job's branch stays open."""
        return any(job.keep for job in self._jobs)

    def keep(self) -> Session:
        """The session, which is the caller's to close: until then, what those of its branches that
        were kept have in the cache goes last."""
        self._kept = True
        return self._session

    def divert(self, direct: Direct[Chunk]) -> None:
        """Chunks of an only job are taken by `direct`, in the callback that brings them, and are
        not iterated."""
        if len(self._jobs) == 1:
            self._direct = direct

    def _hear(self, events: list[Event]) -> None:
        direct = self._direct
        # What is queued comes first, and behind an end nothing counts.
        if direct is not None and self._idle and self._events.empty() and not self._ended:
            try:
                while events and isinstance(chunk := events[0], Chunk) and direct.is_open():
                    direct.take(chunk)
                    del events[0]
            except Exception as error:
                self._events.put_nowait(error)
                return
            if not events:
                return
        self._events.put_nowait(events)

    def abort(self, index: int) -> None:
        """End one job: its outputs are empty ones, ended by "abort"."""
        self._aborted.add(index)
        output = Output("", (), "abort")
        outputs = (output,) * self._jobs[index].params.n
        # It comes before the failure of the operation, which then is that of an ended job.
        generate = index * _OPS_PER_JOB + 1 + _GENERATE
        self._events.put_nowait([Generated(generate, outputs, Usage())])
        self._session.handle([Cancel(self._next_op, index + 1)])
        self._next_op += 1

    async def results(self) -> list[Generated]:
        """The results in the order of the jobs."""
        found = {index: event async for index, event in self if isinstance(event, Generated)}
        return [found[index] for index in range(len(self._jobs))]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk | Generated]]:
        while len(self._ended) < len(self._jobs):
            self._idle = True
            events = await self._events.get()
            self._idle = False
            if isinstance(events, Exception):
                raise events
            for event in events:
                index = (event.op - 1) // _OPS_PER_JOB
                if index in self._ended or index >= len(self._jobs):
                    continue
                if isinstance(event, Failed):
                    raise self._error(event, index)
                if isinstance(event, Done) and event.usage is not None:
                    written = event.usage.prompt_tokens - event.usage.cached_tokens
                    self._written[index] = (*self._written.get(index, ()), written)
                elif isinstance(event, Generated):
                    self._ended.add(index)
                    self._count_scores(event, index)
                    usage = self._counted(event.usage, index)
                    whole = msgspec.structs.replace(event, usage=usage)
                    note_usage(whole.usage, whole.cache_report)
                    yield index, whole
                elif isinstance(event, Chunk):
                    if event.cached_tokens is not None:
                        note_found(event.cached_tokens)
                    yield index, event

    def _count_scores(self, event: Generated, index: int) -> None:
        """Raises InvalidRequest where those of all prompts are too many, for all are kept until the
        last has ended."""
        self._scores += len(event.prompt_logprobs) * (1 + self._jobs[index].params.top_logprobs)
        if self._scores > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"more than {MAX_PROMPT_LOGPROBS} log-probabilities of all prompts: ask for fewer "
                "prompts at a time, or fewer alternatives"
            )

    def begun(self, chunk: Chunk) -> Usage | None:
        """What is known of a prompt with the first chunk behind it; None with later ones."""
        if chunk.cached_tokens is None:
            return None
        found = Usage(prompt_tokens=chunk.prompt_tokens or 0, cached_tokens=chunk.cached_tokens)
        return self._counted(found, (chunk.op - 1) // _OPS_PER_JOB)

    def _counted(self, usage: Usage, index: int) -> Usage:
        """What was computed for pins was not found in the cache, although the last request did."""
        if index not in self._written:
            return usage
        written = self._written[index]
        cached = max(usage.cached_tokens - sum(written), 0)
        return msgspec.structs.replace(usage, cached_tokens=cached, written=written)

    def _error(self, event: Failed, index: int) -> RootlaceError:
        """The typed error; one about the constraint names the field that asked for it."""
        where = f"prompt {index}: " if len(self._jobs) > 1 and event.op > 0 else ""
        error = from_code(event.code, where + event.message, event.param)
        asked = self._jobs[index].asked if event.op > 0 else None
        if isinstance(error, InvalidConstraint) and asked is not None:
            return RefusedConstraint(asked.param, asked.told(str(error)))
        if isinstance(error, InvalidRequest) and (event.param or "").startswith("stop"):
            sampling = self._jobs[index].sampling
            error.param = f"{sampling}.{event.param}" if sampling else event.param
        return named(error, self._jobs[index].param if event.op > 0 else None)


def _ops(index: int, job: GenerateRequest, stream: bool) -> list[Op]:
    """What a job is to the session."""
    op, branch = index * _OPS_PER_JOB + 1, index + 1
    ops: list[Op] = [
        Open(
            op,
            branch,
            program="kept" if job.keep else "",
            namespace=job.namespace,
            adapter=job.adapter,
            share=job.handling.cache.share,
        ),
        *_appends(op + _GENERATE + 2, branch, job),
        Generate(
            op + _GENERATE,
            branch,
            params=job.params,
            constraint=job.asked.constraint if job.asked else None,
            stream=stream,
            cache_report=job.cache_report,
            tell_cached=stream,
            handling=job.handling,
            prediction=job.prediction,
            thoughts=job.thoughts,
        ),
    ]
    if not job.keep:
        ops.append(Close(op + _GENERATE + 1, branch))
    return ops


def _appends(op: int, branch: int, job: GenerateRequest) -> list[Op]:
    """The prompt: each beginning that is to be pinned, computed, and what follows."""
    ops: list[Op] = []
    for parts, cache in cut(job.parts, job.pins):
        ops.append(Append(op + len(ops), branch, parts))
        if cache.pin:
            handling = msgspec.structs.replace(job.handling, cache=cache)
            ops.append(Prefill(op + len(ops), branch, handling))
    return ops


async def run(gateway: ServedModel, jobs: Sequence[GenerateRequest]) -> list[Generated]:
    """The results in the order of the jobs. Raises the error of the first job that fails."""
    with OneShots(gateway, jobs) as shots:
        return await shots.results()


# Warming ------------------------------------------------------------------------------------------
#
# Generating before anybody asks, so that what is made at a first use is there.


TOKENS = 8
SCHEMA = '{"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}'

log = logging.getLogger(__name__)


async def warm_up(gateway: ServedModel, replicas: int = 1) -> None:
    """Some free text, then some JSON of a schema, as many at once as there are engines, which
    share them out. Raises the runtime's typed errors."""
    await generate(gateway, TOKENS, copies=replicas)
    if gateway.model_info.labels is not None:
        return
    try:
        asked = Asked(Constraint("json_schema", SCHEMA), "warm_up")
        await generate(gateway, TOKENS, asked, copies=replicas)
    except InvalidConstraint as error:
        log.warning("answers of this model cannot be constrained: %s", error)


async def generate(
    gateway: ServedModel, tokens: int, asked: Asked | None = None, copies: int = 1
) -> None:
    """So many tokens behind one, several times; or its vector, of a model that gives no tokens."""
    prompts = [Prompt(ids=(index,)).parts() for index in range(copies)]
    if gateway.model_info.labels is not None:
        await find_vectors(gateway, prompts, "last")
        return
    params = SamplingParams(max_tokens=tokens, ignore_eos=asked is None)
    await run(gateway, [GenerateRequest(parts, params, asked) for parts in prompts])
