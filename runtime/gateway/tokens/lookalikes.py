"""What in the content of a conversation looks like a special token, or could become one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from rootlace.wire.protocol import Text


class Lookalikes:
    """Marks what is content: a mark stands behind the first character of all that looks special.

    That is a special token, in whatever case; at the ends of a text, but for white space, a part of
    one that what is written beside it could complete; and a text that is the inner part of one, if
    it is not among the `words` that a template looks for itself.
    """

    def __init__(self, special: Iterable[str], words: Collection[str] = ()) -> None:
        contents = sorted({*special} - {""}, key=len, reverse=True)
        whole = "|".join(map(re.escape, contents)) or "(?!)"
        heads = {c[:n] for c in contents for n in range(1, len(c))}
        tails = {c[n:] for c in contents for n in range(1, len(c))}
        head, tail = _any_of(heads), _any_of(tails)
        self._whole = re.compile(whole, re.IGNORECASE)
        self._any = re.compile(rf"{whole}|{head}(?=\s*\Z)|\A\s*{tail}", re.IGNORECASE)
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
        found = self._any.sub(lambda match: _behind_first(match.group(), mark), text)
        inner = text.strip()
        if len(inner) <= self._longest and found == text and self._is_inner(inner):
            return _behind_first(text, mark)
        return found

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


def _any_of(parts: Iterable[str]) -> str:
    """A single letter or digit is left out: it looks like no token."""
    found = sorted((p for p in parts if len(p) > 1 or not p.isalnum()), key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, found))})" if found else "(?!)"


def _behind_first(text: str, mark: str) -> str:
    """`text` with the mark behind its first character that is no white space."""
    at = len(text) - len(text.lstrip() or text) + 1
    return text[:at] + mark + text[at:]
