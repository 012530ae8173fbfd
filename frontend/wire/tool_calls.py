"""Formats in which models see and call tools, and structural tags for calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from rootlace.wire.errors import InvalidConstraint

# Tool format --------------------------------------------------------------------------------------
#
# Format in which a model sees and calls tools (`protocol.ChatFormat.tools`).


Around = tuple[str, str, str]
"""Texts around calls that stand together: the first text (with which each of `Calls` begins), the
text between two calls, and the last text."""
LINES: Around = ("", "\n", "")


class Argument(msgspec.Struct, frozen=True):
    r"""Format of an argument in tags of its own, here with Qwen3-Coder's texts:

    <parameter=  KEY  >\n      VALUE  \n   </parameter>  \n
    opening           between         gap  close         after
    """

    opening: str
    between: str
    gap: str
    close: str
    after: str
    cdata: bool = False
    """True if a string may stand as <![CDATA[...]]>."""

    def written(self, key: str, text: str) -> str:
        """Write the argument `key` with the value's text."""
        return f"{self.opening}{key}{self.between}{text}{self.gap}{self.close}{self.after}"


Form = Literal["tool", "function", "tool_indented", "function_indented", "signature"]
"""Form of a tool in a list: OpenAI's object {"type", "function"} or only its "function", as JSON,
or `name(arguments): description`."""

FORMS: tuple[Form, ...] = ("tool", "tool_indented", "function", "function_indented", "signature")


class ToolFormat(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Format of calls and lists. A call is `begin + name + between`, arguments, `end`. Arguments
    are a JSON object, or each is an `argument`. Every call begins with `trigger`; several calls
    together have the texts `around`. A list stands in a system message behind its content:
    `before`, the tools in `form` with `separator` between them, and `after`.

    The defaults are for a model whose template shows no tools. `refused`: why no tools can be
    listed; empty where they can.
    """

    trigger: str = "<tool_call>"
    begin: str = '<tool_call>\n{"name": "'
    between: str = '", "arguments": '
    end: str = "}\n</tool_call>"
    around: Around = LINES
    argument: Argument | None = None
    form: Form = "function"
    before: str = (
        "\n\nYou are given a question and a set of tools. "
        "Answer by calling the tool that is needed. "
        "The tools are:\n<tools>\n"
    )
    separator: str = "\n"
    after: str = (
        "\n</tools>\n"
        "Write each call like this, with the name of the tool and its arguments as JSON:\n"
        '<tool_call>\n{"name": "the_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "The result of the call comes back in the next message."
    )
    refused: str = ""


def write_tool(form: Form, tool: Mapping[str, Any]) -> str:
    """Write a tool, given as {"type", "function"}, for a list."""
    function = tool["function"]
    if form == "signature":
        arguments = ", ".join(function["parameters"].get("properties", ()))
        return f"{function['name']}({arguments}): {function['description']}"
    value = tool if form.startswith("tool") else function
    indent = 4 if form.endswith("indented") else None
    return json.dumps(value, ensure_ascii=False, indent=indent)


def write_list(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """Write the list: texts, each with whether it is the template's (and not a tool's)."""
    texts = [(form.before, True)]
    for index, tool in enumerate(tools):
        if index:
            texts.append((form.separator, True))
        texts.append((write_tool(form.form, tool), False))
    return [*texts, (form.after, True)]


PLAIN_TOOLS = ToolFormat()

# Tags ---------------------------------------------------------------------------------------------
#
# Structural tags for calls.


Content = Mapping[str, Any]
"""Content of a call: its arguments' schema, made by `arguments`."""
Calls = Iterable[tuple[str, Content]]
"""(text that begins the call, arguments that follow) for each tool."""


_NO_ARGUMENTS = frozenset({"array", "string", "number", "integer", "boolean"})


def arguments(schema: Mapping[str, Any] | bool | None, strict: bool | None = None) -> Content:
    """Return the content of a call of a tool with this schema (None: no arguments).

    `strict` True enforces the exact schema, False a JSON object. None enforces as much of the
    schema as possible: at least its type, or an object where it has another type.

    Raises InvalidConstraint if the exact schema is wanted and is none of an object.
    """
    if strict is False:
        schema = {"type": "object"}
    elif schema is None:
        schema = {"type": "object", "additionalProperties": False}
    elif isinstance(schema, Mapping):
        schema = {"type": "object", **schema}
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if strict is None and not all(one in ("object", "null") for one in types):
            schema["type"] = "object"  # instead of "dict", for one
        elif types and _NO_ARGUMENTS.issuperset(map(str, types)):
            named = " or ".join(map(str, types))
            raise InvalidConstraint(f"json_schema: #/type: arguments are an object, not {named}")
    return as_content(schema) | ({"lenient": True} if strict is None else {})


def among_text(
    calls: Calls,
    trigger: str,
    end: str,
    around: Around = LINES,
    alone: tuple[str, Calls] | None = None,
) -> dict[str, Any]:
    """Make a tag of free text in which `trigger` always begins one or more of `calls`.

    `alone`: another trigger, and its calls, of which only one may stand there.
    """
    first, _, behind = around
    tags = _tags(calls, end)
    if first:  # a tag is all the calls that stand together
        trigger = trigger if first.startswith(trigger) else first
        tags = [{"begin": first, "content": _several(calls, end, around, False), "end": behind}]
    triggers = [trigger] if tags else []
    if alone is not None:
        triggers.append(alone[0])
        tags += _tags(alone[1], end)
    return _tag({"type": "triggered_tags", "triggers": triggers, "tags": tags})


def nothing_else(calls: Calls, end: str, last: bool, around: Around = LINES) -> dict[str, Any]:
    """Make a tag of calls without text: one or more of `calls`; with `last`, only one."""
    return _tag(_together(calls, end, around, last))


def or_json(
    calls: Calls,
    end: str,
    schema: Mapping[str, Any] | bool,
    last: bool,
    around: Around = LINES,
    before: str = "",
) -> dict[str, Any]:
    """Make a tag of `calls` alone, or of `before` and JSON for `schema`. `last`: only one call."""
    answer = sequence(const(before), as_content(schema))
    return _tag(either(_together(calls, end, around, last), answer))


def either_json(contents: Iterable[Content]) -> dict[str, Any]:
    """Make a tag of one of `contents`, each with references from its own root."""
    return _tag(either(*contents))


def _together(calls: Calls, end: str, around: Around, last: bool) -> dict[str, Any]:
    first, _, behind = around
    return sequence(const(first), _several(calls, end, around, last), const(behind))


def _several(calls: Calls, end: str, around: Around, last: bool) -> dict[str, Any]:
    """Make a list of one or more of `calls`, without the texts around the whole list."""
    first, between, behind = around
    each = [(begin.removeprefix(first), content) for begin, content in calls]
    return {
        "type": "tags_with_separator",
        "tags": _tags(each, end.removesuffix(behind)),
        "separator": between,
        "at_least_one": True,
        "stop_after_first": last,
    }


def _tags(calls: Calls, end: str) -> list[dict[str, Any]]:
    return [{"begin": begin, "content": content, "end": end} for begin, content in calls]


def _tag(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": text}


def as_content(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def sequence(*elements: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def either(*elements: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": [*elements]}
