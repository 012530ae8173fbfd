"""What in the content of a conversation looks like a special token, or could become one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

from rootlace.wire.protocol import Text


class Lookalikes:
    """Marks what is content: a mark stands behind the first character of all that looks special.

    That is a special token, in whatever case; at the ends of a text, but for white space, a part of
    one that what is written beside it could complete; and a text that is the inner part of one, if
    it is not among the `words` that a template looks for itself.
    """

    def __init__(self, special: Iterable[str], words: Collection[str] = ()) -> None:
        contents = {*special} - {""}
        self._whole = re.compile(_one_of(contents), re.IGNORECASE)
        cut = [(c[:n].rstrip(), c[n:].lstrip()) for c in contents for n in range(1, len(c))]
        self._heads = {_folded(head) for head, _ in cut if _looks_special(head)}
        self._tails = {_folded(tail) for _, tail in cut if _looks_special(tail)}
        self._all = "\n".join(contents).casefold()
        self._cores = {c[1:-1].casefold() for c in contents}
        self._longest = max(map(len, contents), default=0)
        self._words = frozenset(words)

    def marked(self, value: Any, mark: str) -> Any:
        """`value` with the mark in all its texts, and the names of its items."""
        if isinstance(value, str):
            return self._text(value, mark)
        if isinstance(value, dict):
            return {self.marked(k, mark): self.marked(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(one, mark) for one in value]
        return value

    def remarked(self, before: str, after: str, mark: str) -> str:
        """The text `after`, which a template made of `before`: special tokens that are only there
        were put together of content."""
        made = Counter(self._whole.findall(after))
        return self._text(after, mark) if made - Counter(self._whole.findall(before)) else after

    def _text(self, text: str, mark: str) -> str:
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        places, at = set[int](), 0
        while match := self._whole.search(text, at):
            at = _first_of(match) + 1  # one may begin within another
            places.add(at - 1)
        # What is only looked for at the ends is looked for there alone: texts may be long.
        most = range(min(self._longest, end - begin), 0, -1)
        if any(_folded(text[begin : begin + n]) in self._tails for n in most):
            places.add(begin)
        places.update(end - n for n in most if _folded(text[end - n : end]) in self._heads)
        if not places and end - begin <= self._longest and self._is_inner(text[begin:end]):
            places.add(begin)
        if not places:
            return text
        borders = [0, *(place + 1 for place in sorted(places)), len(text)]
        return mark.join(text[one:other] for one, other in pairwise(borders))

    def _is_inner(self, text: str) -> bool:
        if not text or text in self._words:
            return False
        folded = text.casefold()
        return folded in self._cores or (not text.isalnum() and folded in self._all)


def split(text: str, mark: str) -> Iterable[Text]:
    """A template's text, in which the character before each mark is ordinary text."""
    position = 0
    while (at := text.find(mark, position)) >= 0:
        # The character before the mark interrupts the special run, and with it the token.
        if at - 1 > position:
            yield Text(text[position : at - 1], special=True)
        yield Text(text[at - 1 : at])
        position = at + 1
    if position < len(text):
        yield Text(text[position:], special=True)


def _one_of(contents: Collection[str]) -> str:
    """A pattern of these, the longest that fits: of a tree of their characters, so that each place
    of a text is looked at for as long as one of them may stand there."""
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for character in content:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(tree) if contents else "(?!)"


def _pattern(node: dict[str, Any]) -> str:
    ways = [
        re.escape(character) + _pattern(below) for character, below in node.items() if character
    ]
    if not ways:
        return ""
    some = f"(?:{'|'.join(ways)})" if len(ways) > 1 or "" in node else ways[0]
    return some + "?" * ("" in node)


def _looks_special(part: str) -> bool:
    """A single letter or digit looks like no token."""
    part = part.strip()
    return len(part) > 1 or bool(part and not part.isalnum())


def _folded(text: str) -> str:
    """So that texts are equal which differ in case alone, or would after `upper`."""
    return text.upper().casefold()


def _first_of(match: re.Match[str]) -> int:
    """The first place of it that is no white space."""
    found = match.group()
    return match.start() + len(found) - len(found.lstrip() or found)
