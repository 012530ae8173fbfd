"""One-shot branches: how an HTTP request uses the gateway.

A request is a session of its own that opens one branch per prompt, appends the prompt, generates
and closes: the same path that programs take.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.generation import MAX_PROMPT_LOGPROBS
from rootlace.runtime.gateway.branches.session import Session
from rootlace.runtime.gateway.http.chat.pins import Pin, cut
from rootlace.runtime.gateway.http.constraints import Asked
from rootlace.runtime.gateway.http.errors import InvalidParameter, RefusedConstraint, named
from rootlace.runtime.gateway.http.reply_headers import note_found, note_usage
from rootlace.runtime.gateway.http.source import source
from rootlace.runtime.gateway.keys.account import admitted
from rootlace.runtime.gateway.large import Turn
from rootlace.wire.errors import InvalidConstraint, InvalidRequest, RootlaceError, from_code
from rootlace.wire.handling import PLAIN, Handling
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Chunk,
    Close,
    Done,
    Event,
    Failed,
    Generate,
    Generated,
    Op,
    Open,
    Output,
    Part,
    Prefill,
    SamplingParams,
    Thoughts,
    Usage,
)

T = TypeVar("T")

MAX_PINS = 4
SAMPLES_AT_ONCE = 32
"""As many begin in one turn of the event loop, or fewer that take long."""
_OPS_PER_JOB = 4 + 2 * MAX_PINS
_GENERATE = 2
_STOP = re.compile(r"stop(_regex)?\[\d+\]")
"""The field with which an error's message begins where a stop string or pattern is wrong."""


@dataclass(frozen=True)
class Job:
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

    def __init__(self, gateway: Gateway, jobs: Sequence[Job], stream: bool = False) -> None:
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
        error = from_code(event.code, where + event.message)
        asked = self._jobs[index].asked if event.op > 0 else None
        if isinstance(error, InvalidConstraint) and asked is not None:
            return RefusedConstraint(asked.param, asked.told(str(error)))
        if isinstance(error, InvalidRequest) and (field := _STOP.match(event.message)):
            sampling = self._jobs[index].sampling
            return InvalidParameter(f"{sampling}.{field[0]}" if sampling else field[0], str(error))
        return named(error, self._jobs[index].param if event.op > 0 else None)


def _ops(index: int, job: Job, stream: bool) -> list[Op]:
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


def _appends(op: int, branch: int, job: Job) -> list[Op]:
    """The prompt: each beginning that is to be pinned, computed, and what follows."""
    ops: list[Op] = []
    for parts, cache in cut(job.parts, job.pins):
        ops.append(Append(op + len(ops), branch, parts))
        if cache.pin:
            handling = msgspec.structs.replace(job.handling, cache=cache)
            ops.append(Prefill(op + len(ops), branch, handling))
    return ops


async def run(gateway: Gateway, jobs: Sequence[Job]) -> list[Generated]:
    """The results in the order of the jobs. Raises the error of the first job that fails."""
    with OneShots(gateway, jobs) as shots:
        return await shots.results()
