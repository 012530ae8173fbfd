"""GBNF (llama.cpp's notation, also xgrammar's and sglang's EBNF) as trees.

    root  ::= "[" (item ("," item)*)? "]"      # comment
    item  ::= [0-9]{1,3} | [^"\\\\\\x00-\\x1f] | . | root

A rule goes on until the next `name ::=`. Escapes: `\\n \\r \\t \\b \\f \\v \\0`, `\\xHH`,
`\\uHHHH`, `\\UHHHHHHHH`, and any punctuation.
"""

from __future__ import annotations

import re

from rootlace.runtime.constrained.automaton import char_sets
from rootlace.runtime.constrained.automaton.syntax import LAST, Chars, Literal, Reference, Regex
from rootlace.runtime.constrained.automaton.trees import chars, concat, either, repeat
from rootlace.wire.errors import InvalidConstraint

MAX_NESTING = 100
MAX_COUNT = 100_000


Rules = dict[str, Regex]
"""Each rule's body by its name, in the order they were written."""

_BLANK = re.compile(r"(?:\s+|#[^\n]*)+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RULE = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)(?:\s+|#[^\n]*)*::=")
_COUNTS = re.compile(r"\{\s*+(\d*+)\s*+(,?)\s*+(\d*)\s*+\}")
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_HEX = {"x": 2, "u": 4, "U": 8}


def parse_gbnf(text: str) -> Rules:
    """Raises InvalidConstraint naming the line."""
    return _Parser(text).rules()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> Rules:
        rules: Rules = {}
        self._skip()
        while self._at < len(self._text):
            head = _RULE.match(self._text, self._at)
            if head is None:
                raise self._error("expected `name ::=`")
            if head[1] in rules:
                raise self._error(f"rule {head[1]!r} is defined twice")
            self._at = head.end()
            rules[head[1]] = self._alternatives()
            if self._at < len(self._text) and not _RULE.match(self._text, self._at):
                raise self._error(f"unexpected {self._text[self._at]!r}")
        if not rules:
            raise self._error("there is no rule")
        return rules

    def _alternatives(self) -> Regex:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return either(*options)

    def _sequence(self) -> Regex:
        parts: list[Regex] = []
        self._skip()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            item = self._item()
            if item is None:
                break
            parts.append(self._repeated(item))
            self._skip()
        return concat(*parts)

    def _item(self) -> Regex | None:
        """None at the beginning of the next rule."""
        character = self._text[self._at]
        if character in "\"'":
            return self._literal(character)
        if character == "[":
            return self._characters()
        if self._takes("."):
            return Chars(char_sets.ALL)
        if character == "(":
            return self._group()
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error(f"unexpected {character!r}")
        if _RULE.match(self._text, self._at):
            return None
        reference = Reference(name[0], self._line())
        self._at = name.end()
        return reference

    def _group(self) -> Regex:
        opened = self._at
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups nested more than {MAX_NESTING} deep")
        self._at += 1
        if self._takes("="):
            raise self._error("look-ahead assertions are not supported")
        body = self._alternatives()
        if not self._takes(")"):
            self._at = opened
            raise self._error("this group is not closed")
        self._depth -= 1
        return body

    def _repeated(self, item: Regex) -> Regex:
        while True:
            self._skip()
            character = self._text[self._at : self._at + 1]
            if character and character in "*+?":
                self._at += 1
                item = repeat(item, int(character == "+"), 1 if character == "?" else None)
            elif character == "{":
                item = self._counted(item)
            else:
                return item

    def _counted(self, item: Regex) -> Regex:
        counts = _COUNTS.match(self._text, self._at)
        if counts is None or not (counts[1] or counts[3]):
            raise self._error("expected a count like {2}, {2,} or {2,3}")
        if max(len(counts[1]), len(counts[3])) > 6:
            raise self._error(f"counts are bounded to {MAX_COUNT}")
        least = int(counts[1] or 0)
        most = int(counts[3]) if counts[3] else (None if counts[2] else least)
        if max(least, most or 0) > MAX_COUNT:
            raise self._error(f"counts are bounded to {MAX_COUNT}")
        if most is not None and most < least:
            raise self._error(f"the count {counts[0]} allows nothing")
        self._at = counts.end()
        return repeat(item, least, most)

    def _literal(self, quote: str) -> Regex:
        opened = self._at
        self._at += 1
        characters: list[str] = []
        while not self._closes(quote, opened, "text"):
            characters.append(self._character())
        return Literal("".join(characters))

    def _characters(self) -> Regex:
        opened = self._at
        self._at += 1
        negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._closes("]", opened, "set of characters"):
            first = last = ord(self._character())
            if not self._text.startswith("-]", self._at) and self._takes("-"):
                last = ord(self._character())
                if last < first:
                    raise self._error("this range of characters is reversed")
            ranges.append((first, last))
        chosen = char_sets.union(ranges)
        return chars(char_sets.complement(chosen) if negated else chosen)

    def _takes(self, text: str) -> bool:
        """Whether `text` comes next; then it is behind us."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _closes(self, closing: str, opened: int, what: str) -> bool:
        if self._at >= len(self._text) or self._text[self._at] == "\n":
            self._at = opened
            raise self._error(f"this {what} is not closed")
        return self._takes(closing)

    def _character(self) -> str:
        """One character of a literal or a set, unescaped."""
        character = self._text[self._at : self._at + 1]
        if character != "\\":
            if not character:
                raise self._error("unexpected end")
            self._at += 1
            return character
        escaped = self._text[self._at + 1 : self._at + 2]
        if escaped in _HEX:
            digits = self._text[self._at + 2 : self._at + 2 + _HEX[escaped]]
            if len(digits) != _HEX[escaped] or not re.fullmatch("[0-9A-Fa-f]+", digits):
                raise self._error(f"\\{escaped} wants {_HEX[escaped]} hexadecimal digits")
            code = int(digits, 16)
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                raise self._error(f"\\{escaped}{digits} is no character")
            self._at += 2 + len(digits)
            return chr(code)
        if not escaped or (escaped.isalnum() and escaped not in _SIMPLE):
            raise self._error(f"unknown escape \\{escaped}")
        self._at += 2
        return _SIMPLE.get(escaped, escaped)

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        if blank is not None:
            self._at = blank.end()

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, what: str) -> InvalidConstraint:
        return InvalidConstraint(f"ebnf: line {self._line()}: {what}")
