"""How a model is shown tools, and how it calls them (`protocol.ChatFormat.tools`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rootlace.wire.tool_calls import LINES, Around

Form = Literal["tool", "function", "tool_indented", "function_indented", "signature"]
"""What stands for one tool in a list: OpenAI's object {"type", "function"} or what it holds under
"function", as JSON, or `name(arguments): description`."""

FORMS: tuple[Form, ...] = ("tool", "tool_indented", "function", "function_indented", "signature")


class ToolFormat(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A call is `begin + name + between`, its arguments as a JSON object, `end`; every call begins
    with `trigger`, and several stand together as `around` says. In a system message, behind its
    content, tools are listed as `before`, each as `form` says with `separator` between them,
    `after`.

    The defaults are those of a model whose template shows none. `refused`: why no tools can be
    listed; empty where they can.
    """

    trigger: str = "<tool_call>"
    begin: str = '<tool_call>\n{"name": "'
    between: str = '", "arguments": '
    end: str = "}\n</tool_call>"
    around: Around = LINES
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
