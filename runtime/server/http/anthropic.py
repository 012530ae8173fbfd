"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec

from rootlace.runtime.server.http.body import SOME, Body, History, ignored, refused, with_fields
from rootlace.runtime.server.http.chat_pipeline import Chats
from rootlace.runtime.server.http.chat_request import (
    Begin,
    BlockEvent,
    Blocks,
    ChatRequest,
    More,
    Pinned,
    Thinking,
    blocks_of,
    budget_of,
    thinking_arguments,
)
from rootlace.runtime.server.http.chat_request import Block as ChatBlock
from rootlace.runtime.server.http.chat_request import Tool as ChatTool
from rootlace.runtime.server.http.chat_request import ToolChoice as ChatToolChoice
from rootlace.runtime.server.http.constraints import schema_constraint
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import MAX_PINS, AnswerStream, FinalOutput, Prepared
from rootlace.runtime.server.http.replies import NAMED_EVENTS, Reports, Stream, report_of
from rootlace.runtime.server.http.request_fields import (
    HandlingBody,
    call_of,
    placed,
    sampling_fields,
    with_sampling,
)
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.wire.protocol import Generated, Output, Usage
from rootlace.wire.sampling import PIN_SECONDS, Cache, names_in

# Body ---------------------------------------------------------------------------------------------


_ACCOUNT = ignored("it is about the account of Anthropic's clients")
_NO_SERVER_TOOLS = refused("tools are run by the client")


class CacheControl(Body):
    """Mark that pins the prompt up to here, if there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


_CacheControl = CacheControl | None


class InputTextBlock(History, tag_field="type", tag="text"):
    ONLY: ClassVar[str] = "only text can be read"

    text: str
    cache_control: _CacheControl = None


class InputThinkingBlock(History, tag_field="type", tag="thinking"):
    thinking: str


class RedactedThinkingBlock(History, tag_field="type", tag="redacted_thinking"):
    """Redacted thoughts, left out: nobody here can read them."""


class ToolUseBlock(History, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: _CacheControl = None


class ToolResultBlock(History, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[InputTextBlock] | None = None
    cache_control: _CacheControl = None


Block = InputTextBlock | InputThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(History):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Body):
    """Tool that the client runs."""

    ONLY: ClassVar[str] = "tools are run by the client"

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: _CacheControl = None
    input_examples: Annotated[Any, ignored("templates have no place for them")] = None
    eager_input_streaming: Annotated[bool | None, ignored("calls stream as written")] = None
    defer_loading: Annotated[bool | None, refused("there is no search for tools")] = None
    allowed_callers: Annotated[Any, ignored("the model is the only caller")] = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class CountBody(HandlingBody, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`, and base of `POST /v1/messages`."""

    messages: Annotated[list[Message], SOME]
    model: str | None = None
    system: str | list[InputTextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: _CacheControl = None
    context_management: Annotated[Any, ignored("the whole conversation is read")] = None
    speed: Annotated[str | None, ignored("there is one speed")] = None
    mcp_servers: Annotated[Any, _NO_SERVER_TOOLS] = None
    container: Annotated[Any, _NO_SERVER_TOOLS] = None


@with_sampling("anthropic")
@with_fields(
    (_ACCOUNT, Any, "metadata"),
    (_ACCOUNT, str, "user_profile_id service_tier inference_geo"),
    (ignored("the usage says what was found in the cache"), Any, "diagnostics"),
)
class MessagesBody(CountBody, kw_only=True):
    """Body of `POST /v1/messages`, without the fields that `with_sampling` adds. `cache_salt`,
    `return_cache_report`, `priority`, `timeout` and `cache` are Rootlace's."""

    max_tokens: int
    stream: bool | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None


# Conversation -------------------------------------------------------------------------------------
#
# From Anthropic's messages to a `ChatRequest`.


_NAMES = names_in("anthropic")
_SECONDS = {"5m": 300.0, "1h": 3600.0}
# Text of the private use area, which nobody writes.
_UNLIKE = "\ue0f0"
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def chat_request(served: ServedModel, body: CountBody) -> ChatRequest:
    """Make the `ChatRequest`. Raises InvalidParameter for a body that cannot be served."""
    model = check_name(served.model_info, body.model)
    messages = _system(body.system)
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    config = body.output_config
    constraint = None
    if config is not None and config.format is not None:
        constraint = schema_constraint(config.format.schema, "output_config.format.schema")
    return ChatRequest(
        messages=messages,
        fields=(
            {"max_tokens": body.max_tokens, **sampling_fields(body, "anthropic")}
            if isinstance(body, MessagesBody)
            else {}
        ),
        names=_NAMES,
        tools=tuple(
            ChatTool(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in body.tools or ()
        ),
        choice=_choice(body),
        constraint=constraint,
        template=thinking_arguments(body.thinking, config.effort if config else None),
        thinking_budget=budget_of(None, body.thinking),
        # The answer continues the last message, if that is the model's own.
        continue_final=messages[-1]["role"] == "assistant",
        pinned=_pinned(body),
        **placed(served, body, model),
    )


def _pinned(body: CountBody) -> tuple[Pinned, ...]:
    """Return the pins at `cache_control` marks. Raises InvalidParameter for too many marks."""
    marks = sum(control is not None for control in _controls(body))
    if marks > MAX_PINS:  # checked first: each mark costs time in proportion to the prompt
        raise InvalidParameter(
            "cache_control", f"at most {MAX_PINS} places can be marked, not {marks}"
        )
    if not marks:
        return ()
    found: list[tuple[CacheControl, list[dict[str, Any]]]] = []
    whole = _system(body.system)
    for tool in body.tools or ():
        if tool.cache_control is not None:
            found.append((tool.cache_control, _differently(whole)))
    blocks = body.system if isinstance(body.system, list) else []
    for end, block in enumerate(blocks, 1):
        if block.cache_control is not None:
            begun = _system(blocks[:end])
            found.append((block.cache_control, _differently(begun, inside=True)))
    for index, message in enumerate(body.messages):
        for end, one in enumerate(_blocks(message), 1):
            control = getattr(one, "cache_control", None)
            if control is not None:
                part = Message(message.role, _blocks(message)[:end])
                begun = [*whole, *_messages(part, f"messages[{index}]")]
                found.append((control, _differently(begun, inside=True)))
        whole += _messages(message, f"messages[{index}]")
    if body.cache_control is not None:
        found.append((body.cache_control, _differently(whole, inside=True)))
    return tuple(
        Pinned(messages, Cache("try", _SECONDS[control.ttl or "5m"])) for control, messages in found
    )


def _controls(body: CountBody) -> Iterator[CacheControl | None]:
    yield body.cache_control
    yield from (tool.cache_control for tool in body.tools or ())
    if isinstance(body.system, list):
        yield from (block.cache_control for block in body.system)
    for message in body.messages:
        yield from (getattr(one, "cache_control", None) for one in _blocks(message))


def _blocks(message: Message) -> list[Block]:
    return message.content if isinstance(message.content, list) else []


def _differently(messages: list[dict[str, Any]], inside: bool = False) -> list[dict[str, Any]]:
    """Extend `messages` as no conversation does: `inside` the last message, where it ends with
    text."""
    if not messages or not inside or "tool_calls" in messages[-1]:
        return [*messages, {"role": "user", "content": _UNLIKE}]
    last = messages[-1]
    changed = [*messages[:-1], {**last, "content": last["content"] + _UNLIKE}]
    if last["role"] == "system":  # templates want more than that
        changed.append({"role": "user", "content": _UNLIKE})
    return changed


def _system(content: str | list[InputTextBlock] | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(content)}] if content else []


def _choice(body: CountBody) -> ChatToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ChatToolChoice()
    if choice.type == "tool" and choice.name is None:
        raise InvalidParameter("tool_choice.name", "tool_choice.name is missing")
    parallel = False if choice.disable_parallel_tool_use else None
    return ChatToolChoice(_CHOICES[choice.type], choice.name, parallel)  # type: ignore[arg-type]


def _messages(message: Message, param: str) -> list[dict[str, Any]]:
    """Turn a message into chat templates' messages: a tool's result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        _check_role(message.role, block, f"{param}.content[{index}]")
        match block:
            case InputTextBlock():
                texts.append(block.text)
            case InputThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(call_of(block.id, block.name, block.input))
            case ToolResultBlock():
                content = _text(block.content or "")
                results.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                )
    if results and not texts:
        return results
    found: dict[str, Any] = {"role": message.role, "content": "\n\n".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n\n".join(thoughts)
    return [*results, found]


def _check_role(role: str, block: Block, param: str) -> None:
    own = isinstance(block, ToolUseBlock | InputThinkingBlock | RedactedThinkingBlock)
    if own and role != "assistant":
        raise InvalidParameter(param, f"{param}: only the assistant writes such a block")
    if isinstance(block, ToolResultBlock) and role != "user":
        raise InvalidParameter(param, f"{param}: a tool's result belongs to the user's message")


def _text(content: str | list[InputTextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(block.text for block in content)


# Messages -----------------------------------------------------------------------------------------


# Types of deltas, and the fields of their new text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text for the user."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Thoughts of the model."""

    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """Call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class Written(TypedDict):
    """Tokens computed up to marks, by the lifetime that the marks ask for."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Reports):
    """Usage. The three counts of input tokens add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: Written
    cache_read_input_tokens: int
    output_tokens: int


class Stopped(TypedDict):
    """End of an answer; a stream sends it last."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageReply(msgspec.Struct, kw_only=True):
    """Answer, complete; in a stream, as it begins."""

    id: str = msgspec.field(default_factory=lambda: f"msg_{uuid.uuid4().hex[:24]}")
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUse]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """Length of the messages in tokens."""

    input_tokens: int


class Messages:
    """Handlers of messages."""

    def __init__(self, served: ServedModel, chats: Chats) -> None:
        self._served = served
        self._chats = chats

    async def count_tokens(self, body: CountBody) -> TokenCount:
        wanted = chat_request(self._served, body)
        return TokenCount(len(await self._chats.encode(wanted)))

    async def handle(self, body: MessagesBody) -> MessageReply | Stream:
        model = check_name(self._served.model_info, body.model)
        prepared = await self._chats.prepare(chat_request(self._served, body))
        if body.stream:
            return Stream(self._stream(model, prepared), NAMED_EVENTS)
        ended, (answer,) = await AnswerStream.whole(self._served, prepared)
        generated = ended.generated
        return MessageReply(
            model=model,
            content=[_block(block) for block in blocks_of(answer)],
            **_stopped(generated.outputs[0], bool(answer.calls) and not ended.cut_calls[0]),
            usage=_usage_and_report(generated, prepared),
        )

    async def _stream(self, model: str, prepared: Prepared) -> AsyncGenerator[dict[str, Any], None]:
        blocks, calls = Blocks(), 0
        begun = False
        with AnswerStream(self._served, prepared) as answers:
            async for event in answers.events():
                if not begun:
                    begun = True
                    usage = event.generated.usage if isinstance(event, FinalOutput) else event.begun
                    used = msgspec.structs.replace(usage or Usage(), completion_tokens=0)
                    message = MessageReply(model=model, content=[], usage=_usage(used, prepared))
                    yield {"type": "message_start", "message": message}
                if not isinstance(event, FinalOutput):
                    for change in blocks.take(event.deltas):
                        calls += isinstance(change, Begin) and change.block.kind == "call"
                        yield _event(change)
                    continue
                for change in blocks.finish():
                    yield _event(change)
                called = calls > 0 and not event.cut_calls[0]
                yield {
                    "type": "message_delta",
                    "delta": _stopped(event.generated.outputs[0], called),
                    "usage": _usage_and_report(event.generated, prepared),
                }
        yield {"type": "message_stop"}


def _event(change: BlockEvent) -> dict[str, Any]:
    index = change.block.index
    if isinstance(change, Begin):
        empty = ChatBlock(index, change.block.kind, change.block.name)
        return {"type": "content_block_start", "index": index, "content_block": _block(empty)}
    if isinstance(change, More):
        kind, field = _DELTAS[change.block.kind]
        delta = {"type": kind, field: change.text}
        return {"type": "content_block_delta", "index": index, "delta": delta}
    return {"type": "content_block_stop", "index": index}


def _block(block: ChatBlock) -> TextBlock | ThinkingBlock | ToolUse:
    if block.kind == "text":
        return TextBlock(block.text)
    if block.kind == "thoughts":
        return ThinkingBlock(block.text)
    return ToolUse(f"toolu_{uuid.uuid4().hex[:24]}", block.name, _input(block.text))


def _input(arguments: str) -> Any:
    """Return the arguments as an object; an empty one where they were cut off."""
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
    """Return the usage: computed tokens count as written where a client marked them.

    The prompt's three counts of tokens add up to its length.
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
