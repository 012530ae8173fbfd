"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http import one_shot
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.constraints import Asked, openai_constraint
from rootlace.runtime.gateway.http.conversation import render
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.runtime.gateway.http.logprobs import chat_logprobs
from rootlace.runtime.gateway.http.messages import Message, Tool
from rootlace.runtime.gateway.http.openai_body import SamplingBody, check_best_of
from rootlace.runtime.gateway.http.replies import (
    check_model,
    envelope,
    json_response,
    usage_of,
    wants_usage,
)
from rootlace.runtime.gateway.http.sampling import make_params, sampling_fields, with_sampling
from rootlace.runtime.gateway.http.sse import stream_events
from rootlace.runtime.gateway.http.tool_calls import (
    BEGIN,
    CallFormat,
    ToolCall,
    ToolCallParser,
    split_tool_calls,
)
from rootlace.runtime.gateway.http.tool_choice import forced_call, offered_tools, strict_calls
from rootlace.wire.protocol import Chunk, Generated, Output, Text

MAX_TOP_LOGPROBS = 20


class ChatBody(SamplingBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    echo: Annotated[bool | None, refused("the answer is not appended to its prompt")] = None
    add_special_tokens: Annotated[
        bool | None, refused("the chat template writes the special tokens")
    ] = None
    modalities: Annotated[list[str] | None, refused("the only modality is 'text'", ["text"])] = None
    audio: Annotated[dict[str, Any] | None, refused("only text is produced")] = None
    functions: Annotated[list[Any] | None, refused("use tools")] = None
    function_call: Annotated[str | dict[str, Any] | None, refused("use tool_choice")] = None
    web_search_options: Annotated[dict[str, Any] | None, refused("there is no web search")] = None

    reasoning_effort: Annotated[str | None, ignored("no model served here has levels")] = None
    verbosity: Annotated[str | None, ignored("ask for it in words")] = None
    prediction: Annotated[dict[str, Any] | None, ignored("nothing is drafted")] = None
    moderation: Annotated[dict[str, Any] | None, ignored("nothing is moderated")] = None


_BODY = with_sampling(ChatBody, "openai")


@dataclass(frozen=True)
class _Request:
    """A body, checked and understood. `top` is None without logprobs."""

    model: str
    job: one_shot.Job
    tools: bool
    must_call: bool
    top: int | None
    usage_chunk: bool
    id: str | None


class ChatCompletions:
    """The endpoint's handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._call_format: CallFormat | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, _BODY)
        asked = self._parse(body)
        if body.stream:
            return await stream_events(request, self._stream(asked))
        (result,) = await one_shot.run(self._gateway, [asked.job])
        choices = [
            self._choice(asked, index, output) for index, output in enumerate(result.outputs)
        ]
        head = envelope("chatcmpl", "chat.completion", asked.model, asked.id)
        return json_response({**head, "choices": choices, "usage": usage_of([result])})

    def _parse(self, body: ChatBody) -> _Request:
        model = check_model(self._gateway, body.model)
        tools = offered_tools(body.tool_choice, body.tools)
        constraint, call = openai_constraint(body), forced_call(body, body.tool_choice, body.tools)
        if constraint is not None and call is not None:
            raise InvalidParameter("tool_choice", "a forced call excludes other constraints")
        if constraint is None and call is None and tools:
            constraint = self._strict_calls(body, tools)
        top = _top_logprobs(body)
        fields = sampling_fields(body, "openai")
        check_best_of(body, fields.get("n", 1))
        limit = body.max_completion_tokens
        # None, OpenAI's default here, is what is left of the context.
        fields["max_tokens"] = body.max_tokens if limit is None else limit
        fields["logprobs"] = top is not None
        fields["top_logprobs"] = top
        if tools:
            # The tags around a call are special tokens in some vocabularies.
            fields.setdefault("skip_special_tokens", False)
        names = {} if limit is None else {"max_tokens": "max_completion_tokens"}
        params = make_params(fields, self._gateway.model_info.vocab_size, names)
        parts = render(
            self._gateway,
            body.messages,
            tools,
            body.add_generation_prompt,
            body.chat_template_kwargs,
        )
        if call is not None:
            parts = (*parts, Text(BEGIN, special=True))
        job = one_shot.Job(parts, params, call or constraint, body.cache_salt or "")
        return _Request(
            model, job, bool(tools), call is not None, top, wants_usage(body), body.request_id
        )

    def _strict_calls(self, body: ChatBody, tools: list[Tool]) -> Asked | None:
        if not any(tool.function.strict for tool in tools):
            return None
        if self._call_format is None:
            self._call_format = CallFormat.of(self._gateway.chat)
        return strict_calls(body, tools, self._call_format)

    def _choice(self, asked: _Request, index: int, output: Output) -> dict[str, Any]:
        """One sample, complete."""
        content: str | None = output.text
        calls: list[ToolCall] = []
        if asked.tools:
            content, calls = split_tool_calls(output.text, asked.must_call)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [call.as_openai() for call in calls]
        logprobs = None
        if asked.top is not None:
            logprobs = chat_logprobs(self._gateway.tokenizer, output.logprobs, asked.top)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(output, bool(calls)),
            "matched_stop": output.matched,
        }

    async def _stream(self, asked: _Request) -> AsyncGenerator[object, None]:
        head = envelope("chatcmpl", "chat.completion.chunk", asked.model, asked.id)
        if asked.usage_chunk:
            head["usage"] = None
        deltas = [_Deltas(self._gateway, asked, index) for index in range(asked.job.params.n)]
        result: Generated | None = None
        with one_shot.OneShots(self._gateway, [asked.job], stream=True) as shots:
            async for _, event in shots:
                if isinstance(event, Chunk):
                    choices = deltas[event.index].feed(event)
                else:
                    result = event
                    choices = [
                        choice
                        for index, output in enumerate(event.outputs)
                        for choice in deltas[index].finish(output)
                    ]
                for choice in choices:
                    yield {**head, "choices": [choice]}
        if asked.usage_chunk and result is not None:
            yield {**head, "choices": [], "usage": usage_of([result])}


class _Deltas:
    """The streamed choices (`delta` objects) of one sample."""

    def __init__(self, gateway: Gateway, asked: _Request, index: int) -> None:
        self._tokenizer = gateway.tokenizer
        self._index = index
        self._top = asked.top
        self._parser = ToolCallParser(asked.must_call) if asked.tools else None
        self._calls = 0
        self._begun = False

    def feed(self, chunk: Chunk) -> list[dict[str, Any]]:
        pieces: list[str | ToolCall] = [chunk.text] if chunk.text else []
        if self._parser is not None:
            pieces = self._parser.feed(chunk.text)
        choices = self._begin() + self._of(pieces)
        if self._top is not None and chunk.logprobs:
            if len(choices) == 0 or "role" in choices[-1]["delta"]:
                choices.append(self._choice({}))
            choices[-1]["logprobs"] = chat_logprobs(self._tokenizer, chunk.logprobs, self._top)
        return choices

    def finish(self, output: Output) -> list[dict[str, Any]]:
        choices = self._begin()
        if self._parser is not None:
            choices += self._of(self._parser.finish())
        last = self._choice({})
        last["finish_reason"] = _finish_reason(output, self._calls > 0)
        last["matched_stop"] = output.matched
        return [*choices, last]

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        return [self._choice({"role": "assistant", "content": ""})]

    def _of(self, pieces: list[str | ToolCall]) -> list[dict[str, Any]]:
        choices = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                call = {"index": self._calls, **piece.as_openai()}
                choices.append(self._choice({"tool_calls": [call]}))
                self._calls += 1
            elif not self._calls or piece.strip():  # white space between calls says nothing
                choices.append(self._choice({"content": piece}))
        return choices

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish_reason(output: Output, called: bool) -> str:
    return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


def _top_logprobs(body: ChatBody) -> int | None:
    """How many alternatives to report per token; None without logprobs."""
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidParameter("top_logprobs", "top_logprobs needs logprobs=true")
        return None
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidParameter(
            "top_logprobs", f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], not {top}"
        )
    return top
