"""The text of a branch as its program knows it: literal text, and values still to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rootlace.language.variables import Pending
from rootlace.program.operations import Generation, Selection


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The pieces `start` to `end` of a transcript: a variable scope, or what a join brought."""

    transcript: Transcript
    start: int
    end: int

    def requires(self) -> Iterable[Pending]:
        for piece in self.transcript.slice(self.start, self.end):
            if not isinstance(piece, str):
                yield from piece.requires()

    def get(self) -> str:
        pieces = self.transcript.slice(self.start, self.end)
        return "".join(piece if isinstance(piece, str) else piece.text() for piece in pieces)

    text = written = get

    def meta(self) -> Any:
        return None


Piece = str | Generation | Selection | Excerpt


class Transcript:
    """Grows at its end only. A fork refers to its parent's pieces instead of copying them."""

    __slots__ = ("_base", "_own", "_start")

    def __init__(self, base: Transcript | None = None) -> None:
        self._base = base
        self._start = len(base) if base is not None else 0
        self._own: list[Piece] = []

    def __len__(self) -> int:
        return self._start + len(self._own)

    @property
    def start(self) -> int:
        """Index of the first piece that is not the parent's."""
        return self._start

    def append(self, piece: Piece) -> None:
        self._own.append(piece)

    def slice(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces `start` to `end` (exclusive), ancestors' pieces included."""
        parts: list[list[Piece]] = []
        node: Transcript | None = self
        while node is not None and end > start:
            if end > node._start:
                parts.append(node._own[max(start - node._start, 0) : end - node._start])
                end = node._start
            node = node._base
        for part in reversed(parts):
            yield from part

    def excerpt(self, start: int = 0) -> Excerpt:
        """Everything from piece `start` to the present end."""
        return Excerpt(self, start, len(self))


@dataclass(slots=True)
class Conversation:
    """Which pieces of a transcript belong to which message."""

    messages: list[tuple[str, Excerpt]] = field(default_factory=list)
    opened: bool = False
    role: str | None = None
    role_start: int = 0

    def copy(self) -> Conversation:
        return Conversation(list(self.messages), self.opened, self.role, self.role_start)
