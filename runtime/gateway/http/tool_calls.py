"""Tool calls in a model's text, in the form that Hermes and Qwen models are trained on.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, between or after
ordinary text.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

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


class ToolCallParser:
    """Splits a growing text into content and calls.

    Text that may still become a `<tool_call>` is held back. What looked like a call and is none
    (not JSON, no name, never closed) is content: nothing the model said is lost.
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
