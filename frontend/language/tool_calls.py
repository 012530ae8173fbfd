"""Running the tools that a model called."""

from __future__ import annotations

import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rootlace.language.tools import Tools, as_text
from rootlace.language.variables import Readable
from rootlace.wire.protocol import ToolFormat

_decoder = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class ToolCall:
    """A call: the tool's `name`, its `arguments` as the model wrote them, the `result` that the
    model is told, the `error` if it has none (a TimeoutError where time was up), and how many
    `seconds` it took."""

    name: str
    arguments: dict[str, Any]
    result: str = ""
    error: BaseException | None = None
    seconds: float = field(default=0.0, compare=False)


class Offer(NamedTuple):
    """The tools of the latest `gen(tools=...)`, what it wrote, and how the model writes calls."""

    tools: Tools
    said: Readable
    form: ToolFormat

    def calls(self) -> list[ToolCall]:
        """Those that the model wrote. To be asked for once it has."""
        written = self.said.written()
        return list(find_calls(written if isinstance(written, str) else written[0], self.form))


def find_calls(text: str, form: ToolFormat) -> Iterator[ToolCall]:
    """The calls in `text`; one whose arguments are no JSON object has an error."""
    first, between, behind = form.around
    begins = _call_beginning_with(form.begin, form)
    # Behind another one, where all of them together have one beginning.
    again = form.end.removesuffix(behind) + between + form.begin.removeprefix(first)
    goes_on = _call_beginning_with(again, form)
    at = 0
    while (match := goes_on.match(text, at) or begins.search(text, at)) is not None:
        try:
            arguments, at = _decoder.raw_decode(text, match.end())
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are no JSON object")
            yield ToolCall(match[1], arguments)
        except ValueError as error:  # it was cut off, or written without the constraint
            at = match.end()
            yield ToolCall(match[1], {}, f"error: the arguments cannot be read: {error}", error)


def _call_beginning_with(begin: str, form: ToolFormat) -> re.Pattern[str]:
    return re.compile(re.escape(begin) + r"(.{1,64}?)" + re.escape(form.between), re.DOTALL)


def run(call: ToolCall, tools: Tools, timeout: float | None) -> ToolCall:
    """The call with its result. Exceptions of the tool are told to the model."""
    began = time.perf_counter()
    done = _run(call, tools, timeout)
    return replace(done, seconds=time.perf_counter() - began)


def _run(call: ToolCall, tools: Tools, timeout: float | None) -> ToolCall:
    tool = tools.find(call.name)
    if call.error is not None or tool is None:
        return call if call.error is not None else _unknown(call, tools)
    try:
        text = json.dumps(call.arguments, ensure_ascii=False)
        here = timeout is None and not tool.is_async
        value = tool.call(text) if here else _in_thread(lambda: _outcome(tool.call(text)), timeout)
        if inspect.isawaitable(value):  # an async function behind a decorator
            value = _in_thread(lambda: _outcome(value), None)
        return replace(call, result=as_text(value))
    except Exception as error:
        return _failed(call, error)


async def run_async(call: ToolCall, tools: Tools, timeout: float | None) -> ToolCall:
    """The same on an event loop; ordinary functions run in threads."""
    began = time.perf_counter()
    done = await _run_async(call, tools, timeout)
    return replace(done, seconds=time.perf_counter() - began)


async def _run_async(call: ToolCall, tools: Tools, timeout: float | None) -> ToolCall:
    tool = tools.find(call.name)
    if call.error is not None or tool is None:
        return call if call.error is not None else _unknown(call, tools)
    import asyncio

    text = json.dumps(call.arguments, ensure_ascii=False)

    async def outcome() -> Any:
        value = tool.call(text) if tool.is_async else await asyncio.to_thread(tool.call, text)
        return await value if inspect.isawaitable(value) else value

    try:
        async with asyncio.timeout(timeout) as limit:
            return replace(call, result=as_text(await outcome()))
    except Exception as error:
        return _failed(call, _OutOfTime(timeout) if limit.expired() else error)


def _unknown(call: ToolCall, tools: Tools) -> ToolCall:
    known = ", ".join(tool.name for tool in tools)
    error = LookupError(f"there is no tool {call.name!r}; there are: {known}")
    return replace(call, result=f"error: {error}", error=error)


class _OutOfTime(TimeoutError):
    """The time of `call_tools` was up; a tool may raise a TimeoutError of its own."""

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
    """The value of `call` in a thread of its own, which is left alone when time is up."""
    from concurrent.futures import Future

    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="rootlace tool", daemon=True).start()
    try:
        return future.result(timeout)
    except TimeoutError as error:
        if future.done() and future.exception() is error:
            raise
        raise _OutOfTime(timeout) from None
