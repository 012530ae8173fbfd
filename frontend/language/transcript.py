"""The text of a branch as its program knows it: literal text, and values still to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rootlace.language.expressions import Appendable, RoleBegin, RoleEnd
from rootlace.language.tool_calls import Offer
from rootlace.language.variables import Constant, Pending, Readable


class Marked(str):
    """Text that stands for something else, `item`: the beginning or the end of a message as the
    model's template writes it, other text of the template, or token ids (what was generated; ids
    that were appended say nothing). A branch of the same model that appends the item holds the same
    tokens."""

    __slots__ = ("item",)
    item: Appendable

    def __new__(cls, text: str, item: Appendable = "") -> Marked:
        marked = super().__new__(cls, text)
        marked.item = item
        return marked

    @property
    def is_role(self) -> bool:
        return isinstance(self.item, (RoleBegin, RoleEnd))


class StateText(str):
    """The text of a state, which remembers what it is made of. Appended as it is, outside of any
    message, its messages stay messages; joined with other text it is a string like any other."""

    __slots__ = ("pieces",)
    pieces: tuple[str, ...]

    def __new__(cls, pieces: Iterable[str]) -> StateText:
        known = tuple(pieces)
        text = super().__new__(cls, "".join(known))
        text.pieces = known
        return text

    def __reduce__(self) -> Any:
        return type(self), (self.pieces,)

    @property
    def has_roles(self) -> bool:
        return any(isinstance(piece, Marked) and piece.is_role for piece in self.pieces)


class Written(Readable, Protocol):
    """A value that is part of the text."""

    def text(self) -> str: ...

    def pieces(self) -> Iterable[str]:
        """Its text, `Marked` where it stands for something else."""


Piece = str | Written


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

    def pieces(self) -> Iterator[str]:
        for piece in self.transcript.slice(self.start, self.end):
            if isinstance(piece, str):
                yield piece
            else:
                yield from piece.pieces()

    def get(self) -> str:
        pieces = self.transcript.slice(self.start, self.end)
        return "".join(piece if isinstance(piece, str) else piece.text() for piece in pieces)

    text = written = get

    def meta(self) -> Any:
        return None

    def saved(self) -> Readable:
        return Constant(self.get())


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
    """Which pieces of a transcript belong to which message. `role` is that of the open one, `offer`
    what the latest generation may have called; None once that was taken."""

    _messages: list[tuple[str, Excerpt]] = field(default_factory=list)
    opened: bool = False
    role: str | None = None
    start: int = 0
    """Index of the open message's first piece."""
    offer: Offer | None = None

    def copy(self) -> Conversation:
        return Conversation(list(self._messages), self.opened, self.role, self.start, self.offer)

    def begin(self, role: str, transcript: Transcript) -> None:
        """A message begins behind what `transcript` holds."""
        self.opened = True
        self.role = role
        self.start = len(transcript)

    def end(self, role: str, transcript: Transcript) -> None:
        self._messages.append((role, transcript.excerpt(self.start)))
        self.role = None

    def messages(self) -> list[dict[str, str]]:
        """The finished ones."""
        return [
            {"role": role, "content": content.get().lstrip()} for role, content in self._messages
        ]


def text_of(pieces: Sequence[str]) -> tuple[Transcript, Conversation]:
    """`pieces` as a transcript, and the messages in it."""
    transcript, conversation = Transcript(), Conversation()
    for piece in pieces:
        item = piece.item if isinstance(piece, Marked) else ""
        if isinstance(item, RoleEnd):
            conversation.end(item.role, transcript)
        transcript.append(piece)
        if isinstance(item, RoleBegin):
            conversation.begin(item.role, transcript)
    return transcript, conversation
