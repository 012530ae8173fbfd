"""OpenAI's `tool_choice`: whether the model may, must, or must not call a tool."""

from __future__ import annotations

from typing import Any

import msgspec

from rootlace.runtime.gateway.http.body import convert
from rootlace.runtime.gateway.http.constraints import (
    Asked,
    ConstraintBody,
    constraint_options,
    json_source,
)
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.messages import Tool
from rootlace.runtime.gateway.http.tool_calls import BEGIN, CallFormat
from rootlace.wire.protocol import Constraint

ToolChoice = str | dict[str, Any] | None


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct, tag_field="type", tag="function"):
    function: _Named


def offered_tools(choice: ToolChoice, tools: list[Tool] | None) -> list[Tool] | None:
    """The tools to list in the prompt. Raises InvalidParameter for a choice without tools."""
    if choice not in (None, "none", "auto") and not tools:
        raise InvalidParameter("tool_choice", "tool_choice needs tools")
    return tools if tools and choice != "none" else None


def forced_call(body: ConstraintBody, choice: ToolChoice, tools: list[Tool] | None) -> Asked | None:
    """The constraint of a text that must be a tool call: the JSON of one call.

    The opening tag becomes part of the prompt, so the model writes the JSON where it has learnt to.
    Raises InvalidParameter for an unknown choice or tool.
    """
    tools = tools or []
    if choice in (None, "none", "auto"):
        return None
    if choice != "required":
        if isinstance(choice, str):
            raise InvalidParameter(
                "tool_choice", "tool_choice must be 'none', 'auto', 'required' or a function"
            )
        name = convert(choice, _Choice, "tool_choice").function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {name!r}")
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in tools]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if definitions:
        schema = {**schema, "$defs": definitions}
    constraint = Constraint("json_schema", json_source(schema), **constraint_options(body))
    return Asked(constraint, "tools")


def strict_calls(body: ConstraintBody, tools: list[Tool], form: CallFormat) -> Asked:
    """Free text in which every call is of an offered tool and fits the tool's parameters if it is
    strict (for `tool_choice` "auto" with a strict tool)."""
    structures = [
        {
            "begin": form.begin(tool.function.name),
            "schema": tool.function.parameters or {"type": "object"}
            if tool.function.strict
            else {"type": "object"},
            "end": form.closing,
        }
        for tool in tools
    ]
    tag = {"structures": structures, "triggers": [BEGIN]}
    return Asked(
        Constraint("structural_tag", json_source(tag), **constraint_options(body)), "tools"
    )


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call; the parameters' `$defs` move up to where their references look."""
    parameters = dict(tool.function.parameters or {"type": "object"})
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidParameter("tools", f"two tools define {name!r} differently")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
