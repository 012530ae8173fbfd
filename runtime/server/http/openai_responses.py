"""`POST /v1/responses`, and kept responses."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, TypedDict, cast

import msgspec
from msgspec.structs import replace

from rootlace.runtime.server.auth import owner
from rootlace.runtime.server.http.batch_store import Deleted, Listing, page
from rootlace.runtime.server.http.body import MANY, Body, History, ignored, refused, with_fields
from rootlace.runtime.server.http.chat_pipeline import Chats
from rootlace.runtime.server.http.chat_request import (
    Block,
    BlockEvent,
    Blocks,
    Budget,
    ChatRequest,
    End,
    More,
    Tool,
    ToolChoice,
    blocks_of,
    thinking_arguments,
)
from rootlace.runtime.server.http.connections import note_warning
from rootlace.runtime.server.http.constraints import Rule, schema_constraint
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import AnswerStream, FinalOutput, Prepared
from rootlace.runtime.server.http.logprobs import chosen_tokens, rows_of
from rootlace.runtime.server.http.replies import NAMED_EVENTS, Reports, Stream, report_of
from rootlace.runtime.server.http.request_fields import (
    ACCOUNT,
    CACHE,
    CLIENTS_RUN,
    ContentPart,
    HandlingBody,
    TopLogprobs,
    call_of,
    placed,
    sampling_fields,
    text_of,
    with_sampling,
)
from rootlace.runtime.server.http.response_store import (
    PAGE,
    InputItem,
    InputQuery,
    Items,
    OutputItem,
    ResponseQuery,
    ResponseStore,
    Stored,
    input_items,
    qualified,
)
from rootlace.runtime.server.http.sglang_sessions import PrefixHolds
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.runtime.server.server_state import call_for, nothing
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import TokenLogprob
from rootlace.wire.sampling import SamplingParams

# Responses body -----------------------------------------------------------------------------------
#
# Body of `POST /v1/responses`, and its conversation for chat templates.


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Extra contents that clients may ask OpenAI for."""


_NO_SEARCH = ignored("there is no web search")


class Item(History):
    """Message, call, its result, or thoughts. Items of an answer may be sent back."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class _Function(Body, kw_only=True):
    ONLY: ClassVar[str] = CLIENTS_RUN

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, refused("there is no search for tools")] = None
    allowed_callers: Annotated[Any, ignored("the model is the only caller")] = None
    output_schema: Annotated[Any, ignored("templates have no place for it")] = None


class FunctionTool(_Function, kw_only=True):
    type: Literal["function"]
    name: str


@with_fields((_NO_SEARCH, Any, "filters search_content_types search_context_size user_location"))
class ResponseTool(_Function, kw_only=True):
    """Function, several functions under a namespace, or a web search. A web search without
    `external_web_access`, which Codex offers by default, is left out with a warning."""

    type: Literal["function", "namespace", "web_search"]
    name: str = ""
    tools: list[FunctionTool] | None = None
    external_web_access: bool | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, ignored("ask for it in words")] = None


class ReasoningConfig(Body):
    effort: str | None = None
    summary: Annotated[str | None, ignored("thoughts are shown as they are")] = None
    generate_summary: Annotated[str | None, ignored("thoughts are shown as they are")] = None


@with_sampling("openai")
@with_fields(
    (ACCOUNT, str, "user service_tier safety_identifier"),
    (ACCOUNT, Any, "client_metadata"),
    (CACHE, str, "prompt_cache_key prompt_cache_retention"),
    (CACHE, dict[str, Any], "prompt_cache_options"),
    (ignored("nothing is obfuscated"), Any, "stream_options"),
    (ignored("the client runs the tools"), int, "max_tool_calls"),
    (ignored("nothing is moderated"), Any, "moderation"),
    (refused("every request is waited for"), bool, "background"),
    (refused("use previous_response_id"), Any, "conversation"),
    (refused("no prompts are stored"), Any, "prompt"),
    (refused("the whole conversation is read"), Any, "context_management"),
)
class ResponsesBody(HandlingBody):
    """Body of `POST /v1/responses`, without the fields that `with_sampling` adds. `cache_salt` and
    `return_cache_report` are Rootlace's."""

    input: str | Annotated[list[Item], MANY]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Chosen | _Allowed | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking_budget: Budget | None = None
    metadata: dict[str, str] | None = None
    # All contents are always included, thoughts as plain text; log-probabilities on request.
    include: list[Included] | None = None
    top_logprobs: TopLogprobs | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None


class _Chosen(msgspec.Struct, tag_field="type", tag="function", omit_defaults=True):
    name: str
    namespace: str | None = None


class _Allowed(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[_Chosen]


def messages_of(
    items: str | list[Item], before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Turn the input into messages: calls and thoughts join the assistant's message beside them.

    Raises InvalidParameter for content that is not text, and for a result without its call. The
    call stands in the input or in the messages `before`.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise InvalidParameter("input", "input must not be empty")
    messages: list[dict[str, Any]] = []
    calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    thoughts = ""
    for index, item in enumerate(items):
        param = f"input[{index}]"
        if item.type == "reasoning":
            thoughts += text_of(item.content or [], f"{param}.content")
        elif item.type == "function_call_output":
            content = text_of(_required(item, "output", param), f"{param}.output")
            call_id = _required(item, "call_id", param)
            if call_id not in calls:
                raise InvalidParameter(
                    f"{param}.call_id", f"{param}.call_id: there is no call {call_id!r} before it"
                )
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif item.type == "function_call":
            name, call_id = _required(item, "name", param), _required(item, "call_id", param)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_of(call_id, qualified(item.namespace, name), item.arguments)
            calls.add(call_id)
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            # "developer" is OpenAI's newer name of the system role; templates know the old one.
            role = _required(item, "role", param).replace("developer", "system")
            content = text_of(_required(item, "content", param), f"{param}.content")
            messages.append({"role": role, "content": content})
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def tool_choice(body: ResponsesBody) -> ToolChoice:
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    # True is OpenAI's default, which clients send on their own.
    parallel = False if parallel is False else None
    if isinstance(choice, _Chosen):
        return ToolChoice("required", qualified(choice.namespace, choice.name))
    if isinstance(choice, _Allowed):
        names = tuple(qualified(tool.namespace, tool.name) for tool in choice.tools)
        return ToolChoice(choice.mode, parallel=parallel, allowed=names)
    return ToolChoice(choice or "auto", parallel=parallel)


def offered(tools: Sequence[ResponseTool]) -> Iterator[Tool]:
    """Give the functions that the model may call, those of a namespace by `qualified` names. The
    first of these describes the namespace.

    Raises InvalidParameter for a missing name, for tools within a function, for two tools of one
    name, and for a web search.
    """
    known = {tool.name for tool in tools if tool.type == "function"}
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type == "web_search":
            reason = "there is no web search"
            if tool.external_web_access is not False:
                raise InvalidParameter(f"{param}.type", f"{param}.type: {reason}: {CLIENTS_RUN}")
            note_warning(f"{param}: {reason}, so the tool is left out")
            continue
        if not tool.name:
            raise InvalidParameter(f"{param}.name", f"{param}.name is missing")
        if (tool.tools is None) is (tool.type == "namespace"):
            raise InvalidParameter(f"{param}.tools", f"{param}.tools go with the type 'namespace'")
        if tool.tools is None:
            yield Tool(tool.name, tool.description, tool.parameters, tool.strict)
        about = tool.description
        for at, one in enumerate(tool.tools or ()):
            where = f"{param}.tools[{at}].name"
            if not one.name:
                raise InvalidParameter(where, f"{where} is missing")
            texts = [text for text in (about, one.description) if text]
            name, about = qualified(tool.name, one.name), None
            if name in known:
                raise InvalidParameter(where, f"{where}: another tool is known as {name!r}, too")
            known.add(name)
            yield Tool(name, "\n\n".join(texts) or None, one.parameters, one.strict)


def _shown(tool: ResponseTool | FunctionTool) -> dict[str, Any]:
    """Return a tool in the form of responses."""
    if tool.type == "web_search":
        return {"type": tool.type}
    shown = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, ResponseTool) and tool.tools is not None:
        return {**shown, "tools": [_shown(one) for one in tool.tools]}
    return {**shown, "parameters": tool.parameters, "strict": tool.strict}


def constraint_of(body: ResponsesBody) -> Rule | None:
    """Return the constraint of `text.format`."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type == "text":
        if form.schema is not None:
            raise InvalidParameter("text.format.schema", "a schema needs the type 'json_schema'")
        return None
    schema = form.schema
    if schema is None and form.type == "json_object":
        schema = {"type": "object"}
    if schema is None:
        raise InvalidParameter("text.format.schema", "text.format.schema is missing")
    return schema_constraint(schema, "text.format", form.strict is True)


def _required(item: Item, field: str, param: str) -> Any:
    value = getattr(item, field)
    if value is None:
        raise InvalidParameter(f"{param}.{field}", f"{param}.{field} is missing")
    return value


# Responses ----------------------------------------------------------------------------------------


class InputDetails(TypedDict):
    """Origin of the conversation's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Tokens of the answer that are thoughts."""

    reasoning_tokens: int


class ResponseUsage(Reports):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseHead(TypedDict):
    """Head of a response, known before the answer; includes the client's settings."""

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
    tool_choice: Literal["auto", "none", "required"] | _Chosen | _Allowed
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]


class ResponseReply(ResponseHead):
    """Response, complete."""

    status: Literal["completed", "incomplete"]
    completed_at: float | None
    output: list[OutputItem]
    usage: ResponseUsage


class InputTokens(msgspec.Struct):
    """Length of a response's conversation in tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class _Request(msgspec.Struct, frozen=True):
    """Body, checked and parsed. `before` and `new` are its conversation."""

    prepared: Prepared
    head: ResponseHead
    before: tuple[dict[str, Any], ...]
    new: list[dict[str, Any]]
    store: bool
    salt: str
    previous: Stored | None
    items: Items


class Responses:
    """Handlers of responses."""

    def __init__(
        self, served: ServedModel, chats: Chats, store: ResponseStore, holds: PrefixHolds
    ) -> None:
        self._served = served
        self._chats = chats
        self._store = store
        self._holds = holds

    async def handle(self, body: ResponsesBody) -> ResponseReply | Stream:
        request = await self._parse(body)
        if body.stream:
            return Stream(self._stream(request), NAMED_EVENTS)
        ended, (answer,) = await AnswerStream.whole(self._served, request.prepared)
        blocks, tokens = blocks_of(answer), ended.generated.outputs[0].logprobs
        grown = [More(block, block.text, block.logprobs) for block in blocks]
        await call_for(rows_of([ended.generated]), self._score, request, grown, tokens)
        response = self._ended(request, blocks, ended)
        await self._store.flush()
        return response

    async def count(self, body: ResponsesBody) -> InputTokens:
        model = check_name(self._served.model_info, body.model)
        _, _, request = await self._wanted(body, model)
        tokens = await self._chats.encode(replace(request, keep=False, behind=None))
        return InputTokens(len(tokens))

    async def get(self, id: str, query: ResponseQuery) -> ResponseReply:
        return cast(ResponseReply, self._store.get(id, owner=owner()).response)

    async def inputs(self, id: str, query: InputQuery) -> Listing[InputItem]:
        """Return a response's input: all of its conversation but the answer."""
        stored = self._store.get(id, owner=owner())
        items = input_items(id, stored.messages[:-1], stored.response["tools"])
        return page(query, items, PAGE)

    async def delete(self, id: str) -> Deleted:
        self._store.delete(id, owner())
        await self._store.flush()
        return Deleted(id, "response")

    async def _parse(self, body: ResponsesBody) -> _Request:
        model = check_name(self._served.model_info, body.model)
        previous, new, request = await self._wanted(body, model)
        prepared = await self._chats.prepare(request)
        head = _head(body, model, prepared.job.params)
        return _Request(
            prepared,
            head,
            previous.messages if previous is not None else (),
            new,
            body.store is not False,
            body.cache_salt or "",
            previous,
            Items(head["tools"]),
        )

    async def _wanted(
        self, body: ResponsesBody, model: str
    ) -> tuple[Stored | None, list[dict[str, Any]], ChatRequest]:
        """Return a body's previous response, its new messages, and the whole conversation."""
        previous = None
        if body.previous_response_id is not None:
            previous = self._store.get(
                body.previous_response_id, "previous_response_id", owner(), body.cache_salt or ""
            )
        before = previous.messages if previous is not None else ()
        place = placed(self._served, body, model)
        new = messages_of(body.input, before)
        fields = sampling_fields(body, "openai")
        if fields.get("n", 1) != 1:
            raise InvalidParameter("n", "a response is one answer: n must be 1")
        if body.max_output_tokens is not None:
            fields["max_tokens"] = body.max_output_tokens
        included = "message.output_text.logprobs" in (body.include or ())
        fields["logprobs"] = bool(included or body.top_logprobs)
        fields["top_logprobs"] = body.top_logprobs
        # Instructions hold for one request: they are not kept.
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        request = ChatRequest(
            messages=_with_one_system([*system, *before, *new]),
            fields=fields,
            names={"max_tokens": "max_output_tokens"},
            tools=tuple(offered(body.tools or ())),
            choice=tool_choice(body),
            constraint=constraint_of(body),
            template=thinking_arguments(effort=body.reasoning.effort if body.reasoning else None),
            thinking_budget=body.thinking_budget,
            # An unshared branch ends with the request.
            keep=body.store is not False and place["handling"].cache.share,
            # Another model's tokens differ.
            behind=previous.held if previous and previous.response["model"] == model else None,
            param="input",
            **place,
        )
        if body.truncation == "auto":
            request = await self._chats.fitting(request)
        return previous, new, request

    def _score(
        self, request: _Request, changes: Sequence[BlockEvent], tokens: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Give new text the log-probabilities of its `tokens`; return the tokens behind it."""
        top = request.prepared.job.params.top_logprobs
        for change in changes:
            if not tokens or not isinstance(change, More) or change.block.kind == "call":
                continue
            ends = list(accumulate(len(token.text) for token in tokens))
            begin = max("".join(token.text for token in tokens).find(change.text), 0)
            end = bisect_left(ends, begin + len(change.text)) + 1
            if change.block.kind == "text":
                block_tokens = tokens[bisect_right(ends, begin) : end]
                change.logprobs.extend(chosen_tokens(self._served.tokenizer, block_tokens, top))
            tokens = tokens[end:]
        return tokens

    async def _stream(self, request: _Request) -> AsyncGenerator[dict[str, Any], None]:
        blocks, written, number = Blocks(), list[Block](), 0
        tokens: tuple[TokenLogprob, ...] = ()

        def numbered(event: dict[str, Any]) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {**event, "sequence_number": number - 1}

        def changed(changes: list[BlockEvent], *status: str) -> list[dict[str, Any]]:
            for change in changes:
                if isinstance(change, More):
                    change.block.logprobs.extend(change.logprobs)
                elif isinstance(change, End):
                    written.append(change.block)
            return [numbered(event) for c in changes for event in request.items.events(c, *status)]

        started = {**request.head, "status": "in_progress", "output": [], "usage": None}
        try:
            with AnswerStream(self._served, request.prepared) as answers:
                async for event in answers.events():
                    if not number:
                        for name in ("response.created", "response.in_progress"):
                            yield numbered({"type": name, "response": started})
                    if not isinstance(event, FinalOutput):
                        changes = blocks.take(event.deltas)
                        tokens = self._score(request, changes, tokens + event.logprobs)
                        for one in changed(changes):
                            yield one
                        continue
                    ends = changed(blocks.finish(), "incomplete" if _cut(event) else "completed")
                    whole = self._ended(request, written, event)
                    await self._store.flush()
                    for one in ends:
                        yield one
                    yield numbered({"type": f"response.{whole['status']}", "response": whole})
        except RootlaceError as error:
            if not number:
                raise
            fault = {"code": "server_error", "message": str(error)}
            failed = {**started, "status": "failed", "error": fault}
            yield numbered({"type": "response.failed", "response": failed})

    def _ended(self, request: _Request, blocks: list[Block], ended: FinalOutput) -> ResponseReply:
        """Return the whole response, and keep it."""
        cut = _cut(ended)
        response: ResponseReply = {
            **request.head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "completed_at": None if cut else time.time(),
            "output": [request.items.item(block) for block in blocks],
            "usage": _usage(ended),
        }
        if cut and response["output"]:
            response["output"][-1].status = "incomplete"
        if request.store:
            self._keep(request, ended, response, _message(blocks, request.items))
        return response

    def _keep(
        self, request: _Request, ended: FinalOutput, response: ResponseReply, answer: dict[str, Any]
    ) -> None:
        """Store the response, and hold its branch, which begins with the previous response's."""
        let_go: Callable[[], None] = nothing
        if ended.opened is not None:
            usage = ended.generated.usage
            tokens = usage.prompt_tokens + usage.completion_tokens
            let_go = self._holds.add(ended.opened, tokens)
            if request.previous is not None:
                request.previous.let_go()
        new = [*request.new, answer]
        self._store.put(response, request.before, new, owner(), request.salt, ended.held, let_go)


def _cut(ended: FinalOutput) -> str:
    """Return why the last item is incomplete; "" if it is complete."""
    if ended.generated.outputs[0].finish_reason == "length":
        return "max_output_tokens"
    return "stop" if ended.cut_calls[0] else ""


def _head(body: ResponsesBody, model: str, params: SamplingParams) -> ResponseHead:
    form = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        spec = body.text.format
        form = {name: value for name in spec.__struct_fields__ if (value := getattr(spec, name))}
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
        "tools": [_shown(tool) for tool in body.tools or ()],
        "top_logprobs": params.top_logprobs,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
    }


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join leading system messages into one: templates take no more."""
    leading = []
    for message in messages:
        if message["role"] != "system":
            break
        leading.append(message["content"])
    if len(leading) <= 1:
        return messages
    return [{"role": "system", "content": "\n\n".join(leading)}, *messages[len(leading) :]]


def _message(blocks: list[Block], items: Items) -> dict[str, Any]:
    """Return the answer as chat templates take it."""
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


def _usage(ended: FinalOutput) -> ResponseUsage:
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
