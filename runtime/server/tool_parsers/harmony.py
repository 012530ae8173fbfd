"""gpt-oss's format: an answer is several messages, each in a channel.

<|channel|>analysis<|message|>thoughts<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>the answer<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from rootlace.runtime.server.tool_parsers.base import (
    CallArguments,
    CallBegin,
    Calls,
    Content,
    Delta,
    Format,
    Reasoning,
    Schemas,
    first_tag,
    pieces,
    possible_begin,
)
from rootlace.wire.protocol import Thoughts

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = ("<|start|>", "<|channel|>")
# Longest header; a text longer than that is no header.
_HEADER_CHARACTERS = 512
# Every alternative takes all that it can, so there is one way to match a text.
_HEADER = re.compile(
    r"(?:\s|<\|start\|>[\w.-]*(?![\w.-])|<\|(?:channel|constrain)\|>\w*(?!\w)|to=[\w.-]+(?![\w.-])"
    r"|\b(?:assistant|analysis|commentary|final|json|code)\b)*"
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[\w.-]+)")
_CHANNEL = re.compile(r"(?:<\|channel\|>|^)\s*(?P<name>analysis|commentary|final)\b")


_CALL = "<|channel|>commentary to=functions."
_CALLS = Calls(
    begin=_CALL,
    opening=_CALL,
    between=f" <|constrain|>json{_MESSAGE}",
    end="<|call|>",
    around=("", "<|start|>assistant", ""),
    header=_HEADER,
)


@dataclass(frozen=True)
class Harmony(Format):
    """Format of gpt-oss; see `base.Format`."""

    calls: Calls = _CALLS

    @property
    def always(self) -> bool:
        return True

    def parser(self, prompt_end: str, tools: Schemas, reasoning: bool) -> HarmonyParser:
        return HarmonyParser(prompt_end.endswith(_MESSAGE), tools, reasoning)

    def thoughts(self, prompt_end: str) -> Thoughts | None:
        begin, end = f"<|channel|>analysis{_MESSAGE}", "<|end|>"
        return Thoughts(end, begin, gap="<|start|>assistant", close=end)

    def answer_prefix(self, prompt_end: str) -> str:
        return f"<|channel|>final{_MESSAGE}"


class HarmonyParser:
    """Parser of an answer; see `base.Parser`. `opened`: the answer begins within a message.

    Text between messages is content, too. Tags that end a message are never text.
    """

    def __init__(self, opened: bool, tools: Collection[str], reasoning: bool) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._buffer = ""
        self._kind: type[Content] | type[Reasoning] | type[CallArguments] = Content
        """Kind of the message's deltas."""
        self._within = opened  # a message; else between messages
        self._heading = not opened  # a header is being written: the prompt began one
        self._trim = True  # white space between messages says nothing

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        for piece in pieces(text):
            self._buffer += piece
            self._run(out)
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        while self._heading and self._buffer:
            # A header without a message says nothing, but text without a header does.
            if "<|" in self._buffer and _HEADER.fullmatch(self._buffer):
                self._buffer = ""
            else:
                self._no_header(out)
                self._run(out)
        self._give(self._buffer, out)
        self._buffer = ""
        return out

    def _run(self, out: list[Delta]) -> None:
        while self._buffer and (self._header(out) if self._heading else self._body(out)):
            pass

    def _header(self, out: list[Delta]) -> bool:
        at = self._buffer.find(_MESSAGE, 0, _HEADER_CHARACTERS)
        if at < 0 and len(self._buffer) < _HEADER_CHARACTERS:
            return False
        header = self._buffer[: max(at, 0)]
        if at < 0 or not _HEADER.fullmatch(header):
            self._no_header(out)
            return True
        self._buffer = self._buffer[at + len(_MESSAGE) :]
        self._heading, self._within = False, True
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and recipient["name"] in self._tools:
            out.append(CallBegin(recipient["name"]))
            self._kind = CallArguments
        elif channel is not None and channel["name"] == "analysis" and self._reasoning:
            self._kind = Reasoning
        else:
            self._kind = Content
        return True

    def _no_header(self, out: list[Delta]) -> None:
        """Treat the beginning of a supposed header as text."""
        self._leave()
        tag = next((tag for tag in _BEGINS if self._buffer.startswith(tag)), "")
        self._buffer = self._buffer[len(tag) :]
        self._give(tag, out)

    def _leave(self) -> None:
        self._heading = self._within = False
        self._kind, self._trim = Content, True

    def _body(self, out: list[Delta]) -> bool:
        tags = [*_ENDS, *_BEGINS, *(() if self._within else (_MESSAGE,))]
        found = first_tag(self._buffer, tags)
        if found is None:
            at = len(self._buffer) - possible_begin(self._buffer, tags)
            self._give(self._buffer[:at], out)
            self._buffer = self._buffer[at:]
            return False
        at, tag = found
        self._give(self._buffer[:at], out)
        if tag in _BEGINS:
            self._buffer = self._buffer[at:]
            self._heading = True
        else:
            self._buffer = self._buffer[at + len(tag) :]
            self._leave()
            self._within = tag == _MESSAGE
        return True

    def _give(self, text: str, out: list[Delta]) -> None:
        if self._trim and not self._within:
            text = text.lstrip()
        if text:
            self._trim = False
            out.append(self._kind(text))
