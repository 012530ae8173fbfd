"""`ToolChoice` as constraints: whether the model may, must, or must not call a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from rootlace.runtime.gateway.formats.calls import HERMES
from rootlace.runtime.gateway.formats.format import Format
from rootlace.runtime.gateway.http.chat.request import Tool, ToolChoice
from rootlace.runtime.gateway.http.constraints import Asked, OfTool, json_source
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.wire import tool_calls
from rootlace.wire.protocol import Constraint, Text

_NAME = "a_name"


def offered_tools(choice: ToolChoice, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools to list in the prompt. Raises InvalidParameter for a choice without tools, or of
    one that there is not."""
    if choice.allowed is not None:
        for name in {*choice.allowed} - {tool.name for tool in tools}:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {name!r}")
        tools = [tool for tool in tools if tool.name in choice.allowed]
    if choice.kind == "required" and not tools:
        raise InvalidParameter("tool_choice", "tool_choice needs tools")
    return () if choice.kind == "none" else tuple(tools)


def check_names(tools: Sequence[Tool], form: Format, tokenizer: Tokenizer) -> None:
    """Raises InvalidParameter for a name in which special tokens are written: a constraint would
    have the model call the tool with these, which only templates may write."""

    def special(name: str) -> list[int]:
        ids = tokenizer.encode(form.begin(name), add_special_tokens=False)
        return [token for token in ids if tokenizer.is_special(token)]

    usual = special(_NAME)
    for tool in tools:
        if special(tool.name) != usual:
            raise InvalidParameter("tools", f"the name {tool.name!r} is written in special tokens")


def forced_call(
    choice: ToolChoice, tools: Sequence[Tool], form: Format, options: Mapping[str, Any]
) -> tuple[tuple[Text, ...], Asked]:
    """How the model is made to call: what is written for it, and the constraint of the rest.

    Raises InvalidParameter for an unknown tool.
    """
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {choice.name!r}")
    if choice.parallel:
        return (), _calls(tools, form, options)
    if form.trigger == HERMES.begin:
        # One call's JSON, where the model has learnt to write it, and reads it in a later turn.
        begin = Text(form.begin(_NAME).partition("{")[0], special=True)
        one = len(tools) == 1
        places = [f"{'' if one else f'/anyOf/{i}'}/properties/arguments" for i in range(len(tools))]
        return (begin,), _asked("json_schema", _one_of(tools), options, tools, places)
    if len(tools) == 1:
        asked = _asked("json_schema", _parameters(tools[0]), options, tools)
        return _begin(form, tools[0].name), asked
    return (), _calls(tools, form, options, one=True)


def _begin(form: Format, name: str) -> tuple[Text, ...]:
    """The begin of a call, in which the name is content."""
    before, _, behind = form.begin(_NAME).partition(_NAME)
    spelt = form.begin(name).removeprefix(before).removesuffix(behind)
    return (Text(before, special=True), Text(spelt), Text(behind, special=True))


def calls_among_text(tools: Sequence[Tool], form: Format, options: Mapping[str, Any]) -> Asked:
    """Free text in which every call is of an offered tool, its arguments held as they are by
    `tool_calls.arguments` (where the model may call)."""
    # An object without a tag may be text: it is held only where arguments have to be.
    calls = _begun(tools, form) if not form.bare or any(tool.strict for tool in tools) else []
    begun = [(form.begin_alone(tool.name), _arguments(tool)) for tool in tools]
    also = [(found, content) for found, content in begun if found is not None]
    alone = (also[0][0][0], [(found[1], content) for found, content in also]) if also else None
    tag = tool_calls.among_text(calls, form.trigger, form.end, form.around, alone)
    # Who did not ask for it is served where it cannot be had.
    optional = not any(tool.strict for tool in tools)
    return _asked("structural_tag", tag, {**options, "optional": optional}, tools)


def calls_or_format(asked: Asked, choice: ToolChoice, tools: Sequence[Tool], form: Format) -> Asked:
    """Calls, or a text in the format that is asked for."""
    schema = msgspec.json.decode(asked.constraint.source)
    if form.bare:  # calls are JSON, too
        contents = [*map(_call_alone, tools), tool_calls.arguments(schema, True)]
        places = ["/properties/parameters"] * len(tools)
        return _with(asked, tools, tool_calls.either_json(contents), places)
    tag = tool_calls.or_json(
        _begun(tools, form),
        form.end,
        schema,
        choice.parallel is False,
        form.around,
        form.answer_prefix(""),
    )
    return _with(asked, tools, tag)


def _with(
    asked: Asked, tools: Sequence[Tool], tag: dict[str, Any], places: Sequence[str] = ()
) -> Asked:
    """The same field's, enforced in the same way."""
    constraint = msgspec.structs.replace(
        asked.constraint, kind="structural_tag", source=json_source(tag)
    )
    return replace(
        asked, constraint=constraint, given=asked.constraint, tools=_named(tools, places)
    )


def _begun(tools: Sequence[Tool], form: Format) -> list[tuple[str, tool_calls.Content]]:
    """How calls begin, and the arguments that follow."""
    return [(form.begin(tool.name), _arguments(tool)) for tool in tools]


def _arguments(tool: Tool) -> tool_calls.Content:
    return tool_calls.arguments(tool.parameters, tool.strict)


def _calls(
    tools: Sequence[Tool], form: Format, options: Mapping[str, Any], one: bool = False
) -> Asked:
    """Calls and nothing else, at least one; `one`: no more than that."""
    tag = tool_calls.nothing_else(_begun(tools, form), form.end, one, form.around)
    return _asked("structural_tag", tag, options, tools)


def _asked(
    kind: Any,
    source: dict[str, Any],
    options: Mapping[str, Any],
    tools: Sequence[Tool],
    places: Sequence[str] = (),
) -> Asked:
    constraint = Constraint(kind, json_source(source), **options)
    return Asked(constraint, "tools", tools=_named(tools, places))


def _named(tools: Sequence[Tool], places: Sequence[str]) -> tuple[OfTool, ...]:
    """The tools as errors and warnings name them, and at which places of a schema they are."""
    each = zip(tools, places or [""] * len(tools), strict=True)
    return tuple(OfTool(tool.name, tool.parameters, tool.strict, place) for tool, place in each)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a forced call's arguments, which may be checked: it need not be lenient."""
    held = tool_calls.arguments(tool.parameters, tool.strict is not False)
    return dict(held["json_schema"])


def _one_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of a call; the parameters' `$defs` move up to where their references look."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.name, _parameters(tool), definitions) for tool in tools]
    return _any_of(calls, definitions)


def _call_alone(tool: Tool) -> tool_calls.Content:
    """Its call as a format is asked for beside it."""
    definitions: dict[str, Any] = {}
    held = _arguments(tool)
    call = _call_schema(tool.name, held["json_schema"], definitions, "parameters")
    return {**held, "json_schema": _any_of([call], definitions)}


def _any_of(schemas: list[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {**schema, "$defs": definitions} if definitions else schema


def _call_schema(
    name: str, parameters: dict[str, Any], definitions: dict[str, Any], key: str = "arguments"
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            key: _moved(parameters, definitions, f"tool {name!r}"),
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], definitions: dict[str, Any], whose: str) -> dict[str, Any]:
    """The schema without its `$defs`, which are added to `definitions`."""
    schema = dict(schema)
    own = schema.pop("$defs", {})
    if not isinstance(own, dict):
        raise InvalidParameter("tools", f"the $defs of {whose} must be an object")
    for name, definition in own.items():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidParameter("tools", f"{name!r} is defined differently by {whose}")
    return schema
