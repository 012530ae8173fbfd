"""JSON that is still being written: where a value ends."""

from __future__ import annotations

import re

from rootlace.runtime.gateway.formats.tags import possible_begin

_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of an object or array whose text comes in pieces."""

    def __init__(self, depth: int = 0, stops: tuple[str, ...] = ()) -> None:
        """`depth`: how many brackets are open already. `stops`: tags that end the value if they
        stand outside a string, where the model forgot a bracket."""
        self.closed = False
        """Whether the value's last bracket has been closed."""
        self.stopped = False
        """Whether a tag ended the value before that."""
        self._depth = depth
        self._stops = stops
        self._next = re.compile("|".join([*map(re.escape, stops), r'["{}\[\]]']))
        self._in_string = False
        self._escaped = False

    @property
    def ended(self) -> bool:
        return self.closed or self.stopped

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value. What is left is behind its end or,
        where it has not ended, may be the beginning of a tag: it has to be fed again."""
        at, sure = 0, len(text) - possible_begin(text, self._stops)
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                continue
            found = self._next.search(text, at)
            if found is not None and found[0] in self._stops:
                self.stopped = True
                return found.start()
            if found is None or found.start() >= sure:
                return max(at, sure)
            at = found.end()
            if found[0] == '"':
                self._in_string = True
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self.closed = True
                    return at
        return at

    def _string(self, text: str, at: int) -> int:
        """The place behind the string's end, or that of the text."""
        if self._escaped:
            self._escaped, at = False, at + 1
        while (found := _IN_STRING.search(text, at)) is not None:
            at = found.end()
            if found[0] == '"':
                self._in_string = False
                return at
            if at == len(text):
                self._escaped = True
                return at
            at += 1
        return len(text)
