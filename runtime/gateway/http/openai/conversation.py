"""From OpenAI's messages to what chat templates expect."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rootlace.runtime.gateway.http.chat.request import Tool as ChatTool
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.openai.messages import ContentPart, Message, Tool

_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final"})


def template_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`. Raises InvalidParameter for what has a field of its own."""
    for name in sorted(_TEMPLATE_ARGUMENTS & (given or {}).keys()):
        raise InvalidParameter(
            f"chat_template_kwargs.{name}", f"{name} belongs outside of chat_template_kwargs"
        )
    return dict(given or {})


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as dictionaries with plain text content and decoded tool arguments.

    Raises InvalidParameter for content that is not text.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def tools_of(tools: list[Tool] | None) -> tuple[ChatTool, ...]:
    """The tools of a body."""
    functions = [tool.function for tool in tools or ()]
    return tuple(ChatTool(f.name, f.description, f.parameters, f.strict) for f in functions)


def _message(message: Message, param: str) -> dict[str, Any]:
    # "developer" is OpenAI's newer name of the system role; templates know only the old one.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": _content(message, param)}
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidParameter(
                f"{param}.tool_calls", "only an assistant message has tool calls"
            )
        found["tool_calls"] = [
            call_of(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    # Some servers answer with a text here, others with an object.
    other = message.reasoning if isinstance(message.reasoning, str) else None
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", message.reasoning_content or other),
    ):
        if value is not None:
            found[name] = value
    return found


def _content(message: Message, param: str) -> str:
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise InvalidParameter(f"{param}.content", f"{param}.content is missing")
    return text_of(message.content, f"{param}.content")


def text_of(content: str | list[ContentPart], param: str) -> str:
    """A content's text. Raises InvalidParameter for a part, below `param`, that is none."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where, name = f"{param}[{index}]", "refusal" if part.type == "refusal" else "text"
        if not part.type.endswith(("text", "refusal")):  # also `input_text` and the like
            raise InvalidParameter(where, f"{where}: only text is served, not {part.type!r}")
        text = part.refusal if name == "refusal" else part.text
        if text is None:
            raise InvalidParameter(f"{where}.{name}", f"{where}.{name} is missing")
        texts.append(text)
    return "".join(texts)


def call_of(
    call_id: str | None, name: str, arguments: str | dict[str, Any] | None
) -> dict[str, Any]:
    """A call as chat templates expect it."""
    if isinstance(arguments, str):
        # Templates write the arguments as JSON themselves; text that is none stays as it is.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}
