"""From OpenAI's messages to what chat templates expect."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.messages import Message, Tool, ToolCall
from rootlace.wire.protocol import Part

_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})


def render(
    gateway: Gateway,
    messages: list[Message],
    tools: list[Tool] | None,
    add_generation_prompt: bool | None,
    template_kwargs: Mapping[str, Any] | None,
) -> tuple[Part, ...]:
    """The conversation as the model's template writes it.

    Raises InvalidParameter for content that is not text, InvalidRequest where the template refuses.
    """
    more = dict(template_kwargs or {})
    for name in sorted(_TEMPLATE_ARGUMENTS & more.keys()):
        raise InvalidParameter(
            f"chat_template_kwargs.{name}", f"{name} belongs outside of chat_template_kwargs"
        )
    return gateway.chat.render(
        template_messages(messages),
        tools=template_tools(tools) if tools else None,
        add_generation_prompt=add_generation_prompt is not False,
        **more,
    )


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as dictionaries with plain text content and decoded tool arguments.

    Raises InvalidParameter for content that is not text.
    """
    if not messages:
        raise InvalidParameter("messages", "messages must not be empty")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools as dictionaries, without the fields that were not given."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        function = {k: v for k, v in msgspec.structs.asdict(tool.function).items() if v is not None}
        function.pop("strict", None)
        found.append({"type": tool.type, "function": function})
    return found


def _message(message: Message, param: str) -> dict[str, Any]:
    # "developer" is OpenAI's newer name of the system role; templates know only the old one.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": _content(message, param)}
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidParameter(
                f"{param}.tool_calls", "only an assistant message has tool calls"
            )
        found["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            found[name] = value
    return found


def _content(message: Message, param: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise InvalidParameter(f"{param}.content", f"{param}.content is missing")
    texts = []
    for index, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise InvalidParameter(
                f"{param}.content[{index}]",
                f"{param}.content[{index}]: only text parts are supported, not {part.type!r}",
            )
        texts.append(text)
    return "".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        # Templates write the arguments as JSON themselves; text that is none stays as it is.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")
    function = {"name": call.function.name, "arguments": {} if arguments is None else arguments}
    return {"id": call.id, "type": "function", "function": function}
