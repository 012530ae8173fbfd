"""An answer as a sequence of blocks that begin, grow and end: how Anthropic and OpenAI's responses
stream it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rootlace.runtime.gateway.formats.deltas import (
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Reasoning,
)

Kind = Literal["text", "thoughts", "call"]


@dataclass
class Block:
    """One of an answer's blocks. `name` is that of the tool that is called."""

    index: int
    kind: Kind
    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class Begin:
    block: Block


@dataclass(frozen=True)
class More:
    block: Block
    text: str


@dataclass(frozen=True)
class End:
    block: Block


BlockEvent = Begin | More | End


class Blocks:
    """Turns deltas into blocks. At most one is open, and none is empty but a call's."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Block | None = None
        self._spaces: list[str] = []  # they begin no block

    def take(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for delta in deltas:
            match delta:
                case Content():
                    events += self._text("text", delta.text)
                case Reasoning():
                    events += self._text("thoughts", delta.text)
                case CallBegin():
                    events += self._begin("call", delta.name)
                case CallArguments():
                    events += self._more(delta.text)
        return events

    def finish(self) -> list[BlockEvent]:
        """The end of the last block."""
        last, self._open = self._open, None
        return [] if last is None else [End(last)]

    def _text(self, kind: Kind, text: str) -> list[BlockEvent]:
        if self._open is not None and self._open.kind == kind:
            return self._more(text)
        self._spaces.append(text)
        if not text.strip():
            return []
        text = "".join(self._spaces)
        return [*self._begin(kind), *self._more(text)]

    def _begin(self, kind: Kind, name: str = "") -> list[BlockEvent]:
        ended = self.finish()
        self._open = Block(self._count, kind, name)
        self._count += 1
        self._spaces = []
        return [*ended, Begin(self._open)]

    def _more(self, text: str) -> list[BlockEvent]:
        assert self._open is not None
        self._open.text += text
        return [More(self._open, text)]


def blocks_of(answer: Answer) -> list[Block]:
    """Those of a whole answer: the same as were streamed."""
    blocks = Blocks()
    events = [*blocks.take(answer.deltas), *blocks.finish()]
    return [event.block for event in events if isinstance(event, End)]
