"""How models are shown tools and call them, each in its own way, and structural tags for calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from rootlace.wire.errors import InvalidConstraint

# Tool format --------------------------------------------------------------------------------------
#
# How a model is shown tools, and how it calls them (`protocol.ChatFormat.tools`).


Around = tuple[str, str, str]
"""What calls that stand together begin with (and so each of `Calls`), what stands between two, and
what they end with."""
LINES: Around = ("", "\n", "")


class Argument(msgspec.Struct, frozen=True):
    r"""How an argument in tags of its own is written, here with Qwen3-Coder's texts:

    <parameter=  KEY  >\n      VALUE  \n   </parameter>  \n
    opening           between         gap  close         after
    """

    opening: str
    between: str
    gap: str
    close: str
    after: str
    cdata: bool = False
    """Whether a string may stand as <![CDATA[...]]>."""

    def written(self, key: str, text: str) -> str:
        """The argument `key` whose value has this text."""
        return f"{self.opening}{key}{self.between}{text}{self.gap}{self.close}{self.after}"


Form = Literal["tool", "function", "tool_indented", "function_indented", "signature"]
"""What stands for one tool in a list: OpenAI's object {"type", "function"} or what it holds under
"function", as JSON, or `name(arguments): description`."""

FORMS: tuple[Form, ...] = ("tool", "tool_indented", "function", "function_indented", "signature")


class ToolFormat(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A call is `begin + name + between`, its arguments as a JSON object, or each as `argument`
    says, and `end`; every call begins with `trigger`, and several stand together as `around` says.
    In a system message, behind its content, tools are listed as `before`, each as `form` says with
    `separator` between them, `after`.

    The defaults are those of a model whose template shows none. `refused`: why no tools can be
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
    """A tool, as {"type", "function"}, in a list."""
    function = tool["function"]
    if form == "signature":
        arguments = ", ".join(function["parameters"].get("properties", ()))
        return f"{function['name']}({arguments}): {function['description']}"
    value = tool if form.startswith("tool") else function
    indent = 4 if form.endswith("indented") else None
    return json.dumps(value, ensure_ascii=False, indent=indent)


def write_list(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """The list, as texts and whether they are the template's (and not the tools' own)."""
    texts = [(form.before, True)]
    for index, tool in enumerate(tools):
        if index:
            texts.append((form.separator, True))
        texts.append((write_tool(form.form, tool), False))
    return [*texts, (form.after, True)]


PLAIN_TOOLS = ToolFormat()

# Tags ---------------------------------------------------------------------------------------------
#
# Structural tags that hold calls.


Content = Mapping[str, Any]
"""The content of a call: its arguments' schema, made by `arguments`."""
Calls = Iterable[tuple[str, Content]]
"""For each tool: the text that begins its call, and the arguments that follow."""


_NO_ARGUMENTS = frozenset({"array", "string", "number", "integer", "boolean"})


def arguments(schema: Mapping[str, Any] | bool | None, strict: bool | None = None) -> Content:
    """Of a tool with this schema (None: it takes none), held as its `strict` says.

    True: exactly to the schema. False: to a JSON object. None: to as much of the schema as can be
    held, and of a schema of which nothing can, to its type; to an object where that is another.

    Raises InvalidConstraint for a schema that is to be held exactly and is of no object.
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
            given = " or ".join(map(str, types))
            raise InvalidConstraint(f"json_schema: #/type: arguments are an object, not {given}")
    return as_content(schema) | ({"lenient": True} if strict is None else {})


def among_text(
    calls: Calls,
    trigger: str,
    end: str,
    around: Around = LINES,
    alone: tuple[str, Calls] | None = None,
) -> dict[str, Any]:
    """Free text in which whatever begins with `trigger` is one of `calls`, or several together.

    `alone`: another trigger, and such calls as begin with it and stand alone.
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
    """One of `calls` or, unless the first is the `last`, several together, and no text."""
    return _tag(_together(calls, end, around, last))


def or_json(
    calls: Calls,
    end: str,
    schema: Mapping[str, Any] | bool,
    last: bool,
    around: Around = LINES,
    before: str = "",
) -> dict[str, Any]:
    """Only `calls`, or `before` and what fits `schema`. `last`: no call follows the first."""
    answer = sequence(const(before), as_content(schema))
    return _tag(either(_together(calls, end, around, last), answer))


def either_json(contents: Iterable[Content]) -> dict[str, Any]:
    """One of `contents`, in each of which references count from its own root."""
    return _tag(either(*contents))


def _together(calls: Calls, end: str, around: Around, last: bool) -> dict[str, Any]:
    first, _, behind = around
    return sequence(const(first), _several(calls, end, around, last), const(behind))


def _several(calls: Calls, end: str, around: Around, last: bool) -> dict[str, Any]:
    """At least one of `calls`, without what is around all of them."""
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
