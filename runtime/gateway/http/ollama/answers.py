"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.chat.blocks import Block, Blocks, End, More, blocks_of
from rootlace.runtime.gateway.http.chat.chats import Chats, Ended, Prepared
from rootlace.runtime.gateway.http.chat.request import ChatRequest
from rootlace.runtime.gateway.http.chat.thinking import thinking_arguments
from rootlace.runtime.gateway.http.handling import handling_of
from rootlace.runtime.gateway.http.ollama.body import (
    DEFAULTS,
    NAMES,
    AnswerBody,
    ChatBody,
    GenerateBody,
    constraint_of,
    fields_of,
    messages_of,
    tools_of,
)
from rootlace.runtime.gateway.http.ollama.models import check_name
from rootlace.runtime.gateway.http.prompts import Prompt
from rootlace.runtime.gateway.http.replies import Reports, adapter_of, json_response, report_of
from rootlace.runtime.gateway.http.sse import LINES, stream_events
from rootlace.wire.protocol import Generated


class CalledTool(TypedDict):
    """A tool, and its arguments."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """A call that the model makes."""

    function: CalledTool


class Said(TypedDict, total=False):
    """What an answer holds beside its text."""

    thinking: str
    tool_calls: list[ToolCall]


class Message(Said):
    """A chat's answer, or a piece of it."""

    role: Literal["assistant"]
    content: str


class Line(Reports):
    """What every line of a stream tells, and a whole answer; the last line, or a whole answer that
    is not empty, has the figures. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatLine(Line):
    """Of a chat."""

    message: Message


class GenerateLine(Line, Said):
    """Of an answer to a prompt."""

    response: str


@dataclass(frozen=True)
class _Request:
    """A body, checked and understood."""

    model: str
    prepared: Prepared
    chat: bool
    thoughts: bool


class Answers:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats) -> None:
        self._gateway = gateway
        self._chats = chats

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatBody)
        model = check_name(self._gateway, body.model)
        if not body.messages:  # that is how Ollama's clients load a model
            return json_response({**_head(model), **_text(True, ""), **_LOADED})
        messages, tools = messages_of(body.messages), tools_of(body.tools)
        wanted = self._wanted(body, model, messages, tools=tools)
        return await self._answer(
            request, body, _asked(body, model, await self._chats.prepare(wanted), True)
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, GenerateBody)
        model = check_name(self._gateway, body.model)
        if not body.prompt:
            return json_response({**_head(model), **_text(False, ""), **_LOADED})
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*messages, {"role": "user", "content": body.prompt}]
        wanted = self._wanted(body, model, messages)
        if body.raw:
            prepared = self._chats.prepare_text(wanted, Prompt(text=body.prompt).parts())
        else:
            prepared = await self._chats.prepare(wanted)
        return await self._answer(request, body, _asked(body, model, prepared, False))

    def _wanted(
        self, body: AnswerBody, model: str, messages: list[dict[str, Any]], **more: Any
    ) -> ChatRequest:
        # A level, such as "high", says that the model is to think, too.
        effort = body.think if isinstance(body.think, str) else None
        thinking = bool(body.think) if body.think is not None else None
        return ChatRequest(
            messages=messages,
            fields=fields_of(body.options),
            names=NAMES,
            defaults=DEFAULTS,
            constraint=constraint_of(body),
            template=thinking_arguments(thinking, effort),
            thinking_budget=body.thinking_budget,
            adapter=adapter_of(self._gateway, model),
            namespace=body.cache_salt or "",
            cache_report=bool(body.return_cache_report),
            handling=handling_of(body),
            **more,
        )

    async def _answer(
        self, request: web.Request, body: AnswerBody, asked: _Request
    ) -> web.StreamResponse:
        if body.stream is not False:
            return await stream_events(request, self._stream(asked), LINES)
        begun = time.monotonic()
        ended, (answer,) = await self._chats.run(asked.prepared)
        generated = ended.generated
        reply = _text(asked.chat, answer.content)
        target = reply["message"] if asked.chat else reply
        if answer.reasoning and asked.thoughts:
            target["thinking"] = answer.reasoning
        if calls := [call for block in blocks_of(answer) if (call := _call(block)) is not None]:
            target["tool_calls"] = calls
        return json_response({**_head(asked.model), **reply, **_done(generated, begun)})

    async def _stream(self, asked: _Request) -> AsyncGenerator[dict[str, Any], None]:
        begun, blocks = time.monotonic(), Blocks()
        async with aclosing(self._chats.stream(asked.prepared)) as events:
            async for event in events:
                ended = isinstance(event, Ended)
                changes = blocks.finish() if isinstance(event, Ended) else blocks.take(event.deltas)
                for change in changes:
                    kind = change.block.kind
                    reply = _text(asked.chat, "")
                    target = reply["message"] if asked.chat else reply
                    if isinstance(change, More) and kind == "text":
                        reply = _text(asked.chat, change.text)
                    elif isinstance(change, More) and kind == "thoughts" and asked.thoughts:
                        target["thinking"] = change.text
                    elif isinstance(change, End) and (call := _call(change.block)) is not None:
                        # Ollama's clients take a call in one piece.
                        target["tool_calls"] = [call]
                    else:
                        continue
                    yield {**_head(asked.model), **reply, "done": False}
                if ended:
                    last = _done(event.generated, begun)  # type: ignore[union-attr]
                    yield {**_head(asked.model), **_text(asked.chat, ""), **last}


_LOADED = {"done": True, "done_reason": "load"}


def _asked(body: AnswerBody, model: str, prepared: Prepared, chat: bool) -> _Request:
    return _Request(model, prepared, chat, thoughts=body.think is not False)


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _text(chat: bool, text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} if chat else {"response": text}


def _call(block: Block) -> dict[str, Any] | None:
    """None for what is no call: one that was cut has no arguments that could be read."""
    try:
        arguments = msgspec.json.decode(block.text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if block.kind != "call" or not isinstance(arguments, dict):
        return None
    return {"function": {"name": block.name, "arguments": arguments}}


def _done(generated: Generated, begun: float) -> dict[str, Any]:
    """What the last line tells; durations in nanoseconds."""
    usage, timing = generated.usage, generated.timing
    first = timing.first_token - timing.queued
    return {
        "done": True,
        "done_reason": "length" if generated.outputs[0].finish_reason == "length" else "stop",
        "total_duration": _nanoseconds(time.monotonic() - begun),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(timing.total - timing.first_token),
        **report_of(generated),
    }


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
