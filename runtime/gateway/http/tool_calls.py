"""Tool calls in a model's text, in the form that Hermes and Qwen models are trained on.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, between or after
ordinary text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Part, Text

BEGIN = "<tool_call>"
END = "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call; `arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class _Template(Protocol):
    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[Part, ...]: ...


_PROBE_NAME, _PROBE_KEY = "probe_the_name", "probe_the_arguments"
_PROBE = re.compile(
    rf"(?P<opening>{BEGIN}(?:(?!{BEGIN}).)*?){_PROBE_NAME}(?P<between>.*?)"
    rf'\{{\s*"{_PROBE_KEY}"\s*:\s*1\s*\}}(?P<closing>.*?{END})',
    re.DOTALL,
)


@dataclass(frozen=True)
class CallFormat:
    """The text around the name and the arguments of a call, as the model has seen it.

    The defaults are what Qwen's and Hermes's templates write.
    """

    opening: str = f'{BEGIN}\n{{"name": "'
    between: str = '", "arguments": '
    closing: str = f"}}\n{END}"

    @classmethod
    def of(cls, template: _Template) -> Self:
        """As the chat template writes the calls of an earlier turn; the default if it does not."""
        function = {"name": _PROBE_NAME, "arguments": {_PROBE_KEY: 1}}
        call = {"id": "call_0", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            parts = template.render(messages, add_generation_prompt=False)
        except InvalidRequest:
            return cls()
        found = _PROBE.search("".join(part.text for part in parts if isinstance(part, Text)))
        return cls(**found.groupdict()) if found else cls()

    def begin(self, name: str) -> str:
        """What a call of the tool `name` begins with, up to its arguments."""
        return self.opening + msgspec.json.encode(name).decode()[1:-1] + self.between


class ToolCallParser:
    """Splits a growing text into content and calls.

    Text that may still become a `<tool_call>` is held back. What looks like a call and is none (not
    JSON, no name, never closed) becomes content: nothing the model wrote is lost.
    """

    def __init__(self, opened: bool = False) -> None:
        """`opened`: the text begins within a call, because the prompt ended with its tag."""
        self._buffer = BEGIN if opened else ""

    def feed(self, text: str) -> list[str | ToolCall]:
        """The pieces that are decided now, in order; a `str` is content."""
        self._buffer += text
        pieces: list[str | ToolCall] = []
        while self._buffer:
            begin = self._buffer.find(BEGIN)
            if begin < 0:
                keep = _possible_begin(self._buffer)
                _add(pieces, self._buffer[: len(self._buffer) - keep])
                self._buffer = self._buffer[len(self._buffer) - keep :]
                break
            end = self._buffer.find(END, begin)
            if end < 0:
                _add(pieces, self._buffer[:begin])
                self._buffer = self._buffer[begin:]
                break
            _add(pieces, self._buffer[:begin])
            call = _parse(self._buffer[begin + len(BEGIN) : end])
            if call is None:
                _add(pieces, self._buffer[begin : end + len(END)])
            else:
                pieces.append(call)
            self._buffer = self._buffer[end + len(END) :]
        return pieces

    def finish(self) -> list[str | ToolCall]:
        """What is left when the text has ended."""
        rest, self._buffer = self._buffer, ""
        if not rest.startswith(BEGIN):
            return [rest] if rest else []
        # A model may stop right behind the JSON: its closing tag can be its stop token.
        call = _parse(rest[len(BEGIN) :])
        return [rest if call is None else call]


def split_tool_calls(text: str, opened: bool = False) -> tuple[str, list[ToolCall]]:
    """A finished text's content, without the white space around calls, and its calls."""
    parser = ToolCallParser(opened)
    pieces = parser.feed(text) + parser.finish()
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return (content.strip() if calls else content), calls


def _possible_begin(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of `BEGIN`."""
    for length in range(min(len(BEGIN) - 1, len(text)), 0, -1):
        if text.endswith(BEGIN[:length]):
            return length
    return 0


def _add(pieces: list[str | ToolCall], text: str) -> None:
    if text:
        pieces.append(text)


class _Written(msgspec.Struct):
    """A call as models write it. The arguments stay as written: numbers are not reformatted."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _parse(source: str) -> ToolCall | None:
    try:
        call = msgspec.json.decode(source.strip(), type=_Written)
        arguments = bytes(call.arguments).decode().strip()
        if arguments.startswith('"'):  # some models quote the object
            arguments = msgspec.json.decode(arguments, type=str)
    except (msgspec.DecodeError, RecursionError):
        return None
    return ToolCall(call.name, "{}" if arguments == "null" else arguments)
