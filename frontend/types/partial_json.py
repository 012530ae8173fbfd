"""Parsing of incomplete JSON: the value so far."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.\w]+")
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")
_CUT_SURROGATE = re.compile(r"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class Unfinished(Exception):
    """Error for a text that ends before any part of a value is known."""


def parse_beginning(text: str) -> Any:
    """Parse the value of `text`, the beginning of a JSON text, so far.

    Strings, arrays and objects may be partial. A number or word is complete once another character
    follows; a property counts once its value has begun. Raises Unfinished if nothing is known yet,
    ValueError if no JSON text begins so.
    """
    return _Reader(text).value(0)[0]


class Beginning:
    """JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._last: Any = Unfinished

    def more(self, piece: str) -> Iterator[Any]:
        """Append a piece, and yield the value so far if it changed."""
        self._text += piece
        with contextlib.suppress(Unfinished, ValueError, RecursionError):
            value = parse_beginning(self._text)
            if value != self._last:
                self._last = value
                yield value


class _Reader:
    """Parser: `value(at)` returns a value and its end, the text's length for a partial value."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _next(self, at: int) -> tuple[str, int]:
        """Return the next character other than white space ("" at the end) and its index."""
        match = _SPACE.match(self._text, at)
        assert match is not None
        return self._text[match.end() : match.end() + 1], match.end()

    def value(self, at: int) -> tuple[Any, int]:
        first, at = self._next(at)
        if not first:
            raise Unfinished
        if first == "{":
            return self._object(at + 1)
        if first == "[":
            return self._array(at + 1)
        if first == '"':
            return self._string(at)
        match = _SCALAR.match(self._text, at)
        if match is None:
            raise ValueError(f"no JSON value begins with {first!r}")
        if match.end() == len(self._text):
            raise Unfinished  # 12 may become 123
        return json.loads(match[0]), match.end()

    def _string(self, at: int) -> tuple[str, int]:
        try:
            return json.decoder.scanstring(self._text, at + 1, False)  # type: ignore[attr-defined]
        except json.JSONDecodeError as error:
            written = _CUT_ESCAPE.sub(r"\1", self._text[at + 1 :])
            written = _CUT_SURROGATE.sub(r"\1", written)
            try:
                return json.loads(f'"{written}"', strict=False), len(self._text)
            except ValueError:
                raise error from None

    def _array(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            first, start = self._next(at)
            if first == "]":
                return items, start + 1
            try:
                value, at = self.value(at)
            except Unfinished:
                return items, len(self._text)
            items.append(value)
            first, at = self._next(at)
            if first == ",":
                at += 1
            elif first not in ("]", ""):
                raise ValueError(f"{first!r} in an array")

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        items: dict[str, Any] = {}
        while True:
            first, at = self._next(at)
            if first == "}":
                return items, at + 1
            if not first:
                return items, at
            if first != '"':
                raise ValueError(f"{first!r} in place of a key")
            key, at = self._string(at)
            first, at = self._next(at)
            if first not in (":", ""):
                raise ValueError(f"{first!r} behind a key")
            try:
                items[key], at = self.value(at + 1)
            except Unfinished:
                return items, len(self._text)
            first, at = self._next(at)
            if first == ",":
                at += 1
            elif first not in ("}", ""):
                raise ValueError(f"{first!r} in an object")
