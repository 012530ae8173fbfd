"""A prefix that the programs of a batch share, and how a program's branch starts from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rootlace.wire.protocol import Part, Text


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A branch on the server that holds `texts`; `branch` is its id."""

    branch: int
    texts: tuple[Text, ...]


def merge(parts: Iterable[Text]) -> tuple[Text, ...]:
    """Join neighbours of the same kind: how text is cut into pieces does not matter."""
    merged: list[Text] = []
    for part in parts:
        if not part.text:
            continue
        if merged and merged[-1].special == part.special:
            merged[-1] = Text(merged[-1].text + part.text, special=part.special)
        else:
            merged.append(part)
    return tuple(merged)


class PrefixMatcher:
    """Holds back a new branch's first text until it is known whether it starts with the prefix."""

    def __init__(self, prefix: SharedPrefix) -> None:
        self.prefix = prefix
        self._held: list[Text] = []

    def feed(self, parts: Iterable[Part]) -> tuple[bool | None, tuple[Part, ...]]:
        """Take more of the branch's beginning.

        Gives (True, what follows the prefix), (False, everything: it starts otherwise), or
        (None, ()) while it may still become either.
        """
        parts = tuple(parts)
        if not all(isinstance(part, Text) for part in parts):
            return False, (*self._held, *parts)
        self._held.extend(part for part in parts if isinstance(part, Text))
        have, want = merge(self._held), self.prefix.texts
        for index, wanted in enumerate(want):
            if index == len(have):
                return None, ()
            got = have[index]
            last = index == len(want) - 1
            if got.special != wanted.special:
                return False, have
            if got.text == wanted.text:
                continue
            if last and got.text.startswith(wanted.text):
                rest = Text(got.text[len(wanted.text) :], special=got.special)
                return True, (rest, *have[index + 1 :])
            if index == len(have) - 1 and wanted.text.startswith(got.text):
                return None, ()
            return False, have
        return True, have[len(want) :]

    def give_up(self) -> tuple[Text, ...]:
        """Everything held back, because something that is not text follows."""
        return merge(self._held)
