"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.anthropic.body import CountBody, MessagesBody
from rootlace.runtime.gateway.http.anthropic.conversation import chat_request
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.chat.blocks import (
    Begin,
    Block,
    BlockEvent,
    Blocks,
    More,
    blocks_of,
)
from rootlace.runtime.gateway.http.chat.chats import Chats, Ended, Prepared
from rootlace.runtime.gateway.http.replies import (
    Reports,
    adapter_of,
    check_model,
    json_response,
    report_of,
)
from rootlace.runtime.gateway.http.sse import NAMED_EVENTS, stream_events
from rootlace.wire.handling import PIN_SECONDS
from rootlace.wire.protocol import Generated, Output, Usage

# The types of deltas, and the fields that hold what is new.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """What the model says."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought."""

    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool that is to be called."""

    id: str
    name: str
    input: dict[str, Any]


class Written(TypedDict):
    """How many tokens were computed up to marks, by the time to live that these ask for."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Reports):
    """The three counts of input tokens add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: Written
    cache_read_input_tokens: int
    output_tokens: int


class MessageHead(TypedDict):
    """What is known of an answer before there is one."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class Stopped(TypedDict):
    """Why an answer ended; a stream says it at its end."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageReply(MessageHead, Stopped):
    """An answer."""

    content: list[TextBlock | ThinkingBlock | ToolUse]
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """So long are the messages."""

    input_tokens: int


@dataclass(frozen=True)
class _Request:
    """A body, checked and understood."""

    model: str
    prepared: Prepared


class Messages:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats) -> None:
        self._gateway = gateway
        self._chats = chats

    async def count_tokens(self, request: web.Request) -> web.Response:
        body = await read_body(request, CountBody)
        check_model(self._gateway, body.model)
        ids = await self._chats.encode(chat_request(body))
        return json_response(TokenCount(len(ids)))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, MessagesBody)
        model = check_model(self._gateway, body.model)
        wanted = replace(chat_request(body), adapter=adapter_of(self._gateway, model))
        asked = _Request(model, await self._chats.prepare(wanted))
        if body.stream:
            return await stream_events(request, self._stream(asked), NAMED_EVENTS)
        ended, (answer,) = await self._chats.run(asked.prepared)
        generated = ended.generated
        reply: MessageReply = {
            **_message(asked.model),
            "content": [_block(block) for block in blocks_of(answer)],
            **_stopped(generated.outputs[0], bool(answer.calls) and not ended.cut_calls[0]),
            "usage": _usage_and_report(generated, asked.prepared),
        }
        return json_response(reply)

    async def _stream(self, asked: _Request) -> AsyncGenerator[dict[str, Any], None]:
        blocks, calls = Blocks(), 0
        begun = False
        async with aclosing(self._chats.stream(asked.prepared)) as events:
            async for event in events:
                if not begun:
                    begun = True
                    found = event.generated.usage if isinstance(event, Ended) else event.begun
                    yield _start(asked, found or Usage())
                if not isinstance(event, Ended):
                    for change in blocks.take(event.deltas):
                        calls += isinstance(change, Begin) and change.block.kind == "call"
                        yield _event(change)
                    continue
                for change in blocks.finish():
                    yield _event(change)
                called = calls > 0 and not event.cut_calls[0]
                yield _end(event.generated, called, asked.prepared)
        yield {"type": "message_stop"}


_STOPPED_NOT: Stopped = {"stop_reason": None, "stop_sequence": None}


def _message(model: str) -> MessageHead:
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }


def _start(asked: _Request, found: Usage) -> dict[str, Any]:
    usage = _usage(msgspec.structs.replace(found, completion_tokens=0), asked.prepared)
    message = {**_message(asked.model), "content": [], **_STOPPED_NOT, "usage": usage}
    return {"type": "message_start", "message": message}


def _event(change: BlockEvent) -> dict[str, Any]:
    index = change.block.index
    if isinstance(change, Begin):
        empty = Block(index, change.block.kind, change.block.name)
        return {"type": "content_block_start", "index": index, "content_block": _block(empty)}
    if isinstance(change, More):
        kind, field = _DELTAS[change.block.kind]
        delta = {"type": kind, field: change.text}
        return {"type": "content_block_delta", "index": index, "delta": delta}
    return {"type": "content_block_stop", "index": index}


def _end(generated: Generated, called: bool, prepared: Prepared) -> dict[str, Any]:
    return {
        "type": "message_delta",
        "delta": _stopped(generated.outputs[0], called),
        "usage": _usage_and_report(generated, prepared),
    }


def _block(block: Block) -> TextBlock | ThinkingBlock | ToolUse:
    if block.kind == "text":
        return TextBlock(block.text)
    if block.kind == "thoughts":
        return ThinkingBlock(block.text)
    return ToolUse(f"toolu_{uuid.uuid4().hex[:24]}", block.name, _input(block.text))


def _input(arguments: str) -> Any:
    """The arguments as an object; an empty one where they were cut off."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _stopped(output: Output, called: bool) -> Stopped:
    if output.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(output.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_and_report(generated: Generated, prepared: Prepared) -> MessageUsage:
    return {**_usage(generated.usage, prepared), **report_of(generated)}


def _usage(usage: Usage, prepared: Prepared) -> MessageUsage:
    """All of a prompt is cached; what was computed counts as written where a client marked it.

    The three counts of the prompt's tokens add up to it.
    """
    written: Written = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    for pin, tokens in zip(prepared.job.pins, usage.written, strict=False):
        hour = (pin.cache.ttl or 0.0) > PIN_SECONDS
        written["ephemeral_1h_input_tokens" if hour else "ephemeral_5m_input_tokens"] += tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - sum(usage.written),
        "cache_creation_input_tokens": sum(usage.written),
        "cache_creation": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
