"""Regular expressions, and the bodies of grammars' rules, as trees, whatever they were written as.

The language is over Unicode scalar values (no surrogates); every tree describes whole texts. Trees
are built by `trees`: where a part of one matches nothing, all of it does, and is `trees.NOTHING`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LAST = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Literal:
    """This text; the empty one too."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of `ranges`: inclusive code points, ascending, neither overlapping nor
    adjacent, without surrogates. No ranges: nothing matches."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of `options`; no options: nothing matches."""

    options: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item` at least `least` and at most `most` times (None: without bound), which is never
    below `least`."""

    item: Regex
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """Matches the empty text where `item` can (or, `negative`, cannot) match what follows."""

    item: Regex
    negative: bool


@dataclass(frozen=True, slots=True)
class LookBehind:
    """Matches the empty text after (or, `negative`, not after) a character of `chars`."""

    chars: Chars
    negative: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """A deterministic automaton of characters, which begins in state 0.

    `edges[state]`: what is read next and the state behind it; `accepting[state]`: whether a text
    may end there. From every state a text can end.
    """

    edges: tuple[tuple[tuple[Regex, int], ...], ...]
    accepting: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the rule `name` of a grammar describes; only grammars have it, not what is regular."""

    name: str


Regex = Literal | Chars | Concat | Either | Repeat | Graph | Look | LookBehind | Reference


def nodes(regex: Regex) -> Iterator[Regex]:
    """`regex` and all of its parts; one that it has in several places comes once."""
    seen: set[int] = set()
    stack = [regex]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            match node:
                case Concat(parts) | Either(parts):
                    stack += parts
                case Repeat(item):
                    stack.append(item)
