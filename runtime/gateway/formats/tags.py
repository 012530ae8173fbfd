"""Tags in text of which only the beginning may have come."""

from __future__ import annotations

from collections.abc import Collection, Iterator

_PIECE_CHARACTERS = 4096


def first_tag(text: str, tags: Collection[str]) -> tuple[int, str] | None:
    """Where the first of the tags stands, and which it is."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)


def possible_begin(text: str, tags: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    most = max(map(len, tags), default=1) - 1
    tail = text[-most:] if most else ""
    if {tag[:1] for tag in tags}.isdisjoint(tail):
        return 0
    for length in range(len(tail), 0, -1):
        end = tail[-length:]
        if any(len(tag) > length and tag.startswith(end) for tag in tags):
            return length
    return 0


def pieces(text: str) -> Iterator[str]:
    """The text in pieces that a parser can search from their beginning for every tag in them."""
    for at in range(0, len(text), _PIECE_CHARACTERS):
        yield text[at : at + _PIECE_CHARACTERS]
