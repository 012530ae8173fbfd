"""`ToolChoice` as constraints: whether the model may, must, or must not call a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rootlace.runtime.gateway.formats.format import Format
from rootlace.runtime.gateway.formats.tagged import HERMES
from rootlace.runtime.gateway.http.chat.request import Tool, ToolChoice
from rootlace.runtime.gateway.http.constraints import Asked, json_source
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.wire import tool_calls
from rootlace.wire.protocol import Constraint


def offered_tools(choice: ToolChoice, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools to list in the prompt. Raises InvalidParameter for a choice without tools."""
    if choice.kind == "required" and not tools:
        raise InvalidParameter("tool_choice", "tool_choice needs tools")
    return () if choice.kind == "none" else tuple(tools)


def forced_call(
    choice: ToolChoice, tools: Sequence[Tool], form: Format, options: Mapping[str, Any]
) -> tuple[str, Asked]:
    """How the model is made to call: what is written for it, and the constraint of the rest.

    Raises InvalidParameter for an unknown tool.
    """
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {choice.name!r}")
    if choice.parallel:
        return "", _calls(tools, form, options)
    if form.trigger == HERMES.begin:
        # One call's JSON, where the model has learnt to write it.
        return HERMES.begin, _asked("json_schema", _one_of(tools), options)
    if len(tools) == 1:
        return form.begin(tools[0].name), _asked("json_schema", _parameters(tools[0]), options)
    return "", _calls(tools, form, options, one=True)


def strict_calls(tools: Sequence[Tool], form: Format, options: Mapping[str, Any]) -> Asked:
    """Free text in which every call is of an offered tool and fits the tool's parameters if it is
    strict (where the model may call, and a tool is strict)."""
    calls = [
        (form.begin(tool.name), _parameters(tool) if tool.strict else {"type": "object"})
        for tool in tools
    ]
    return _asked("structural_tag", tool_calls.among_text(calls, form.trigger, form.end), options)


def _calls(
    tools: Sequence[Tool], form: Format, options: Mapping[str, Any], one: bool = False
) -> Asked:
    """Text of calls, at least one; exactly one if only `one` is wanted."""
    calls = [(form.begin(tool.name), _parameters(tool)) for tool in tools]
    tag = tool_calls.at_least_one(calls, form.trigger, form.end, last=one)
    return _asked("structural_tag", tag, options)


def _asked(kind: Any, source: dict[str, Any], options: Mapping[str, Any]) -> Asked:
    return Asked(Constraint(kind, json_source(source), **options), "tools")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object"}


def _one_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of a call; the parameters' `$defs` move up to where their references look."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in tools]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(_parameters(tool))
    own = parameters.pop("$defs", {})
    if not isinstance(own, dict):
        raise InvalidParameter("tools", f"the $defs of tool {tool.name!r} must be an object")
    for name, definition in own.items():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidParameter("tools", f"two tools define {name!r} differently")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
