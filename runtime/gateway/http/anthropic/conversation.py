"""From Anthropic's messages to a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rootlace.runtime.gateway.http.anthropic.body import (
    Block,
    CacheControl,
    CountBody,
    Message,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from rootlace.runtime.gateway.http.chat.request import ChatRequest, Pinned, Tool, ToolChoice
from rootlace.runtime.gateway.http.chat.thinking import budget_of, thinking_arguments
from rootlace.runtime.gateway.http.constraints import Asked, json_source
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.handling import handling_of
from rootlace.runtime.gateway.http.one_shot import MAX_PINS
from rootlace.wire.handling import Cache
from rootlace.wire.protocol import Constraint

# What this interface calls the parameters.
_NAMES = {"stop": "stop_sequences"}
_SECONDS = {"5m": 300.0, "1h": 3600.0}
# Text that nobody writes: of the private use area.
_UNLIKE = "\ue0f0"
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def chat_request(body: CountBody) -> ChatRequest:
    """Raises InvalidParameter for what cannot be served."""
    messages = _system(body.system)
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    config = body.output_config
    constraint = None
    if config is not None and config.format is not None:
        source = json_source(config.format.schema)
        constraint = Asked(Constraint("json_schema", source), "output_config.format.schema")
    return ChatRequest(
        messages=messages,
        fields=_fields(body) if isinstance(body, MessagesBody) else {},
        names=_NAMES,
        tools=tuple(
            Tool(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in body.tools or ()
        ),
        choice=_choice(body),
        constraint=constraint,
        template=thinking_arguments(body.thinking, config.effort if config else None),
        thinking_budget=budget_of(None, body.thinking),
        # The answer goes on where the last message ends, if that is the model's own.
        continue_final=messages[-1]["role"] == "assistant",
        namespace=(body.cache_salt or "") if isinstance(body, MessagesBody) else "",
        handling=handling_of(body),
        cache_report=isinstance(body, MessagesBody) and bool(body.return_cache_report),
        pinned=_pinned(body),
    )


def _pinned(body: CountBody) -> tuple[Pinned, ...]:
    """What `cache_control` marks. Raises InvalidParameter for more marks than Anthropic takes."""
    marks = sum(control is not None for control in _controls(body))
    if marks > MAX_PINS:  # said before any is looked at: each costs as much as the prompt is long
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
    """A conversation that goes on behind `messages` as none does: `inside` its last message, where
    that ends with text."""
    if not messages or not inside or "tool_calls" in messages[-1]:
        return [*messages, {"role": "user", "content": _UNLIKE}]
    last = messages[-1]
    changed = [*messages[:-1], {**last, "content": last["content"] + _UNLIKE}]
    if last["role"] == "system":  # templates want more than that
        changed.append({"role": "user", "content": _UNLIKE})
    return changed


def _system(content: str | list[TextBlock] | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(content)}] if content else []


def _fields(body: MessagesBody) -> dict[str, Any]:
    given = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": tuple(body.stop_sequences) if body.stop_sequences else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _choice(body: CountBody) -> ToolChoice:
    given = body.tool_choice
    if given is None:
        return ToolChoice()
    if given.type == "tool" and given.name is None:
        raise InvalidParameter("tool_choice.name", "tool_choice.name is missing")
    parallel = False if given.disable_parallel_tool_use else None
    return ToolChoice(_CHOICES[given.type], given.name, parallel)  # type: ignore[arg-type]


def _messages(message: Message, param: str) -> list[dict[str, Any]]:
    """One message as those of chat templates: a tool's result is a message of its own there."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        _check_role(message.role, block, f"{param}.content[{index}]")
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
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
    own = isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock)
    if own and role != "assistant":
        raise InvalidParameter(param, f"{param}: only the assistant writes such a block")
    if isinstance(block, ToolResultBlock) and role != "user":
        raise InvalidParameter(param, f"{param}: a tool's result belongs to the user's message")


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(block.text for block in content)
