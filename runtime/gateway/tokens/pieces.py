"""Text that is not tokenized yet, as runs of template text and content."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A run of text; special tokens in it are recognised only with `special`."""

    text: str
    special: bool = False


@dataclass(frozen=True)
class Joined:
    """Pieces as one string. `borders[i]` is where run i ends; neighbours differ in `special`."""

    text: str
    borders: tuple[int, ...]
    flags: tuple[bool, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Joined:
        texts: list[str] = []
        borders: list[int] = []
        flags: list[bool] = []
        length = 0
        for piece in pieces:
            if not piece.text:
                continue
            texts.append(piece.text)
            length += len(piece.text)
            if flags and flags[-1] == piece.special:
                borders[-1] = length
            else:
                borders.append(length)
                flags.append(piece.special)
        return cls("".join(texts), tuple(borders), tuple(flags))

    @property
    def has_special(self) -> bool:
        return any(self.flags)

    def is_special(self, start: int, end: int) -> bool:
        """Whether [start, end) lies within one special run."""
        begin = 0
        for border, flag in zip(self.borders, self.flags, strict=True):
            if start < border:
                return flag and begin <= start and end <= border
            begin = border
        return False

    def after(self, start: int) -> tuple[Piece, ...]:
        """The pieces from character `start` on."""
        pieces = []
        begin = 0
        for border, flag in zip(self.borders, self.flags, strict=True):
            if border > start:
                pieces.append(Piece(self.text[max(begin, start) : border], flag))
            begin = border
        return tuple(pieces)
