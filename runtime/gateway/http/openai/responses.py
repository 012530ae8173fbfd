"""`POST /v1/responses`, and responses that were kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.batches.paging import Deleted, page
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.chat.blocks import Block, BlockEvent, Blocks, End, blocks_of
from rootlace.runtime.gateway.http.chat.chats import Chats, Ended, Prepared
from rootlace.runtime.gateway.http.chat.request import ChatRequest
from rootlace.runtime.gateway.http.chat.thinking import thinking_arguments
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import check_refused
from rootlace.runtime.gateway.http.handling import handling_of
from rootlace.runtime.gateway.http.holds import Holds
from rootlace.runtime.gateway.http.openai.conversation import call_of
from rootlace.runtime.gateway.http.openai.response_inputs import (
    PAGE,
    InputQuery,
    ResponseQuery,
    input_items,
)
from rootlace.runtime.gateway.http.openai.response_items import Items, OutputItem
from rootlace.runtime.gateway.http.openai.response_store import ResponseStore, Stored
from rootlace.runtime.gateway.http.openai.responses_body import (
    RESPONSES_BODY,
    ResponsesBody,
    check_include,
    constraint_of,
    messages_of,
    tool_choice,
    tools_of,
)
from rootlace.runtime.gateway.http.query import read_query
from rootlace.runtime.gateway.http.replies import (
    Reports,
    adapter_of,
    check_model,
    json_response,
    report_of,
)
from rootlace.runtime.gateway.http.sampling import sampling_fields
from rootlace.runtime.gateway.http.sse import NAMED_EVENTS, stream_events
from rootlace.runtime.gateway.keys.account import owner
from rootlace.wire.errors import RootlaceError
from rootlace.wire.sampling import SamplingParams


class InputDetails(TypedDict):
    """How the tokens of the conversation came to be."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """How many tokens of the answer are thoughts."""

    reasoning_tokens: int


class ResponseUsage(Reports):
    """So many tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseHead(TypedDict):
    """What is known before there is an answer; the client's own settings among it."""

    id: str
    object: Literal["response"]
    created_at: float
    model: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseReply(ResponseHead):
    """A response, complete."""

    status: Literal["completed", "incomplete"]
    completed_at: float | None
    output: list[OutputItem]
    usage: ResponseUsage


@dataclass(frozen=True)
class _Request:
    """A body, checked and understood. `before` and `new` are its conversation."""

    prepared: Prepared
    head: ResponseHead
    before: tuple[dict[str, Any], ...]
    new: list[dict[str, Any]]
    store: bool
    salt: str
    previous: Stored | None
    items: Items = field(default_factory=Items)


class Responses:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats, store: ResponseStore, holds: Holds) -> None:
        self._gateway = gateway
        self._chats = chats
        self._store = store
        self._holds = holds

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, RESPONSES_BODY)
        asked = await self._parse(body)
        if body.stream:
            return await stream_events(request, self._stream(asked), NAMED_EVENTS)
        ended, (answer,) = await self._chats.run(asked.prepared)
        response = self._ended(asked, blocks_of(answer), ended)
        await self._store.flush()
        return json_response(response)

    async def get(self, request: web.Request) -> web.Response:
        check_refused(read_query(request, ResponseQuery))
        return json_response(self._store.get(request.match_info["id"], owner=owner()).response)

    async def inputs(self, request: web.Request) -> web.Response:
        """What a response was made from: all of its conversation but the answer."""
        query, response_id = read_query(request, InputQuery), request.match_info["id"]
        messages = self._store.get(response_id, owner=owner()).messages[:-1]
        return json_response(page(query, input_items(response_id, messages), PAGE))

    async def delete(self, request: web.Request) -> web.Response:
        response_id = request.match_info["id"]
        self._store.delete(response_id, owner())
        await self._store.flush()
        return json_response(Deleted(response_id, "response"))

    async def _parse(self, body: ResponsesBody) -> _Request:
        model = check_model(self._gateway, body.model)
        check_include(body)
        previous = None
        if body.previous_response_id is not None:
            previous = self._store.get(
                body.previous_response_id, "previous_response_id", owner(), body.cache_salt or ""
            )
        before = previous.messages if previous is not None else ()
        store, handling = body.store is not False, handling_of(body)
        new = messages_of(body.input, before)
        fields = sampling_fields(body, "openai")
        if fields.get("n", 1) != 1:
            raise InvalidParameter("n", "a response is one answer: n must be 1")
        if body.max_output_tokens is not None:
            fields["max_tokens"] = body.max_output_tokens
        # Instructions hold for one request: they are not part of what is kept.
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        request = ChatRequest(
            messages=_with_one_system([*system, *before, *new]),
            fields=fields,
            names={"max_tokens": "max_output_tokens"},
            tools=tools_of(body),
            choice=tool_choice(body),
            constraint=constraint_of(body),
            template=thinking_arguments(effort=body.reasoning.effort if body.reasoning else None),
            thinking_budget=body.thinking_budget,
            namespace=body.cache_salt or "",
            cache_report=bool(body.return_cache_report),
            handling=handling,
            adapter=adapter_of(self._gateway, model),
            # What is not shared ends with the request.
            keep=store and handling.cache.share,
            # Another model has other tokens.
            behind=previous.held if previous and previous.response["model"] == model else None,
            param="input",
        )
        prepared = await self._chats.prepare(request)
        return _Request(
            prepared,
            _head(body, model, prepared.job.params),
            before,
            new,
            store,
            body.cache_salt or "",
            previous,
        )

    async def _stream(self, asked: _Request) -> AsyncGenerator[dict[str, Any], None]:
        blocks, written, number = Blocks(), list[Block](), 0

        def numbered(event: dict[str, Any]) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {**event, "sequence_number": number - 1}

        def changed(changes: list[BlockEvent], *status: str) -> list[dict[str, Any]]:
            written.extend(change.block for change in changes if isinstance(change, End))
            return [numbered(event) for c in changes for event in asked.items.events(c, *status)]

        started = {**asked.head, "status": "in_progress", "output": [], "usage": None}
        try:
            async with aclosing(self._chats.stream(asked.prepared)) as events:
                async for event in events:
                    if not number:
                        for name in ("response.created", "response.in_progress"):
                            yield numbered({"type": name, "response": started})
                    if not isinstance(event, Ended):
                        for one in changed(blocks.take(event.deltas)):
                            yield one
                        continue
                    last = changed(blocks.finish(), "incomplete" if _cut(event) else "completed")
                    whole = self._ended(asked, written, event)
                    await self._store.flush()
                    for one in last:
                        yield one
                    yield numbered({"type": f"response.{whole['status']}", "response": whole})
        except RootlaceError as error:
            if not number:
                raise
            fault = {"code": "server_error", "message": str(error)}
            failed = {**started, "status": "failed", "error": fault}
            yield numbered({"type": "response.failed", "response": failed})

    def _ended(self, asked: _Request, blocks: list[Block], ended: Ended) -> ResponseReply:
        """The whole response, which is kept."""
        cut = _cut(ended)
        response: ResponseReply = {
            **asked.head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "completed_at": None if cut else time.time(),
            "output": [asked.items.item(block) for block in blocks],
            "usage": _usage(ended),
        }
        if cut and response["output"]:
            response["output"][-1].status = "incomplete"
        if asked.store:
            self._keep(asked, ended, response, _message(blocks, asked.items))
        return response

    def _keep(
        self, asked: _Request, ended: Ended, response: ResponseReply, answer: dict[str, Any]
    ) -> None:
        """Store the response, and hold its branch, of which the one before is the beginning."""
        let_go: Callable[[], None] = _nothing
        if ended.session is not None:
            usage = ended.generated.usage
            tokens = usage.prompt_tokens + usage.completion_tokens
            let_go = self._holds.add(ended.session, tokens)
            if asked.previous is not None:
                asked.previous.let_go()
        new = [*asked.new, answer]
        self._store.put(response, asked.before, new, owner(), asked.salt, ended.held, let_go)


def _cut(ended: Ended) -> str:
    """Why the last item is not whole; empty where it is."""
    if ended.generated.outputs[0].finish_reason == "length":
        return "max_output_tokens"
    return "stop" if ended.cut_calls[0] else ""


def _nothing() -> None:
    """There is no branch to let go."""


def _head(body: ResponsesBody, model: str, params: SamplingParams) -> ResponseHead:
    form = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        given = body.text.format
        form = {name: value for name in given.__struct_fields__ if (value := getattr(given, name))}
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in body.tools or ()
    ]
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With what the system says at the beginning in one message: templates take no more."""
    leading = []
    for message in messages:
        if message["role"] != "system":
            break
        leading.append(message["content"])
    if len(leading) <= 1:
        return messages
    return [{"role": "system", "content": "\n\n".join(leading)}, *messages[len(leading) :]]


def _message(blocks: list[Block], items: Items) -> dict[str, Any]:
    """The answer as chat templates take it."""
    texts: dict[str, str] = {"text": "", "thoughts": ""}
    calls = []
    for block in blocks:
        if block.kind == "call":
            calls.append(call_of(items.call_id(block), block.name, block.text))
        else:
            texts[block.kind] += block.text
    message: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    if texts["thoughts"]:
        message["reasoning_content"] = texts["thoughts"]
    if calls:
        message["tool_calls"] = calls
    return message


def _usage(ended: Ended) -> ResponseUsage:
    usage = ended.generated.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **report_of(ended.generated),
    }
