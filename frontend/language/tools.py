"""Tools that a model may call: Python functions and MCP servers' tools, and running the calls."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

import msgspec

from rootlace import types
from rootlace.language import sampling
from rootlace.language.expressions import Expression
from rootlace.language.failures import Site, call_site
from rootlace.language.variables import Readable
from rootlace.types import tagged_arguments
from rootlace.types.msgspec_types import in_words
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint, InvalidRequest, RootlaceError
from rootlace.wire.tool_calls import ToolFormat

Schema = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The description of an argument: Google's `name (type): text`, Sphinx's `:param name: text`.
_ARGUMENT = re.compile(r"(?::param\s+)?(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>\S.*)")
_SECTION = re.compile(
    r"\s*(args|arguments|parameters|returns?|raises|yields|examples?|notes?):?\s*", re.IGNORECASE
)


@dataclass(frozen=True)
class Tool:
    """Function that a model may call. `parameters` is the JSON schema of the arguments. `call`
    takes the arguments as JSON text and returns a value or an awaitable."""

    name: str
    description: str
    parameters: Schema
    call: Callable[[str], Any] = field(repr=False)
    is_async: bool = False

    def definition(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format, as the model is told of it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": in_words(dict(self.parameters)),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools(Expression):
    """Set of tools, made by `tools(...)`. A system message shows the tools in the model's template;
    `gen(tools=...)` lets the model call them."""

    each: tuple[Tool, ...]
    site: Site = field(default_factory=call_site, repr=False, compare=False)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    def find(self, name: str) -> Tool | None:
        return next((tool for tool in self.each if tool.name == name), None)

    def constrain(self, form: ToolFormat, choice: str) -> Mapping[str, Any] | None:
        """Return the structural tag of text whose calls name these tools and fit their schemas.
        Schema keywords that token masks cannot enforce are left out.

        `choice`: "auto" (there may be calls), "required" (there is one), "none" (no constraint), or
        the name of the tool to call. Raises InvalidConstraint for another choice.
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
        calls = []
        for tool in offered:
            content = tool_calls.arguments(tool.parameters)
            if form.argument is not None:
                content = tagged_arguments.held(form.argument, content)
            calls.append((form.begin + tool.name + form.between, content))
        if choice == "auto":
            return tool_calls.among_text(calls, form.trigger, form.end, form.around)
        return tool_calls.nothing_else(calls, form.end, True, form.around)


def tools(*given: Callable[..., Any] | Tool | Tools) -> Tools:
    """Make tools of plain Python functions, sync or async, and of other tools.

    The model is told a function's name, its docstring's first paragraph and its parameters.
    Annotations may be all that `gen(type=...)` takes. `Annotated[int, "how many"]` describes a
    parameter that the docstring does not describe. Each call's arguments are checked and converted
    to these types. Raises TypeError for a function with `*args` or `**kwargs`, InvalidRequest for
    two tools of one name.
    """
    by_name: dict[str, Tool] = {}
    for one in given:
        for tool in one if isinstance(one, Tools) else [_tool(one)]:
            if tool.name in by_name:
                raise InvalidRequest(f"tools(): there are two tools {tool.name!r}")
            by_name[tool.name] = tool
    if not by_name:
        raise TypeError("tools() needs a function")
    return Tools(tuple(by_name.values()))


def _tool(function: Any) -> Tool:
    if isinstance(function, Tool):
        return function
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"tools() takes functions, not {function!r}")
    name = getattr(function, "__name__", "")
    if not _NAME.fullmatch(name):
        raise TypeError(f"tools(): {function!r} has no name that a model could call")
    arguments = _arguments(function, name)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tools(): {name}() has a `yield`; a tool returns its result")
    about, described = _documented(inspect.getdoc(function) or "")
    for argument in dataclasses.fields(arguments):
        for note in getattr(argument.type, "__metadata__", ()):
            if isinstance(note, str):  # Annotated[int, "what it is"]
                described.setdefault(argument.name, note)
    schema = _inline(types.schema_of(arguments))
    properties = {key: dict(value) for key, value in schema.get("properties", {}).items()}
    for key, parameter in inspect.signature(function).parameters.items():
        if key in described:
            properties[key]["description"] = described[key]
        if parameter.default is not parameter.empty:
            with suppress(TypeError, ValueError):  # JSON has no form for it
                text = json.dumps(msgspec.to_builtins(parameter.default), allow_nan=False)
                properties[key]["default"] = json.loads(text)
    names = [argument.name for argument in dataclasses.fields(arguments)]

    def call(text: str) -> Any:
        values = types.parse_as(arguments, text)
        return function(**{name: getattr(values, name) for name in names})

    is_async = inspect.iscoroutinefunction(function)
    return Tool(name, about, {**schema, "properties": properties}, call, is_async)


def _arguments(function: Callable[..., Any], name: str) -> type:
    """Make a dataclass of the function's parameters."""
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
    """Resolve the schema's outermost reference, and drop the generated class's title."""
    schema = dict(schema)
    definitions = dict(schema.pop("$defs", {}))
    if "$ref" in schema:
        schema = dict(definitions.pop(schema["$ref"].rpartition("/")[2]))
    schema.pop("title", None)
    return {**schema, "$defs": definitions} if definitions else schema


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraph, and its descriptions of arguments, on one line each."""
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
    """Return a tool's result as text for the model: a string unchanged, anything else as JSON. A
    part without a JSON form becomes a string."""
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump_json") and not isinstance(value, type):
        return str(value.model_dump_json())

    def part(inner: Any) -> Any:
        if hasattr(inner, "model_dump"):
            return inner.model_dump(mode="json")
        if inner is value:
            raise TypeError
        known = sampling.plain(inner)
        return str(inner) if known is inner else known

    try:
        return msgspec.json.encode(value, enc_hook=part).decode()
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return str(value)


# Calls --------------------------------------------------------------------------------------------


_decoder = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool: its `name`, the model's `arguments`, and the `result` text told to the model.
    `error` is the exception of a failed call (a TimeoutError after the timeout). `seconds` is the
    duration."""

    name: str
    arguments: dict[str, Any]
    result: str = ""
    error: BaseException | None = None
    seconds: float = field(default=0.0, compare=False)


class Offer(NamedTuple):
    """Tools of the latest `gen(tools=...)`, its text, and the model's tool-call format. `calling`
    is False for the choice "none": text like a call is text then."""

    tools: Tools
    text: Readable
    form: ToolFormat
    calling: bool

    def calls(self) -> list[ToolCall]:
        """Return the calls in the generated text; call it once the text is complete."""
        if not self.calling:
            return []
        written = self.text.written()
        text = written if isinstance(written, str) else written[0]
        calls = list(find_calls(text, self.form, self.tools))
        if calls and calls[-1].error is not None:
            meta = self.text.meta()
            meta = meta[0] if isinstance(meta, list) else meta
            if meta["finish_reason"]["type"] == "length":
                error = ValueError(f"the call was cut off after {meta['completion_tokens']} tokens")
                calls[-1] = replace(calls[-1], result=f"error: {error}", error=error)
        return calls


def find_calls(text: str, form: ToolFormat, tools: Tools) -> Iterator[ToolCall]:
    """Yield the calls in `text`; a call with unreadable arguments has an error."""
    first, between, behind = form.around
    begins = _call_beginning_with(form.begin, form)
    # Behind another one, where all of them together have one beginning.
    end = form.end.removesuffix(behind)
    again = end + between + form.begin.removeprefix(first)
    goes_on = _call_beginning_with(again, form)
    at = 0
    while (match := goes_on.match(text, at) or begins.search(text, at)) is not None:
        try:
            if form.argument is not None:
                tool = tools.find(match[1])
                schema = tool.parameters if tool is not None else {}
                arguments, at = tagged_arguments.read(text, match.end(), form.argument, end, schema)
            else:
                arguments, at = _decoder.raw_decode(text, match.end())
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are no JSON object")
            yield ToolCall(match[1], arguments)
        except (ValueError, RecursionError) as error:
            # It was cut off, or written without the constraint. A text that does not end is one
            # whatever stands in it.
            at = match.end() if form.argument is None else len(text)
            yield ToolCall(match[1], {}, f"error: the arguments cannot be read: {error}", error)


def _call_beginning_with(begin: str, form: ToolFormat) -> re.Pattern[str]:
    name = r"(.{1,64}?)" if form.argument is None else r"([^\s<>]{1,64})"
    return re.compile(re.escape(begin) + name + re.escape(form.between), re.DOTALL)


def run_call(call: ToolCall, tools: Tools, timeout: float | None) -> ToolCall:
    """Run the call and return it with its result. A tool's exception becomes text for the model."""
    tool = tools.find(call.name)
    if call.error is not None or tool is None:
        return call if call.error is not None else _unknown(call, tools)
    began = time.perf_counter()
    try:
        text = json.dumps(call.arguments, ensure_ascii=False)
        here = timeout is None and not tool.is_async
        value = tool.call(text) if here else _in_thread(lambda: _outcome(tool.call(text)), timeout)
        if inspect.isawaitable(value):  # an async function behind a decorator
            value = _in_thread(lambda: _outcome(value), None)
        done = replace(call, result=as_text(value))
    except Exception as error:
        done = _failed(call, error)
    return replace(done, seconds=time.perf_counter() - began)


async def run_call_async(call: ToolCall, tools: Tools, timeout: float | None) -> ToolCall:
    """Run the call on an event loop; ordinary functions run in threads."""
    tool = tools.find(call.name)
    if call.error is not None or tool is None:
        return call if call.error is not None else _unknown(call, tools)
    import asyncio

    began = time.perf_counter()
    text = json.dumps(call.arguments, ensure_ascii=False)

    async def outcome() -> Any:
        value = tool.call(text) if tool.is_async else await asyncio.to_thread(tool.call, text)
        return await value if inspect.isawaitable(value) else value

    try:
        async with asyncio.timeout(timeout) as limit:
            done = replace(call, result=as_text(await outcome()))
    except Exception as error:
        done = _failed(call, _OutOfTime(timeout) if limit.expired() else error)
    return replace(done, seconds=time.perf_counter() - began)


def _unknown(call: ToolCall, tools: Tools) -> ToolCall:
    known = ", ".join(tool.name for tool in tools)
    error = LookupError(f"there is no tool {call.name!r}; there are: {known}")
    return replace(call, result=f"error: {error}", error=error)


class _OutOfTime(TimeoutError):
    """Error of a call after `call_tools`' timeout, unlike a tool's own TimeoutError."""

    def __init__(self, timeout: float | None) -> None:
        super().__init__(f"no result after {timeout:g} s")


def _failed(call: ToolCall, error: Exception) -> ToolCall:
    reason = str(error) if isinstance(error, _OutOfTime) else f"{type(error).__name__}: {error}"
    return replace(call, result=f"error: {reason}", error=error)


def _outcome(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value
    import asyncio

    return asyncio.run(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value


def _in_thread(call: Callable[[], Any], timeout: float | None) -> Any:
    """Return the value of `call`, run in a new thread that is abandoned after `timeout` s."""
    from concurrent.futures import Future

    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="rootlace tool", daemon=True).start()
    try:
        return future.result(timeout)
    except TimeoutError as error:
        if future.done() and future.exception() is error:
            raise
        raise _OutOfTime(timeout) from None


# MCP ----------------------------------------------------------------------------------------------


class ToolFailed(RootlaceError):
    """Error that an MCP server reports for a call, with the server's message."""

    code = "tool_failed"
    http_status = 422


async def mcp_tools(client: Any) -> Tools:
    """Return the tools of a connected `mcp.Client`'s server, for `gen(tools=...)`.

    Calls run on the present event loop, which must go on while programs use the tools. `async def`
    programs keep the loop free; run ordinary programs in a thread.

    A result is its text. A list sent in several parts or none is read from the structured content,
    which keeps nesting.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    listed: list[Tool] = []
    cursor = None
    while cursor is not None or not listed:
        page = _plain(await client.list_tools(cursor=cursor))
        listed += [_mcp_tool(client, loop, described) for described in page["tools"]]
        cursor = page.get("nextCursor")
        if not listed and cursor is None:
            raise InvalidRequest("the MCP server has no tools")
    return tools(*listed)


def _plain(answer: Any) -> dict[str, Any]:
    """Return a message of MCP as a JSON dictionary."""
    plain: dict[str, Any] = answer.model_dump(by_alias=True, mode="json")
    return plain


def _mcp_tool(client: Any, loop: Any, described: dict[str, Any]) -> Tool:
    import asyncio

    name: str = described["name"]

    async def ask(text: str) -> str:
        result = _plain(await client.call_tool(name, json.loads(text)))
        structured = result.get("structuredContent")
        if structured is not None and len(result["content"]) != 1:
            answer = json.dumps(structured, ensure_ascii=False)
        else:
            answer = "\n".join(part.get("text", f"[{part['type']}]") for part in result["content"])
        if result.get("isError"):
            raise ToolFailed(answer)
        return answer

    async def call(text: str) -> str:
        if asyncio.get_running_loop() is loop:
            return await ask(text)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(text), loop))

    about = " ".join((described.get("description") or "").split())
    return Tool(name, about, described["inputSchema"], call, is_async=True)
