"""GBNF (llama.cpp's notation, also xgrammar's and sglang's EBNF) as trees.

    root  ::= "[" (item ("," item)*)? "]"      # comment
    item  ::= [0-9]{1,3} | [^"\\\\\\x00-\\x1f] | . | root

A rule goes on until the next `name ::=`. Escapes: `\\n \\r \\t \\b \\f \\v \\0`, `\\xHH`,
`\\uHHHH`, `\\UHHHHHHHH`, and any punctuation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rootlace.runtime.constrained.automaton import char_sets
from rootlace.runtime.constrained.automaton.syntax import LAST, Chars, Literal, Reference, Regex
from rootlace.runtime.constrained.automaton.trees import chars, concat, either, repeat
from rootlace.wire.errors import InvalidConstraint

MAX_NESTING = 100
MAX_COUNT = 100_000

Rules = dict[str, Regex]
"""Each rule's body by its name, in the order they were written."""

_PIECE = re.compile(
    r"""
    (?: \s+ | \#[^\n]* )*+
    (?: (?P<head> ([A-Za-z_][A-Za-z0-9_-]*) (?: \s+ | \#[^\n]* )*+ ::= )
      | (?P<name> [A-Za-z_][A-Za-z0-9_-]* )
      | (?P<text> "(?: [^"\\\n] | \\. )*+" | '(?: [^'\\\n] | \\. )*+' )
      | (?P<set> \[ (?: [^]\\\n] | \\. )*+ \] )
      | (?P<count> \{ \s*+ (\d*+) \s*+ (,?) \s*+ (\d*+) \s*+ \} )
      | (?P<mark> [.(|)*+?] )
      | (?P<other> . )
      | \Z )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)"
_ESCAPED = re.compile(_ESCAPE, re.DOTALL)
_MEMBER = re.compile(rf"({_ESCAPE}|[^\\])(?:-({_ESCAPE}|[^\\]))?", re.DOTALL)
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_HEX = {"x": 2, "u": 4, "U": 8}
_UNCLOSED = {'"': "text", "'": "text", "[": "set of characters"}


def parse_gbnf(text: str) -> Rules:
    """Raises InvalidConstraint naming the line."""
    rules: Rules = {}
    references: dict[str, int] = {}  # where each is made first
    name = ""
    groups: list[_Group] = []
    at = 0
    try:
        for piece in _PIECE.finditer(text):
            kind = piece.lastgroup
            if kind is None:
                break
            at = piece.start(kind)
            if kind == "head":
                if name:
                    rules[name] = _closed(groups)
                name = piece[2]
                if name in rules:
                    raise ValueError(f"rule {name!r} is defined twice")
                groups = [_Group(at)]
            elif not name:
                raise ValueError("expected `name ::=`")
            else:
                if kind == "name":
                    references.setdefault(piece[kind], at)
                _take(kind, piece, groups)
        if not name:
            raise ValueError("there is no rule")
        rules[name] = _closed(groups)
        for name in references:
            if name not in rules:
                at = references[name]
                raise ValueError(f"there is no rule {name!r}")
    except ValueError as error:
        at = groups[-1].opened if isinstance(error, _NotClosed) else at
        raise InvalidConstraint(f"ebnf: line {text.count(chr(10), 0, at) + 1}: {error}") from None
    return rules


@dataclass
class _Group:
    """What is read of a group, or of a whole rule."""

    opened: int
    options: list[Regex] = field(default_factory=list)
    parts: list[Regex] = field(default_factory=list)

    def body(self) -> Regex:
        return either(*self.options, concat(*self.parts))


class _NotClosed(ValueError):
    """The innermost group is not."""


def _closed(groups: list[_Group]) -> Regex:
    if len(groups) > 1:
        raise _NotClosed("this group is not closed")
    return groups[0].body()


def _take(kind: str, piece: re.Match[str], groups: list[_Group]) -> None:
    """Put a piece of a rule where it belongs. Raises ValueError."""
    parts = groups[-1].parts
    at, spelt = piece.start(kind), piece[kind]
    if kind == "name":
        parts.append(Reference(spelt))
    elif kind == "text":
        parts.append(Literal(_ESCAPED.sub(_character, spelt[1:-1])))
    elif kind == "set":
        parts.append(_set(spelt[1:-1]))
    elif kind == "count" and parts:
        parts[-1] = repeat(parts[-1], *_counts(piece))
    elif spelt == ".":
        parts.append(Chars(char_sets.ALL))
    elif spelt in "*+?" and parts:
        parts[-1] = repeat(parts[-1], int(spelt == "+"), 1 if spelt == "?" else None)
    elif spelt == "|":
        groups[-1].options.append(concat(*parts))
        parts.clear()
    elif spelt == "(":
        if len(groups) > MAX_NESTING:
            raise ValueError(f"groups nested more than {MAX_NESTING} deep")
        groups.append(_Group(at))
    elif spelt == ")" and len(groups) > 1:
        groups[-2].parts.append(groups.pop().body())
    elif spelt == "{" and parts:
        raise ValueError("expected a count like {2}, {2,} or {2,3}")
    elif spelt in _UNCLOSED:
        raise ValueError(f"this {_UNCLOSED[spelt]} is not closed")
    elif spelt == "=" and piece.string.endswith("(", 0, at):
        raise ValueError("look-ahead assertions are not supported")
    else:
        raise ValueError(f"unexpected {spelt[0]!r}")


def _counts(piece: re.Match[str]) -> tuple[int, int | None]:
    least, comma, most = piece.group(7, 8, 9)
    if not (least or most):
        raise ValueError("expected a count like {2}, {2,} or {2,3}")
    if max(len(least), len(most)) > 6 or max(int(least or 0), int(most or 0)) > MAX_COUNT:
        raise ValueError(f"counts are bounded to {MAX_COUNT}")
    if most and int(most) < int(least or 0):
        raise ValueError(f"the count {{{least},{most}}} allows nothing")
    return int(least or 0), int(most) if most else None if comma else int(least)


def _set(members: str) -> Regex:
    ranges: list[tuple[int, int]] = []
    for first, last in _MEMBER.findall(members.removeprefix("^")):
        ends = [_ESCAPED.sub(_character, spelt) for spelt in (first, last or first)]
        ranges.append((ord(ends[0]), ord(ends[1])))
        if ranges[-1][0] > ranges[-1][1]:
            raise ValueError("this range of characters is reversed")
    chosen = char_sets.union(ranges)
    return chars(char_sets.complement(chosen) if members.startswith("^") else chosen)


def _character(escape: re.Match[str]) -> str:
    kind, digits = escape[0][1], escape[0][2:]
    if kind in _HEX:
        if not digits:
            raise ValueError(f"\\{kind} wants {_HEX[kind]} hexadecimal digits")
        code = int(digits, 16)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{escape[0]} is no character")
        return chr(code)
    if kind.isalnum() and kind not in _SIMPLE:
        raise ValueError(f"unknown escape \\{kind}")
    return _SIMPLE.get(kind, kind)
