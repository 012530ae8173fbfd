"""JSON that is still being written: where a value ends."""

from __future__ import annotations

import re

_NEXT = re.compile(r'["{}\[\]]')


class JsonEnd:
    """Finds the end of an object or array whose text comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: how many brackets are open already."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """How much of `text` belongs to the value that ends in it; None if it does not end."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                continue
            found = _NEXT.search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == '"':
                self._in_string = True
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None

    def _string(self, text: str, at: int) -> int:
        """The place behind the string's end, or that of the text."""
        while at < len(text):
            char = text[at]
            at += 1
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return at
        return at
