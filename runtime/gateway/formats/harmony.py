"""gpt-oss's format: an answer is several messages, each in a channel.

<|channel|>analysis<|message|>thoughts<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>the answer<|return|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rootlace.runtime.gateway.formats.deltas import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Reasoning,
)

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[\w.-]+)")
_CHANNEL = re.compile(r"(?:<\|channel\|>|^)\s*(?P<name>analysis|commentary|final)\b")


@dataclass(frozen=True)
class Harmony:
    """The format; see `format.Format`."""

    always = True
    trigger = "<|channel|>commentary to=functions."
    end = "<|call|>"

    def parser(self, prompt_end: str, calls: bool, reasoning: bool) -> HarmonyParser:
        return HarmonyParser(prompt_end.endswith(_MESSAGE), calls, reasoning)

    def begin(self, name: str) -> str:
        return f"{self.trigger}{name} <|constrain|>json{_MESSAGE}"

    def leave_thoughts(self, prompt_end: str) -> str:
        return ""

    def answer_prefix(self, prompt_end: str) -> str:
        return f"<|channel|>final{_MESSAGE}"


class HarmonyParser:
    """Parses an answer; see `format.Parser`. `opened`: it begins within a message for the user."""

    def __init__(self, opened: bool, calls: bool, reasoning: bool) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._buffer = ""
        self._kind: type[Content] | type[Reasoning] | type[CallArguments] | None = (
            Content if opened else None
        )
        """What the message consists of; None: its header is still being written."""

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        out: list[Delta] = []
        while self._buffer and (self._header(out) if self._kind is None else self._body(out)):
            pass
        return out

    def finish(self) -> list[Delta]:
        rest, self._buffer = self._buffer, ""
        if self._kind is not None:
            return [self._kind(rest)] if rest else []
        # A header without a message says nothing, but text without a header does.
        return [] if not rest.strip() or "<|" in rest else [Content(rest)]

    def _header(self, out: list[Delta]) -> bool:
        header, found, rest = self._buffer.partition(_MESSAGE)
        if not found:
            return False
        self._buffer = rest
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and self._calls:
            out.append(CallBegin(recipient["name"]))
            self._kind = CallArguments
        elif channel is not None and channel["name"] == "analysis" and self._reasoning:
            self._kind = Reasoning
        else:
            self._kind = Content
        return True

    def _body(self, out: list[Delta]) -> bool:
        assert self._kind is not None
        found = [(at, tag) for tag in _ENDS if (at := self._buffer.find(tag)) >= 0]
        if not found:
            keep = _possible_begin(self._buffer)
            text = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(text) :]
            if text:
                out.append(self._kind(text))
            return False
        at, tag = min(found)
        if at:
            out.append(self._kind(self._buffer[:at]))
        self._buffer = self._buffer[at + len(tag) :]
        self._kind = None
        return True


def _possible_begin(text: str) -> int:
    at = text.rfind("<")
    if at < 0:
        return 0
    end = text[at:]
    return len(end) if any(tag.startswith(end) for tag in _ENDS) else 0
