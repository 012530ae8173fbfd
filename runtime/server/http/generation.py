"""Runs HTTP requests on a model: opens token sequences, and collects their events.

 GenerateRequest --+                        +--> Chunk, Chunk, ... Generated   (GenerationStream)
 GenerateRequest --+--> a task for each ----+
                        append, prefill up to each pin, generate

Sections: generation, answers, operations behind prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from rootlace.runtime.contracts.messages import Pooling
from rootlace.runtime.server.auth import ASKER, Asker
from rootlace.runtime.server.generate import MAX_PROMPT_LOGPROBS, Generation
from rootlace.runtime.server.http.chat_request import CachedPrefix, Pin, Written, pieces_of
from rootlace.runtime.server.http.connections import SEEN
from rootlace.runtime.server.http.constraints import Rule
from rootlace.runtime.server.http.errors import InvalidParameter, named
from rootlace.runtime.server.http.replies import DirectEvents
from rootlace.runtime.server.http.request_fields import remaining
from rootlace.runtime.server.score import Selection, Vector, find_vectors
from rootlace.runtime.server.sequence import (
    OpenSequences,
    TokenSequence,
    append,
    explain,
    prefill,
)
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import Turn, in_time
from rootlace.runtime.server.tokenizer import Joined
from rootlace.runtime.server.tool_parsers.base import (
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Parser,
    Reasoning,
)
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
    Text,
    Thoughts,
    TokenLogprob,
    Usage,
)
from rootlace.wire.sampling import PLAIN, Handling

log = logging.getLogger(__name__)

# Generation ---------------------------------------------------------------------------------------


MAX_PINS = 4
SAMPLES_AT_ONCE = 32
"""Samples begun in one turn of the event loop."""


MAX_REPORTS = 16
"""Most cache reports in the reply's header."""


def admitted(counts: bool = True) -> Asker:
    """Return the caller, after counting one request. Raises as `Account.admit` does."""
    asker = ASKER.get()
    if counts and asker.account is not None:
        asker.account.admit()
    return asker


def note_usage(usage: Usage, report: CacheReport | None) -> None:
    """Note an answered prompt's cached tokens for the reply's headers."""
    seen = SEEN.get()
    if seen is None:
        return
    seen.cached = (seen.cached or 0) + usage.cached_tokens
    seen.prompt += usage.prompt_tokens
    if report is not None and len(seen.reports) < MAX_REPORTS:
        # No texts: a header is for machines, and Latin-1.
        report_fields = {"matched": report.matched, "limit": report.limit, "reason": report.reason}
        seen.reports.append(report_fields | ({"lost": report.lost} if report.lost else {}))


class GenerateRequest(msgspec.Struct, frozen=True):
    """Prompt and how to continue it.

    `pins`, at most `MAX_PINS`, are in order; the prefix of each pin is computed first. With `keep`
    its sequence stays open (see `GenerationStream.keep`). For errors, `param` names the prompt's
    field, and `sampling` is the path of the sampling parameters.
    """

    parts: tuple[Part, ...]
    params: SamplingParams
    rule: Rule | None = None
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
        """Return the operation behind the prompt."""
        return Generate(
            0,
            0,
            params=self.params,
            constraint=self.rule.constraint if self.rule else None,
            stream=stream,
            cache_report=self.cache_report,
            tell_cached=stream,
            handling=self.handling,
            prediction=self.prediction,
            thoughts=self.thoughts,
        )


class GenerationStream:
    """Running requests. Leaving the `with` block cancels them, and releases all sequences unless
    `keep` was called.

    Iteration gives `(index of the request, event)` as events arrive, a request's `Generated` last.
    It raises the error of the first request that fails.
    """

    def __init__(
        self, model: ServedModel, requests: Sequence[GenerateRequest], stream: bool = False
    ) -> None:
        self._events: asyncio.Queue[tuple[int, Chunk | Generated] | Exception] = asyncio.Queue()
        self._idle = False
        """True while an iterator waits for events."""
        self._direct: DirectEvents | None = None
        self._write: Callable[[Chunk], bytes] | None = None
        self._model = model
        self._requests = requests
        self._stream = stream
        checked: Rule | None = None
        for one in requests:
            if one.rule is not None and one.rule is not checked:
                checked = one.rule
                checked.check_keywords()
        asker = admitted()
        if model.drain.begun:
            raise model.drain.refusal()
        self._open = OpenSequences(model, self._events.put_nowait, asker, stays_wanted=True)
        self._kept = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: set[int] = set()
        self._written: dict[int, tuple[int, ...]] = {}
        """Tokens computed up to each pin, by request."""
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
        self._direct = self._write = None  # refers to this object
        if self._next is not None:
            self._next.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        if not self._kept:
            self._open.close()

    @property
    def keeps(self) -> bool:
        """Return whether a request's sequence stays open."""
        return any(one.keep for one in self._requests)

    def keep(self) -> OpenSequences:
        """Hand the sequences over: the caller must close them. Until then, the cache evicts the
        kept ones last."""
        self._kept = True
        opened = self._open
        opened.end = lambda error: opened.close()
        return opened

    def divert(self, direct: DirectEvents, write: Callable[[Chunk], bytes]) -> None:
        """Write chunks of a single request to `direct`, while it is open, instead of iterating
        them. The engine's callback writes them; `write` turns a chunk into events."""
        if len(self._requests) == 1:
            self._direct, self._write = direct, write

    def abort(self, index: int) -> None:
        """End one request with "abort": its outputs hold the text so far."""
        if (sequence := self._sequences.get(index)) is not None and sequence.stop is not None:
            sequence.stop()
            return
        self._aborted.add(index)
        outputs = (Output("", (), "abort"),) * self._requests[index].params.n
        self._put(index, Generated(0, outputs, Usage()))
        if index in self._tasks:
            self._tasks[index].cancel()

    async def results(self) -> list[Generated]:
        """Return the results in the order of the requests."""
        results = {index: event async for index, event in self if isinstance(event, Generated)}
        return [results[index] for index in range(len(self._requests))]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk | Generated]]:
        while len(self._ended) < len(self._requests):
            self._idle = True
            if (event := self._checked_event(await self._events.get())) is not None:
                yield event

    def _checked_event(
        self, event: tuple[int, Chunk | Generated] | Exception
    ) -> tuple[int, Chunk | Generated] | None:
        """Return an event for the iterator; None behind a request's end. Raises the error of a
        request."""
        self._idle = False
        if isinstance(event, Exception):
            try:
                raise event
            finally:
                del event  # its traceback has this frame
        index, output = event
        if index in self._ended:
            return None
        if not isinstance(output, Generated):
            seen, cached = SEEN.get(), output.cached_tokens
            if seen is not None and seen.cached is None and cached is not None:
                seen.cached = cached  # a stream knows no more when it begins
            return event
        self._ended.add(index)
        if output.prompt_logprobs:
            self._count_scores(output, index)
        if index in self._written:
            output = msgspec.structs.replace(output, usage=self._counted(output.usage, index))
        note_usage(output.usage, output.facts.report)
        return index, output

    # ------------------------------------------------------------ one request

    async def _run(self, index: int) -> None:
        model, request = self._model, self._requests[index]
        op = request.operation(self._stream)
        failure: RootlaceError
        try:
            async with asyncio.timeout(request.handling.timeout) as deadline:
                if self._turn is not None:
                    await self._turn.wait()
                share, program = request.handling.cache.share, "kept" if request.keep else ""
                sequence = self._open.begin(request.namespace, request.adapter, share, program)
                try:
                    rest = request.parts
                    if request.pins:
                        rest = await self._pin(index, request, sequence)
                    await append(model, sequence, Append(0, 0, rest))
                    sequence.check_handling(op.handling)
                    self._sequences[index] = sequence
                    take = partial(self._take, index) if index else self._take_first
                    result = await Generation(model, sequence, op, take).run()
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
        """Compute the prompt up to its last pin; return the parts behind it."""
        text, begin = Joined.of(pieces_of(request.parts)), 0
        for pin in request.pins:
            parts = tuple(Text(*piece) for piece in text.cut(begin, pin.end))
            await append(self._model, sequence, Append(0, 0, parts))
            begin = pin.end
            handling = msgspec.structs.replace(request.handling, cache=pin.cache)
            sequence.check_handling(handling)
            done = await prefill(self._model, sequence, Prefill(0, 0, handling))
            assert isinstance(done, Done) and done.usage is not None
            computed = done.usage.prompt_tokens - done.usage.cached_tokens
            self._written[index] = (*self._written.get(index, ()), computed)
        return tuple(Text(*piece) for piece in text.cut(begin))

    def _take(self, index: int, chunk: Event) -> None:
        assert isinstance(chunk, Chunk)
        self._put(index, chunk)

    def _take_first(self, chunk: Event) -> None:
        assert isinstance(chunk, Chunk)
        direct, write = self._direct, self._write
        # Queued events come first.
        if direct is None or write is None or not (self._idle and direct.open):
            self._put(0, chunk)
            return
        try:
            direct.write(write(chunk))
        except Exception as error:
            self._idle = False
            self._events.put_nowait(error)

    def _put(self, index: int, event: Chunk | Generated) -> None:
        self._idle = False
        self._events.put_nowait((index, event))

    def _count_scores(self, event: Generated, index: int) -> None:
        """Count log-probabilities of prompts, which are all kept until the last request ends.
        Raises InvalidRequest beyond the bound."""
        self._scores += len(event.prompt_logprobs) * (1 + self._requests[index].params.top_logprobs)
        if self._scores > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"more than {MAX_PROMPT_LOGPROBS} log-probabilities of all prompts: ask for fewer "
                "prompts at a time, or fewer alternatives"
            )

    def _counted(self, usage: Usage, index: int) -> Usage:
        """Correct the cached tokens: tokens computed for pins were found, but not cached before."""
        written = self._written.get(index, ())
        cached = max(usage.cached_tokens - sum(written), 0)
        return msgspec.structs.replace(usage, cached_tokens=cached, written=written)

    def _named(self, error: RootlaceError, index: int) -> RootlaceError:
        """Name the field of the body in the error."""
        request, rule = self._requests[index], self._requests[index].rule
        if len(self._requests) > 1:
            param = error.param if isinstance(error, InvalidRequest) else None
            error = from_code(error.code, f"prompt {index}: {error}", param)
        if isinstance(error, InvalidConstraint) and rule is not None:
            return InvalidConstraint(rule.with_tool(str(error)), rule.param)
        if isinstance(error, InvalidRequest) and (error.param or "").startswith("stop"):
            error.param = f"{request.sampling}.{error.param}" if request.sampling else error.param
        return named(error, request.param)


async def run(model: ServedModel, requests: Sequence[GenerateRequest]) -> list[Generated]:
    """Return the results in the order of the requests. Raises the error of the first that fails."""
    with GenerationStream(model, requests) as stream:
        return await stream.results()


# Answers ------------------------------------------------------------------------------------------
#
# Answers of a conversation, parsed as they come.


class AnswerDelta(msgspec.Struct, frozen=True):
    """New pieces of answer `index`, with the `logprobs` and the number of their `tokens`. `begun`,
    in the first delta: the prompt's lengths."""

    index: int
    deltas: list[Delta]
    logprobs: tuple[TokenLogprob, ...] = ()
    begun: Usage | None = None
    tokens: int = 0


class FinalOutput(msgspec.Struct, frozen=True):
    """End of all answers, with the count of thoughts' tokens. `cut_calls`: for each answer, whether
    its last call is incomplete because the answer was cut."""

    generated: Generated
    reasoning_tokens: int
    cut_calls: tuple[bool, ...] = ()
    opened: OpenSequences | None = None
    """Kept sequences, which the caller must close."""
    held: CachedPrefix | None = None
    """Prefix for later requests."""


class Prepared(msgspec.Struct, frozen=True):
    """Prepared request: the generation to run, and the parser of its answers."""

    job: GenerateRequest
    parser: Callable[[], Parser] | None
    """Makes a parser of one answer; None where the whole answer is text for the user."""
    prefix: str = ""
    """Beginning of a forced call, written for the model."""
    several: bool = True
    """True if several calls are allowed."""
    written: Written | None = None
    """Prompt of a branch to keep."""


class Reader:
    """Reader of one growing answer."""

    def __init__(self, prepared: Prepared) -> None:
        parser = self._parser = None if prepared.parser is None else prepared.parser()
        self._several = prepared.several
        self._calls = 0
        self.thoughts: list[str] = []
        """Text of the model's thoughts."""
        self._arguments: list[str] | None = None  # of the last call
        self._first = parser.feed(prepared.prefix) if parser is not None and prepared.prefix else []

    def feed(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._allowed(self._parser.feed(text) if text else [])

    def finish(self) -> list[Delta]:
        return [] if self._parser is None else self._allowed(self._parser.finish())

    def _allowed(self, deltas: list[Delta]) -> list[Delta]:
        """Drop deltas behind the only call allowed."""
        deltas, self._first = [*self._first, *deltas], []
        allowed = []
        for delta in deltas:
            if isinstance(delta, Reasoning):
                self.thoughts.append(delta.text)
            self._calls += isinstance(delta, CallBegin)
            if self._several or self._calls <= 1:
                allowed.append(delta)
                if isinstance(delta, CallBegin):
                    self._arguments = []
                elif isinstance(delta, CallArguments) and self._arguments is not None:
                    self._arguments.append(delta.text)
        return allowed

    def has_cut_call(self, output: Output) -> bool:
        """Return whether `output`, already read, was cut within a call."""
        ended = output.finish_reason == "stop" and not isinstance(output.matched, str)
        if ended or self._arguments is None:
            return False
        try:
            msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            return True
        return False


class AnswerStream(GenerationStream):
    """Answers of a chat request as they are written. Leaving the `with` block ends running work."""

    def __init__(
        self,
        model: ServedModel,
        prepared: Prepared,
        direct: DirectEvents | None = None,
        writers: Sequence[Callable[[AnswerDelta], bytes]] = (),
        *,
        stream: bool = True,
    ) -> None:
        """`direct` takes bytes that each answer's writer makes of deltas, while it is open. These
        deltas are not among `events`."""
        self._prepared = prepared
        self._readers = [Reader(prepared) for _ in range(prepared.job.params.n)]
        super().__init__(model, [prepared.job], stream)

        self._writers = writers
        if direct is not None:
            self.divert(direct, self._written_by)

    async def events(self) -> AsyncGenerator[AnswerDelta | FinalOutput, None]:
        """Give an `AnswerDelta` for each chunk, and the `FinalOutput` last."""
        while not self._ended:
            self._idle = True
            if (output := self._checked_event(await self._events.get())) is None:
                continue
            _, event = output
            if isinstance(event, Chunk):
                yield self._delta(event)
                continue
            for index, reader in enumerate(self._readers):
                if rest := reader.finish():
                    yield AnswerDelta(index, rest)
            yield await self._final(event)

    def _written_by(self, chunk: Chunk) -> bytes:
        return self._writers[chunk.index](self._delta(chunk))

    def _delta(self, chunk: Chunk) -> AnswerDelta:
        begun = None
        if chunk.cached_tokens is not None:
            begun = Usage(chunk.prompt_tokens or 0, chunk.cached_tokens)
            begun = self._counted(begun, 0) if self._written else begun
        deltas = self._readers[chunk.index].feed(chunk.text)
        return AnswerDelta(chunk.index, deltas, chunk.logprobs, begun, len(chunk.token_ids))

    @classmethod
    async def whole(
        cls, model: ServedModel, prepared: Prepared
    ) -> tuple[FinalOutput, list[Answer]]:
        """Return the whole answers at once. The caller must close kept sequences."""
        with cls(model, prepared, stream=False) as stream:
            (generated,) = await stream.results()
            answers = [
                Answer.of([*reader.feed(output.text), *reader.finish()])
                for reader, output in zip(stream._readers, generated.outputs, strict=True)
            ]
            return await stream._final(generated), answers

    async def _final(self, generated: Generated) -> FinalOutput:
        prepared, tokenizer = self._prepared, self._model.tokenizer
        count, cut_calls = 0, []
        for reader, output in zip(self._readers, generated.outputs, strict=True):
            cut_calls.append(reader.has_cut_call(output))
            if text := "".join(reader.thoughts):
                ids = await self._model.tokenize(len(text), tokenizer.encode, text, False)
                count += len(ids)
        count = min(count, generated.usage.completion_tokens)
        if prepared.written is None:
            return FinalOutput(generated, count, tuple(cut_calls))
        held = CachedPrefix.behind(prepared.written, generated.outputs[0], prepared.job.params)
        return FinalOutput(generated, count, tuple(cut_calls), self.keep(), held)


# Operations behind prompts ------------------------------------------------------------------------


Result = Explained | Generated | Selected


async def behind_prompts(
    model: ServedModel,
    operations: Iterable[tuple[tuple[Part, ...], Explain | Generate | Select]],
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
    """Run one operation behind each of `count` prompts; return the results in order. Raises the
    first error.

    At most `at_once` prompts run together, so that other requests find room in the queue. `free`:
    nothing is computed, so the key's quota is not charged. The timeout of `handling` holds for all
    together. `param` names the field of a prompt, and `choices` that of choices.
    """
    asker = admitted(counts=not free)
    if model.drain.begun:
        raise model.drain.refusal()
    clock = asyncio.get_running_loop().time
    started = clock()
    results: dict[int, Result] = {}
    waiting = enumerate(operations)
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
                await append(model, sequence, Append(0, 0, parts))
                result = await _behind(model, sequence, op)
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

    opened = OpenSequences(model, end, asker)
    workers = [asyncio.create_task(work()) for _ in range(min(at_once, count))]
    try:
        async with in_time(handling.timeout):
            await asyncio.gather(*workers)
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
    model: ServedModel, sequence: TokenSequence, op: Explain | Generate | Select
) -> Result:
    if isinstance(op, Explain):
        return await explain(model, sequence, op)
    sequence.check_handling(op.handling)
    if isinstance(op, Generate):
        return await Generation(model, sequence, op).run()
    return await Selection(model, sequence, op).run()


async def vectors(
    model: ServedModel,
    inputs: Sequence[tuple[Part, ...]],
    pooling: Pooling | None,
    dimensions: int | None = None,
    **how: Any,
) -> tuple[list[Vector], Usage]:
    """Compute vectors with `find_vectors` for the caller, whose request is counted. `dimensions`
    keeps the first numbers of each. Raises InvalidParameter."""
    size = model.engine.info.hidden_size
    if dimensions is not None and not 0 < dimensions <= size:
        raise InvalidParameter("dimensions", f"dimensions must be from 1 to {size}")
    how["dimensions"] = dimensions
    vectors, usage = await find_vectors(model, inputs, pooling, asker=admitted(), **how)
    note_usage(usage, None)
    return vectors, usage
