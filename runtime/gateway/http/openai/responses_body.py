"""The body of `POST /v1/responses`, and its conversation as chat templates take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from rootlace.runtime.gateway.http.body import MANY, Body, History, convert
from rootlace.runtime.gateway.http.chat.request import Tool, ToolChoice
from rootlace.runtime.gateway.http.chat.thinking import Budget
from rootlace.runtime.gateway.http.constraints import Asked, json_source
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.runtime.gateway.http.handling import HandlingBody
from rootlace.runtime.gateway.http.openai.body import ACCOUNT, CACHE
from rootlace.runtime.gateway.http.openai.conversation import call_of, text_of
from rootlace.runtime.gateway.http.openai.messages import CLIENTS_RUN, ContentPart
from rootlace.runtime.gateway.http.sampling import with_sampling
from rootlace.wire.protocol import Constraint

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
"""What clients may ask for that OpenAI leaves out otherwise."""


class Item(History):
    """A message, a call, its result, or thoughts. What came in an answer may be sent back."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FunctionTool(Body):
    ONLY: ClassVar[str] = CLIENTS_RUN

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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


class ResponsesBody(HandlingBody):
    """`POST /v1/responses`, but for what `with_sampling` adds. `cache_salt` and
    `return_cache_report` are ours."""

    input: str | Annotated[list[Item], MANY]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking_budget: Budget | None = None
    metadata: dict[str, str] | None = None
    # All there is is included, thoughts as plain text.
    include: list[Included] | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None

    user: Annotated[str | None, ACCOUNT] = None
    service_tier: Annotated[str | None, ACCOUNT] = None
    safety_identifier: Annotated[str | None, ACCOUNT] = None
    prompt_cache_key: Annotated[str | None, CACHE] = None
    prompt_cache_retention: Annotated[str | None, CACHE] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, CACHE] = None
    stream_options: Annotated[Any, ignored("nothing is obfuscated")] = None
    max_tool_calls: Annotated[int | None, ignored("the client runs the tools")] = None
    moderation: Annotated[Any, ignored("nothing is moderated")] = None

    background: Annotated[bool | None, refused("every request is waited for")] = None
    conversation: Annotated[Any, refused("use previous_response_id")] = None
    prompt: Annotated[Any, refused("no prompts are stored")] = None
    top_logprobs: Annotated[int | None, refused("use /v1/chat/completions", 0)] = None
    context_management: Annotated[Any, refused("the whole conversation is read")] = None
    truncation: Annotated[
        str | None, refused("a conversation that is too long is an error", "disabled")
    ] = None


RESPONSES_BODY = with_sampling(ResponsesBody, "openai")


class _Function(msgspec.Struct, tag_field="type", tag="function"):
    name: str


class _Allowed(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[_Function]


def messages_of(
    given: str | list[Item], before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The input as messages: calls and thoughts belong to the assistant's message beside them.

    Raises InvalidParameter for content that is not text, and for the result of a call that is
    neither in it nor in the messages `before`.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidParameter("input", "input must not be empty")
    messages: list[dict[str, Any]] = []
    calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    thoughts = ""
    for index, item in enumerate(given):
        param = f"input[{index}]"
        if item.type == "reasoning":
            thoughts += text_of(item.content or [], f"{param}.content")
        elif item.type == "function_call_output":
            content = text_of(_given(item, "output", param), f"{param}.output")
            call_id = _given(item, "call_id", param)
            if call_id not in calls:
                raise InvalidParameter(
                    f"{param}.call_id", f"{param}.call_id: there is no call {call_id!r} before it"
                )
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif item.type == "function_call":
            name, call_id = _given(item, "name", param), _given(item, "call_id", param)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_of(call_id, name, item.arguments)
            calls.add(call_id)
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            # "developer" is OpenAI's newer name of the system role; templates know the old one.
            role = _given(item, "role", param).replace("developer", "system")
            content = text_of(_given(item, "content", param), f"{param}.content")
            messages.append({"role": role, "content": content})
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def check_include(body: ResponsesBody) -> None:
    """Raises InvalidParameter for what is not there."""
    for index, wanted in enumerate(body.include or ()):
        if wanted == "message.output_text.logprobs":
            raise InvalidParameter(
                f"include[{index}]", f"there is no {wanted}: use /v1/chat/completions"
            )


def tools_of(body: ResponsesBody) -> tuple[Tool, ...]:
    tools = body.tools or ()
    return tuple(Tool(t.name, t.description, t.parameters, t.strict) for t in tools)


def tool_choice(body: ResponsesBody) -> ToolChoice:
    """Raises InvalidParameter for a choice of something else than a function."""
    given, parallel = body.tool_choice, body.parallel_tool_calls
    # True is OpenAI's default, which clients send on their own.
    parallel = False if parallel is False else None
    if given is None or given == "auto":
        return ToolChoice(parallel=parallel)
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        return ToolChoice("required", parallel=parallel)
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        wanted = convert(given, _Allowed, "tool_choice")
        names = tuple(tool.name for tool in wanted.tools)
        return ToolChoice(wanted.mode, parallel=parallel, allowed=names)
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "function" or not isinstance(name, str):
        raise InvalidParameter(
            "tool_choice",
            "tool_choice must be 'none', 'auto', 'required', a function or allowed_tools",
        )
    return ToolChoice("required", name)


def constraint_of(body: ResponsesBody) -> Asked | None:
    """That of `text.format`."""
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    schema = {"type": "object"} if form.type == "json_object" else form.schema
    if schema is None:
        raise InvalidParameter("text.format.schema", "text.format.schema is missing")
    return Asked(Constraint("json_schema", json_source(schema)), "text.format", form.strict is True)


def _given(item: Item, field: str, param: str) -> Any:
    value = getattr(item, field)
    if value is None:
        raise InvalidParameter(f"{param}.{field}", f"{param}.{field} is missing")
    return value
