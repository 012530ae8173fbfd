"""Tools: Python functions that a model may call, as JSON schemas made of their signatures."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from rootlace import types
from rootlace.language.expressions import Expression
from rootlace.language.failures import Site, call_site
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint, InvalidRequest
from rootlace.wire.protocol import ToolFormat

Schema = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The description of an argument: Google's `name (type): text`, Sphinx's `:param name: text`.
_ARGUMENT = re.compile(r"(?::param\s+)?(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>\S.*)")
_SECTION = re.compile(
    r"\s*(args|arguments|parameters|returns?|raises|yields|examples?|notes?):?\s*", re.IGNORECASE
)


@dataclass(frozen=True)
class Tool:
    """What a model may call. `parameters` is the JSON schema of its arguments; `call` takes them
    as JSON text and gives a value, or something to be awaited."""

    name: str
    description: str
    parameters: Schema
    call: Callable[[str], Any] = field(repr=False)
    is_async: bool = False

    def definition(self) -> dict[str, Any]:
        """As OpenAI's interface has it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools(Expression):
    """What `tools(...)` gives: in a system message, the list of the tools as the model's template
    writes it; in `gen(tools=...)`, what may be called."""

    each: tuple[Tool, ...]
    site: Site = field(default_factory=call_site, repr=False, compare=False)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    def find(self, name: str) -> Tool | None:
        return next((tool for tool in self.each if tool.name == name), None)

    def constrain(self, form: ToolFormat, choice: str) -> Mapping[str, Any] | None:
        """A structural tag: text in which every call is one of these tools' and fits its schema,
        as far as that can be held without a check of the text.

        `choice`: "auto" (there may be calls), "required" (there is one), "none" (no constraint), or
        the name of the tool that is called. Raises InvalidConstraint for another one.
        """
        if choice == "none":
            return None
        offered: Iterable[Tool] = self.each
        if choice not in ("auto", "required"):
            tool = self.find(choice)
            if tool is None:
                known = ", ".join(repr(tool.name) for tool in self.each)
                raise InvalidConstraint(
                    f"tool_choice must be 'auto', 'required', 'none' or one of {known}, "
                    f"not {choice!r}"
                )
            offered = [tool]
        calls = [
            (form.begin + tool.name + form.between, tool_calls.arguments(tool.parameters))
            for tool in offered
        ]
        if choice == "auto":
            return tool_calls.among_text(calls, form.trigger, form.end, form.around)
        return tool_calls.nothing_else(calls, form.end, True, form.around)


def tools(*given: Callable[..., Any] | Tool | Tools) -> Tools:
    """Tools of plain Python functions, sync or async, and of other tools.

    A function's name, the first paragraph of its docstring and its parameters say what the model is
    told; annotations may be all that `gen(type=...)` takes. Each call's arguments are checked and
    given as these types. Raises TypeError for a function with `*args` or `**kwargs`, InvalidRequest
    for two tools of one name.
    """
    found: dict[str, Tool] = {}
    for one in given:
        for tool in one if isinstance(one, Tools) else [_tool(one)]:
            if tool.name in found:
                raise InvalidRequest(f"tools(): there are two tools {tool.name!r}")
            found[tool.name] = tool
    if not found:
        raise TypeError("tools() needs a function")
    return Tools(tuple(found.values()))


def _tool(given: Any) -> Tool:
    if isinstance(given, Tool):
        return given
    if not callable(given) or isinstance(given, type):
        raise TypeError(f"tools() takes functions, not {given!r}")
    name = getattr(given, "__name__", "")
    if not _NAME.fullmatch(name):
        raise TypeError(f"tools(): {given!r} has no name that a model could call")
    arguments = _arguments(given, name)
    about, described = _documented(inspect.getdoc(given) or "")
    schema = _inline(types.schema_of(arguments))
    properties = {
        key: {**value, "description": described[key]} if key in described else value
        for key, value in schema.get("properties", {}).items()
    }
    names = [argument.name for argument in dataclasses.fields(arguments)]

    def call(text: str) -> Any:
        values = types.parse_as(arguments, text)
        return given(**{name: getattr(values, name) for name in names})

    is_async = inspect.iscoroutinefunction(given)
    return Tool(name, about, {**schema, "properties": properties}, call, is_async)


def _arguments(function: Callable[..., Any], name: str) -> type:
    """A dataclass of the function's parameters."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"tools(): the types of {name}() are not known: {error}") from None
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tools(): {name}() takes *args or **kwargs, which no schema can say")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"tools(): {name}() takes {parameter.name!r} by position only")
        about: Any = dataclasses.field()
        if parameter.default is not parameter.empty:
            about = dataclasses.field(default_factory=_always(parameter.default))
        fields.append((parameter.name, hints.get(parameter.name, Any), about))
    return dataclasses.make_dataclass(name, fields, kw_only=True)


def _always(value: Any) -> Callable[[], Any]:
    return lambda: value


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its outermost reference resolved, without the name of our own class."""
    schema = dict(schema)
    definitions = dict(schema.pop("$defs", {}))
    if "$ref" in schema:
        schema = dict(definitions.pop(schema["$ref"].rpartition("/")[2]))
    schema.pop("title", None)
    return {**schema, "$defs": definitions} if definitions else schema


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's first paragraph, and what it says of arguments, on one line each."""
    about, _, rest = text.partition("\n\n")
    described: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        match = _ARGUMENT.fullmatch(line.strip())
        if not line.strip() or _SECTION.fullmatch(line):
            last = ""
        elif match is not None:
            last = match["name"]
            described.setdefault(last, match["text"])
        elif last:
            described[last] += f" {line.strip()}"
    return " ".join(about.split()), described


def as_text(value: Any) -> str:
    """What a tool gave, as the model is told: a string as it is, anything else as JSON if it has a
    form there."""
    if isinstance(value, str):
        return value
    dump = getattr(value, "model_dump_json", None)
    if dump is not None:
        return str(dump())
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, TypeError, ValueError):
        return str(value)
