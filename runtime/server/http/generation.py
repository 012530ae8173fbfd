"""How an HTTP request runs on a model: token sequences that it opens, and what it is told of them.

 GenerateRequest --+                        +--> Chunk, Chunk, ... Generated   (GenerationStream)
 GenerateRequest --+--> a task for each ----+
                        append, prefill up to each pin, generate

Sections: generation, operations behind prompts, held prefixes, aborts, warming.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
from aiohttp import web

from rootlace.runtime.contracts.messages import Pooling
from rootlace.runtime.server.auth import ASKER, Asker, owner
from rootlace.runtime.server.generate import MAX_PROMPT_LOGPROBS, Generation
from rootlace.runtime.server.http.body import Body, ignored, read_body
from rootlace.runtime.server.http.chat_request import Pin, cut
from rootlace.runtime.server.http.connections import SEEN
from rootlace.runtime.server.http.constraints import Asked
from rootlace.runtime.server.http.errors import InvalidParameter, RefusedConstraint, named
from rootlace.runtime.server.http.replies import DirectEvents, json_response
from rootlace.runtime.server.http.request_fields import Prompt, remaining
from rootlace.runtime.server.score import Selection, Vector, find_vectors
from rootlace.runtime.server.sequence import (
    OpenSequences,
    TokenSequence,
    append,
    explain,
    prefill,
)
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import Turn
from rootlace.wire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidConstraint,
    InvalidRequest,
    RootlaceError,
    from_code,
)
from rootlace.wire.protocol import (
    Append,
    CacheReport,
    Chunk,
    Constraint,
    Done,
    Event,
    Explain,
    Explained,
    Generate,
    Generated,
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

log = logging.getLogger(__name__)

# Generation ---------------------------------------------------------------------------------------


MAX_PINS = 4
SAMPLES_AT_ONCE = 32
"""Samples that begin in one turn of the event loop."""


MAX_REPORTS = 16
"""In the header that tells them."""


def admitted(counts: bool = True) -> Asker:
    """Who asks, when one request more was counted. Raises as `Account.admit` does."""
    asker = ASKER.get()
    if counts and asker.account is not None:
        asker.account.admit()
    return asker


def note_usage(usage: Usage, report: CacheReport | None) -> None:
    """A prompt was answered: what the cache had of it, for the reply's headers."""
    seen = SEEN.get()
    if seen is None:
        return
    seen.cached = (seen.cached or 0) + usage.cached_tokens
    seen.prompt += usage.prompt_tokens
    if report is not None and len(seen.reports) < MAX_REPORTS:
        # No texts: a header is for machines, and Latin-1.
        given = {"matched": report.matched, "limit": report.limit, "reason": report.reason}
        seen.reports.append(given | ({"lost": report.lost} if report.lost else {}))


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how to continue it.

    `pins`, at most `MAX_PINS`, are in order; what ends at each of them is computed first. With
    `keep` its sequence stays open (see `GenerationStream.keep`). `param` names the field that holds
    the prompt, and `sampling` is the path of the sampling parameters, for errors.
    """

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

    def operation(self, stream: bool) -> Generate:
        """What is done behind the prompt."""
        return Generate(
            0,
            0,
            params=self.params,
            constraint=self.asked.constraint if self.asked else None,
            stream=stream,
            cache_report=self.cache_report,
            tell_cached=stream,
            handling=self.handling,
            prediction=self.prediction,
            thoughts=self.thoughts,
        )


class GenerationStream:
    """Requests under way. Leaving the `with` block cancels what still runs, and lets all sequences
    go unless `keep` was called.

    Iterating gives `(index of the request, event)` as events arrive, the last of each request being
    its `Generated`, and raises the error of the first request that fails.
    """

    def __init__(
        self, gateway: ServedModel, requests: Sequence[GenerateRequest], stream: bool = False
    ) -> None:
        self._events: asyncio.Queue[tuple[int, Chunk | Generated] | Exception] = asyncio.Queue()
        self._idle = False
        """Whether somebody iterates and waits for events."""
        self._direct: tuple[DirectEvents, Callable[[list[Chunk]], bytes]] | None = None
        self._fresh: list[Chunk] = []
        """Chunks on their short way; those of several samples until all of a step have theirs."""
        self._gateway = gateway
        self._requests = requests
        self._stream = stream
        checked: Asked | None = None
        for one in requests:
            if one.asked is not None and one.asked is not checked:
                checked = one.asked
                checked.check_keywords()
        asker = admitted()
        gateway.drain.check()
        self._open = OpenSequences(gateway, self._events.put_nowait, asker, stays_wanted=True)
        self._kept = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: set[int] = set()
        self._written: dict[int, tuple[int, ...]] = {}
        """By request: how many tokens were computed up to each pin."""
        self._aborted: set[int] = set()
        self._sequences: dict[int, TokenSequence] = {}
        self._scores = 0
        """Log-probabilities of prompts, alternatives included."""
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None
        self._turn = Turn() if len(requests) > 1 else None
        self._begin(0)

    def _begin(self, index: int) -> None:
        """Begin requests from `index` on: some now, the rest in later turns of the event loop."""
        self._next = None
        samples = 0
        while index < len(self._requests) and samples < SAMPLES_AT_ONCE:
            if index not in self._aborted:
                samples += self._requests[index].params.n
                self._tasks[index] = self._loop.create_task(self._run(index))
            index += 1
        if index < len(self._requests):
            self._next = self._loop.call_soon(self._begin, index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._direct = None  # it knows this
        if self._next is not None:
            self._next.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        if not self._kept:
            self._open.close()

    @property
    def keeps(self) -> bool:
        """Whether a request's sequence stays open."""
        return any(one.keep for one in self._requests)

    def keep(self) -> OpenSequences:
        """The sequences, which are the caller's to close. Until then, what those that were kept
        have in the cache is evicted last."""
        self._kept = True
        opened = self._open
        opened.end = lambda error: opened.close()
        return opened

    def divert(self, direct: DirectEvents, write: Callable[[list[Chunk]], bytes]) -> None:
        """Have chunks of an only request written to `direct`, while that is open, in the callback
        that brings them; these are not iterated. `write` gives their events."""
        if len(self._requests) == 1:
            self._direct = direct, write

    def abort(self, index: int) -> None:
        """End one request, by "abort": its outputs have what was generated."""
        if (sequence := self._sequences.get(index)) is not None and sequence.stop is not None:
            sequence.stop()
            return
        self._aborted.add(index)
        outputs = (Output("", (), "abort"),) * self._requests[index].params.n
        self._put(index, Generated(0, outputs, Usage()))
        if index in self._tasks:
            self._tasks[index].cancel()

    async def results(self) -> list[Generated]:
        """The results in the order of the requests."""
        found = {index: event async for index, event in self if isinstance(event, Generated)}
        return [found[index] for index in range(len(self._requests))]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk | Generated]]:
        while len(self._ended) < len(self._requests):
            self._idle = True
            if (told := self._told(await self._events.get())) is not None:
                yield told

    def _told(
        self, event: tuple[int, Chunk | Generated] | Exception
    ) -> tuple[int, Chunk | Generated] | None:
        """What is told of an event that came; None behind a request's end. Raises the error of a
        request."""
        self._idle = False
        if isinstance(event, Exception):
            try:
                raise event
            finally:
                del event  # its traceback has this frame
        index, told = event
        if index in self._ended:
            return None
        if not isinstance(told, Generated):
            seen, cached = SEEN.get(), told.cached_tokens
            if seen is not None and seen.cached is None and cached is not None:
                seen.cached = cached  # all that is known when a stream begins
            return event
        self._ended.add(index)
        if told.prompt_logprobs:
            self._count_scores(told, index)
        if index in self._written:
            told = msgspec.structs.replace(told, usage=self._counted(told.usage, index))
        note_usage(told.usage, told.facts.report)
        return index, told

    # ------------------------------------------------------------ one request

    async def _run(self, index: int) -> None:
        gateway, request = self._gateway, self._requests[index]
        op = request.operation(self._stream)
        failure: RootlaceError
        try:
            async with asyncio.timeout(request.handling.timeout) as deadline:
                if self._turn is not None:
                    await self._turn.wait()
                share, kept = request.handling.cache.share, "kept" if request.keep else ""
                sequence = self._open.begin(request.namespace, request.adapter, share, kept)
                try:
                    rest = request.parts
                    if request.pins:
                        rest = await self._pin(index, request, sequence)
                    await append(gateway, sequence, Append(0, 0, rest))
                    sequence.check_handling(op.handling)
                    self._sequences[index] = sequence
                    take = partial(self._take, index)
                    result = await Generation(gateway, sequence, op, take).run()
                finally:
                    if not request.keep:
                        self._open.release(sequence)
        except RootlaceError as error:
            # Its traceback has the frames that have this: left to the garbage collector, refusals
            # would cost a server under overload a fifth of its time.
            failure = self._named(error.with_traceback(None), index)
        except Exception as error:
            if deadline.expired():
                failure = DeadlineExceeded.after(request.handling.timeout or 0.0)
            else:
                log.exception("a request failed")
                failure = InternalError.of(error)
        else:
            self._put(index, result)
            return
        self._events.put_nowait(failure)

    async def _pin(
        self, index: int, request: GenerateRequest, sequence: TokenSequence
    ) -> tuple[Part, ...]:
        """Compute the prompt up to its last pin. Returns what comes behind."""
        *pinned, (rest, _) = cut(request.parts, request.pins)
        for parts, cache in pinned:
            await append(self._gateway, sequence, Append(0, 0, parts))
            handling = msgspec.structs.replace(request.handling, cache=cache)
            sequence.check_handling(handling)
            done = await prefill(self._gateway, sequence, Prefill(0, 0, handling))
            assert isinstance(done, Done) and done.usage is not None
            computed = done.usage.prompt_tokens - done.usage.cached_tokens
            self._written[index] = (*self._written.get(index, ()), computed)
        return rest

    def _take(self, index: int, chunk: Event) -> None:
        assert isinstance(chunk, Chunk)
        # What is queued comes first.
        if self._direct is None or not self._idle or not self._events.empty():
            self._put(index, chunk)
            return
        self._fresh.append(chunk)
        if self._requests[0].params.n == 1:
            self._flush()
        elif len(self._fresh) == 1:
            self._loop.call_soon(self._flush)

    def _put(self, index: int, event: Chunk | Generated) -> None:
        if self._fresh:
            self._flush()
        self._events.put_nowait((index, event))

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        if self._direct is None or not self._direct[0].is_open():
            for chunk in fresh:
                self._events.put_nowait((0, chunk))
            return
        direct, write = self._direct
        try:
            direct.write(write(fresh))
        except Exception as error:
            self._events.put_nowait(error)

    def _count_scores(self, event: Generated, index: int) -> None:
        """Raises InvalidRequest where those of all prompts are too many, for all are kept until the
        last has ended."""
        self._scores += len(event.prompt_logprobs) * (1 + self._requests[index].params.top_logprobs)
        if self._scores > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"more than {MAX_PROMPT_LOGPROBS} log-probabilities of all prompts: ask for fewer "
                "prompts at a time, or fewer alternatives"
            )

    def _counted(self, usage: Usage, index: int) -> Usage:
        """What was computed for pins was not found in the cache, although the last request did."""
        written = self._written.get(index, ())
        cached = max(usage.cached_tokens - sum(written), 0)
        return msgspec.structs.replace(usage, cached_tokens=cached, written=written)

    def _named(self, error: RootlaceError, index: int) -> RootlaceError:
        """The error with the field of the body that it is about."""
        request, asked = self._requests[index], self._requests[index].asked
        if len(self._requests) > 1:
            param = error.param if isinstance(error, InvalidRequest) else None
            error = from_code(error.code, f"prompt {index}: {error}", param)
        if isinstance(error, InvalidConstraint) and asked is not None:
            return RefusedConstraint(asked.param, asked.told(str(error)))
        if isinstance(error, InvalidRequest) and (error.param or "").startswith("stop"):
            error.param = f"{request.sampling}.{error.param}" if request.sampling else error.param
        return named(error, request.param)


async def run(gateway: ServedModel, requests: Sequence[GenerateRequest]) -> list[Generated]:
    """The results in the order of the requests. Raises the error of the first that fails."""
    with GenerationStream(gateway, requests) as stream:
        return await stream.results()


# Operations behind prompts ------------------------------------------------------------------------


Result = Explained | Generated | Selected


async def behind_prompts(
    gateway: ServedModel,
    asked: Iterable[tuple[tuple[Part, ...], Explain | Generate | Select]],
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
    """One operation behind each of `count` prompts: the results, in their order. Raises the first
    error.

    `at_once` prompts at most are under way, so that other requests find room in the queue. `free`:
    nothing is computed, so it is no request of the key's quota. The timeout of `handling` is that
    of all together. `param` names the field that holds a prompt, and `choices` that of choices.
    """
    asker = admitted(counts=not free)
    gateway.drain.check()
    clock = asyncio.get_running_loop().time
    started = clock()
    results: dict[int, Result] = {}
    waiting = enumerate(asked)
    unloaded: list[RootlaceError] = []
    turn = Turn()

    async def perform(index: int, parts: tuple[Part, ...], op: Explain | Generate | Select) -> None:
        await turn.wait()
        if not isinstance(op, Explain):
            left = remaining(handling, clock() - started)
            op = msgspec.structs.replace(op, handling=left)
        try:
            sequence = opened.begin(namespace, adapter, handling.cache.share)
            try:
                await append(gateway, sequence, Append(0, 0, parts))
                result = await _behind(gateway, sequence, op)
            finally:
                opened.release(sequence)
        except RootlaceError as error:
            raise named(error, None if param is None else param(index), choices) from None
        if not isinstance(result, Explained):
            note_usage(result.usage, None)
        results[index] = result

    async def work() -> None:
        for index, (parts, op) in waiting:
            await perform(index, parts, op)

    def end(error: RootlaceError) -> None:
        unloaded.append(error)
        for worker in workers:
            worker.cancel()

    opened = OpenSequences(gateway, end, asker)
    workers = [asyncio.create_task(work()) for _ in range(min(at_once, count))]
    try:
        async with asyncio.timeout(handling.timeout) as deadline:
            await asyncio.gather(*workers)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineExceeded.after(handling.timeout or 0.0) from None
    except asyncio.CancelledError:
        if unloaded:
            raise unloaded[0] from None
        raise
    finally:
        for worker in workers:
            worker.cancel()
        opened.close()
    return [results[index] for index in range(count)]


async def _behind(
    gateway: ServedModel, sequence: TokenSequence, op: Explain | Generate | Select
) -> Result:
    if isinstance(op, Explain):
        return await explain(gateway, sequence, op)
    sequence.check_handling(op.handling)
    if isinstance(op, Generate):
        return await Generation(gateway, sequence, op).run()
    return await Selection(gateway, sequence, op).run()


async def vectors(
    gateway: ServedModel, inputs: Sequence[tuple[Part, ...]], pooling: Pooling | None, **how: Any
) -> tuple[list[Vector], Usage]:
    """What `find_vectors` finds for whoever asks, whose request it is; and the sums."""
    found = await find_vectors(gateway, inputs, pooling, asker=admitted(), **how)
    usage = Usage(sum(one.prompt_tokens for one in found), sum(one.cached_tokens for one in found))
    note_usage(usage, None)
    return found, usage


# Held prefixes ------------------------------------------------------------------------------------
#
# Sequences of requests that have ended, which stay in the cache for others to go on from.


MAX_HELD = 256
_PART_OF_CACHE = 4
"""All that is held is at most one part in so many of what the cache holds."""


class PrefixHolds:
    """Keeps such sequences open, as those of a program that still runs, whose path in the cache is
    evicted last.

    Each is held for `hold_seconds`. The oldest are let go where there would be too many, or where
    they would take too much of the cache. What was let go counts as what requests of no program
    left behind.
    """

    def __init__(self, gateway: ServedModel) -> None:
        self._gateway = gateway
        self._held: dict[ExitStack, int] = {}
        """What lets each go, and its tokens."""
        self._tokens = 0

    def add(self, opened: OpenSequences, tokens: int) -> Callable[[], None]:
        """Hold sequences that have so many `tokens` for themselves. What this returns closes them,
        and keeps nothing in memory once they are closed: neither them nor their model."""
        held = ExitStack()
        seconds = self._gateway.config.hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, held.close)
        for let_go in (opened.close, timer.cancel):
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


# Warming ------------------------------------------------------------------------------------------
#
# Generating before anybody asks, so that what is made at a first use is there.


TOKENS = 8
SCHEMA = '{"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}'


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
