"""Offline generation without a program: prompts in, dictionaries out (sglang's `Engine`)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rootlace.client.runtime import Runtime
from rootlace.language import sampling
from rootlace.language.expressions import Appendable, Gen, TokenIds
from rootlace.language.failures import call_site
from rootlace.language.sampling import with_keywords
from rootlace.program.branch import Branch
from rootlace.program.operations import Generation
from rootlace.program.run import ProgramRun
from rootlace.wire.errors import InvalidRequest

_NAME = "output"
Reply = dict[str, Any]


class _Request:
    """Request for one prompt: an append and a gen. A caller that stops waiting cancels `run`."""

    def __init__(self, engine: Engine, prompt: Appendable, options: dict[str, Any], stream: bool):
        self.n: int = options.get("n", 1)
        self.run = ProgramRun(engine, {}, stream=stream)
        self._branch = Branch(self.run)
        try:
            self._branch.append(prompt)
            self._branch.append(Gen(_NAME, options, call_site()))
        finally:
            self._last = self.run.finish()

    def replies(self) -> list[Reply]:
        """Return one reply per sample, once the request is over."""
        generation = self._branch.variables[_NAME]
        assert isinstance(generation, Generation)
        return [_reply(text, meta) for text, meta in generation.samples()]

    def wait(self) -> list[Reply]:
        self.run.wait_for(self._last)
        return self.replies()

    async def wait_async(self) -> list[Reply]:
        await self.run.wait_for_async(self._last)
        return self.replies()

    def stream(self) -> Iterator[tuple[int, Reply]]:
        """Yield (sample's index, reply): the first sample as it arrives, the others at the end."""
        text = ""
        for new, meta in self._branch.steps(_NAME):
            text += new
            yield 0, _reply(text, meta or {})
        yield from enumerate(self.replies()[1:], 1)

    async def stream_async(self) -> AsyncIterator[tuple[int, Reply]]:
        text = ""
        async for new, meta in self._branch.steps_async(_NAME):
            text += new
            yield 0, _reply(text, meta or {})
        for numbered in enumerate(self.replies()[1:], 1):
            yield numbered


def _reply(text: str, meta: Mapping[str, Any]) -> Reply:
    info = dict(meta)
    return {"text": text, "output_ids": info.pop("output_ids", []), "meta_info": info}


class Engine(Runtime):
    """Runtime for generation from plain prompts (see `Runtime` for the options). Also usable as the
    backend of programs."""

    @with_keywords(inspect.signature(Runtime).parameters.values())
    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        model: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, model_path=model_path, **options)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        stream: bool = False,
    ) -> Any:
        """Continue `prompt` (text) or `input_ids`. One prompt returns a reply, a list returns a
        list.

        A reply is {"text", "output_ids", "meta_info"}. `sampling_params` has sglang's names or
        OpenAI's; a list has one element per prompt. With `n` > 1 the list has each prompt's samples
        in turn. With `stream`, returns an iterator of replies with cumulative text; several replies
        carry their "index" in that list. Of a prompt's samples only the first streams.

        Raises ProgramError with the runtime's reason, TypeError for an unknown parameter.
        """
        logprobs = _logprob_options(return_logprob, logprob_start_len, top_logprobs_num)
        requests, single = self._start(prompt, input_ids, sampling_params, logprobs, stream)
        if stream:
            return _one_after_other(requests, single)
        try:
            return _flat([request.wait() for request in requests], single)
        except BaseException:
            _cancel(requests)
            raise

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        stream: bool = False,
    ) -> Any:
        """Generate as `generate` on an event loop; `stream` returns an asynchronous iterator."""
        import asyncio

        logprobs = _logprob_options(return_logprob, logprob_start_len, top_logprobs_num)
        requests, single = self._start(prompt, input_ids, sampling_params, logprobs, stream)
        if stream:
            return _interleaved(requests, single)
        try:
            replies = await asyncio.gather(*[request.wait_async() for request in requests])
        except BaseException:
            _cancel(requests)
            raise
        return _flat(replies, single)

    def _start(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        logprobs: Mapping[str, Any],
        stream: bool,
    ) -> tuple[list[_Request], bool]:
        prompts, single = _prompts(prompt, input_ids)
        options = _options(sampling_params, len(prompts))
        resolved = [sampling.normalise({**own, **logprobs}, "generate()") for own in options]
        requests: list[_Request] = []
        try:
            for text, own in zip(prompts, resolved, strict=True):
                requests.append(_Request(self, text, own, stream))
        except BaseException:
            _cancel(requests)
            raise
        return requests, single


def _logprob_options(
    return_logprob: bool | None, start: int | None, top: int | None
) -> dict[str, Any]:
    options = {
        "return_logprob": return_logprob,
        "logprob_start_len": start,
        "top_logprobs_num": top,
    }
    return {name: value for name, value in options.items() if value is not None}


def _prompts(prompt: Any, input_ids: Any) -> tuple[list[Appendable], bool]:
    """Return the prompts, and whether a single one was given instead of a list."""
    if (prompt is None) == (input_ids is None):
        raise TypeError("generate() needs either prompt or input_ids")
    if prompt is not None:
        if isinstance(prompt, str):
            return [prompt], True
        texts = list(prompt)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("prompt must be a string or a list of strings")
        return texts, False
    ids = list(input_ids)
    if not ids:
        raise InvalidRequest("input_ids must not be empty")
    single = isinstance(ids[0], int)
    rows = [ids] if single else [list(row) for row in ids]
    for row in rows:
        if not all(isinstance(token, int) and token >= 0 for token in row):
            raise InvalidRequest("input_ids must be token ids (integers from 0)")
    return [TokenIds(tuple(row)) for row in rows], single


def _options(params: Any, size: int) -> list[Mapping[str, Any]]:
    if params is None:
        return [{}] * size
    if isinstance(params, Mapping):
        return [params] * size
    options = list(params)
    if len(options) != size:
        raise InvalidRequest(f"{size} prompts, but {len(options)} sampling_params")
    return options


def _flat(replies: list[list[Reply]], single: bool) -> Any:
    flat = [reply for group in replies for reply in group]
    return flat[0] if single and len(flat) == 1 else flat


def _cancel(requests: list[_Request]) -> None:
    """Abort the running requests."""
    for request in requests:
        request.run.cancel()


def _indices(requests: list[_Request], single: bool) -> list[int | None]:
    """Return the index of each request's first sample; None for a single reply."""
    if single and requests[0].n == 1:
        return [None]
    return list(itertools.accumulate((request.n for request in requests[:-1]), initial=0))


def _indexed(first: int | None, sample: int, reply: Reply) -> Reply:
    return reply if first is None else {**reply, "index": first + sample}


def _one_after_other(requests: list[_Request], single: bool) -> Iterator[Reply]:
    try:
        for first, request in zip(_indices(requests, single), requests, strict=False):
            for sample, reply in request.stream():
                yield _indexed(first, sample, reply)
    finally:
        _cancel(requests)


async def _interleaved(requests: list[_Request], single: bool) -> AsyncIterator[Reply]:
    """Yield replies of all requests, as they arrive."""
    import asyncio

    replies: asyncio.Queue[Reply | None] = asyncio.Queue()

    async def pump(first: int | None, request: _Request) -> None:
        async for sample, reply in request.stream_async():
            await replies.put(_indexed(first, sample, reply))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for first, request in zip(_indices(requests, single), requests, strict=False):
                    group.create_task(pump(first, request))
        finally:
            _cancel(requests)
            await replies.put(None)

    pumping = asyncio.ensure_future(pump_all())
    try:
        while (reply := await replies.get()) is not None:
            yield reply
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    if not pumping.cancelled() and (error := pumping.exception()) is not None:
        raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error
