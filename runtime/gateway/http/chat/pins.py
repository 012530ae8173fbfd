"""Beginnings of a prompt that are to be pinned: where they end, and the prompt cut there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rootlace.wire.handling import Cache
from rootlace.wire.protocol import Part, Text


@dataclass(frozen=True, order=True)
class Place:
    """A place in a prompt: in its part of this number, before the character of this number."""

    part: int
    character: int


@dataclass(frozen=True)
class Pin:
    """A prompt is pinned up to `place`, in the way that `cache` says."""

    place: Place
    cache: Cache


def common(parts: Sequence[Part], others: Sequence[Part]) -> Place:
    """Where two prompts begin to differ."""
    same = _same(parts, others)
    if same == len(parts) or same == len(others):
        return Place(same, 0)
    one, other = parts[same], others[same]
    if not (isinstance(one, Text) and isinstance(other, Text) and one.special == other.special):
        return Place(same, 0)
    return Place(same, _same(one.text, other.text))


def _same(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def in_order(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    """The pins by place, without those that begin nothing; of several at one place, the longest."""
    found: dict[Place, Pin] = {}
    for pin in sorted(pins, key=lambda pin: (pin.place, pin.cache.ttl or 0.0)):
        if pin.place > Place(0, 0):
            found[pin.place] = pin
    return tuple(found.values())


def cut(parts: Sequence[Part], pins: Sequence[Pin]) -> Iterator[tuple[tuple[Part, ...], Cache]]:
    """What of the prompt comes up to each pin, behind the pin before; then the rest, with no pin.
    `pins` are in order."""
    begin = Place(0, 0)
    for pin in pins:
        yield tuple(_between(parts, begin, pin.place)), pin.cache
        begin = pin.place
    yield tuple(_between(parts, begin, Place(len(parts), 0))), Cache()


def _between(parts: Sequence[Part], begin: Place, end: Place) -> Iterator[Part]:
    for number in range(begin.part, min(end.part + 1, len(parts))):
        part = parts[number]
        first = begin.character if number == begin.part else 0
        last = end.character if number == end.part else None
        if isinstance(part, Text) and (first or last is not None):
            if text := part.text[first:last]:
                yield Text(text, part.special)
        elif last is None:
            yield part
