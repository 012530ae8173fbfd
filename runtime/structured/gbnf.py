"""GBNF (llama.cpp's notation, also xgrammar's and sglang's EBNF) as trees.

    root  ::= "[" (item ("," item)*)? "]"      # comment
    item  ::= [0-9]{1,3} | [^"\\\\\\x00-\\x1f] | . | root

A rule goes on until the next `name ::=`. Escapes: `\\n \\r \\t \\b \\f \\v \\0`, `\\xHH`,
`\\uHHHH`, `\\UHHHHHHHH`, and any punctuation.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.syntax import (
    BLANK,
    LAST,
    NOTHING,
    Chars,
    Concat,
    Either,
    Literal,
    Reference,
    Regex,
    Repeat,
    chars,
    concat,
    either,
    nodes,
    optional,
    pattern_of,
    repeat,
)
from rootlace.wire.errors import InvalidConstraint

MAX_NESTING = 100
MAX_COUNT = 100_000

Rules = dict[str, Regex]
"""Body of each rule by name, in the order of the grammar."""

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
    """Parse GBNF text to rules. Raises InvalidConstraint naming the line."""
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
    """Options and parts read so far of a group, or of a rule."""

    opened: int
    options: list[Regex] = field(default_factory=list)
    parts: list[Regex] = field(default_factory=list)

    def body(self) -> Regex:
        return either(*self.options, concat(*self.parts))


class _NotClosed(ValueError):
    """Error of a group that is not closed."""


def _closed(groups: list[_Group]) -> Regex:
    if len(groups) > 1:
        raise _NotClosed("this group is not closed")
    return groups[0].body()


def _take(kind: str, piece: re.Match[str], groups: list[_Group]) -> None:
    """Add a piece of a rule to the innermost open group. Raises ValueError."""
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
        parts.append(Chars(syntax.ALL))
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
    chosen = syntax.union(ranges)
    return chars(syntax.complement(chosen) if members.startswith("^") else chosen)


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


# Grammar rules ------------------------------------------------------------------------------------
#
# Regular parts of a grammar, and the rest in llguidance's notation with the same language.
#
# llguidance's lexer takes the longest lexeme: with the lexemes `x`, `xy` and `yz` it does not see
# that "xyz" is `x` `yz`. A grammar has no such rule. So a part of a grammar becomes one lexeme only
# if that makes no difference. The condition: no possible lexeme continues a whole lexeme `t` with a
# byte that may also follow `t`. A lexeme that violates the condition is split, down to single
# characters if necessary; no character is the beginning of another.


MAX_REGULAR_ITEMS = 20_000
"""Bound of the items of a regular rule and of the rules it calls; a larger rule stays a rule."""

MAX_REGULAR_DEPTH = 100
"""Deepest nesting of regular rules' calls; a deeper rule stays a rule."""


class Regular:
    """Regular rules of a grammar, as regular expressions.

    Regular are rules without recursion, and rules that call themselves only at their very beginning
    or end (`list ::= item ("," list)?` is `(item ",")* item`).
    """

    def __init__(self, rules: Rules, root: str) -> None:
        """Find the regular rules. Raises InvalidConstraint if there is no rule `root`."""
        if root not in rules:
            raise InvalidConstraint(f"ebnf: there is no rule {root!r}")
        self.rules = rules
        self.root = root
        self._regex: dict[str, Regex] = {}
        self._size: dict[str, int] = {}
        self._depth: dict[str, int] = {}
        callers: dict[str, set[str]] = {name: set() for name in rules}
        for name, body in rules.items():
            for reference in _references(body):
                callers[reference.name].add(name)
        waiting = deque(rules)
        while waiting:
            name = waiting.popleft()
            if name not in self._regex and self._resolve(name):
                waiting.extend(callers[name])

    def of(self, node: Regex) -> Regex | None:
        """Return a rule's part as a regular expression without references; None if it is not
        regular."""
        match node:
            case Reference(name):
                return self._regex.get(name)
            case Repeat(item, least, most):
                inner = self.of(item)
                return None if inner is None else repeat(inner, least, most)
            case Concat(parts) | Either(parts):
                regular = tuple(found for part in parts if (found := self.of(part)) is not None)
                build = concat if isinstance(node, Concat) else either
                return build(*regular) if len(regular) == len(parts) else None
        return node

    def _resolve(self, name: str) -> bool:
        body = self.rules[name]
        called = {reference.name for reference in _references(body)} - {name}
        if not called <= self._regex.keys():
            return False
        size = self._items(body)
        depth = 1 + max((self._depth[other] for other in called), default=0)
        if size > MAX_REGULAR_ITEMS or depth > MAX_REGULAR_DEPTH:
            return False
        regex = self.of(body)
        if regex is None:
            tail = self._linear(body, name, at_end=True)
            head = self._linear(body, name, at_end=False) if tail is None else None
            if tail is not None:
                ends, before = tail
                regex = concat(repeat(before, 0, None), ends)
            elif head is not None:
                begins, after = head
                regex = concat(begins, repeat(after, 0, None))
            else:
                return False
        self._regex[name] = regex
        self._size[name] = size
        self._depth[name] = depth
        return True

    def _items(self, node: Regex) -> int:
        match node:
            case Literal(text):
                return max(len(text), 1)
            case Reference(name):
                return self._size.get(name, 1)
            case Repeat(item):
                return 1 + self._items(item)
            case Concat(parts) | Either(parts):
                return 1 + sum(map(self._items, parts))
        return 1

    def _linear(self, node: Regex, name: str, at_end: bool) -> tuple[Regex, Regex] | None:
        """Return (b, p) with node = b | p·name (`at_end`) or node = b | name·p; None if no such
        form fits."""
        regex = self.of(node)
        if regex is not None:
            return regex, NOTHING
        match node:
            case Reference():
                return (NOTHING, BLANK) if node.name == name else None
            case Repeat(item, 0, 1):
                inner = self._linear(item, name, at_end)
                return None if inner is None else (optional(inner[0]), inner[1])
            case Concat(parts):
                part, rest = (parts[-1], parts[:-1]) if at_end else (parts[0], parts[1:])
                others = self.of(concat(*rest))
                inner = self._linear(part, name, at_end)
                if others is None or inner is None:
                    return None
                if at_end:
                    return concat(others, inner[0]), concat(others, inner[1])
                return concat(inner[0], others), concat(inner[1], others)
            case Either(options):
                found = [self._linear(option, name, at_end) for option in options]
                linear = [pair for pair in found if pair is not None]
                if len(linear) != len(options):
                    return None
                return either(*(b for b, _ in linear)), either(*(p for _, p in linear))
        return None


def _references(body: Regex) -> list[Reference]:
    return [node for node in nodes(body) if isinstance(node, Reference)]


# Literals -----------------------------------------------------------------------------------------
#
# Literals in which some text stands for special tokens, which are tokens and never text.
#
# A literal is a string with a pair of surrogates for each special token, since no text has such a
# pair. So literals are compared, searched and cut as strings are.


Run = str | int
_MAX_ID = 1 << 20
_PAIR = re.compile("([\ud800-\udbff][\udc00-\udfff])")


class SpecialTokens:
    """Special tokens of a vocabulary: `ids` by content; `ends` end the sequence."""

    def __init__(self, ids: Mapping[str, int], ends: Collection[int]) -> None:
        self._ids = {content: id_ for content, id_ in ids.items() if id_ < _MAX_ID}
        self._ends = {_pair(id_) for id_ in ends if id_ < _MAX_ID}
        self.free = frozenset(self._ids.values()) - frozenset(ends)
        """Ids of special tokens that do not end the sequence."""
        longest = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest))) if longest else None

    def literal(self, text: str) -> str:
        """Return the text with special tokens as pairs; of several at a place, the longest."""
        if self._any is None:
            return text
        return self._any.sub(lambda found: _pair(self._ids[found.group()]), text)

    def within(self, text: str) -> set[int]:
        return {self._ids[content] for content in self._any.findall(text)} if self._any else set()

    def beginning(self, text: str, length: int) -> str:
        """Return `literal` of `length` characters and the rest of a special token cut there."""
        for found in self._any.finditer(text) if self._any is not None else ():
            if found.start() < length < found.end():
                length = found.end()
        return self.literal(text[:length])

    def ends(self, literal: str) -> bool:
        """Return whether the literal ends with a special token that ends the sequence."""
        return literal[-2:] in self._ends

    def ends_within(self, literal: str) -> bool:
        """Return whether a token in the literal ends the sequence."""
        return not self._ends.isdisjoint(_PAIR.findall(literal))


def _pair(id_: int) -> str:
    return chr(0xD800 + (id_ >> 10)) + chr(0xDC00 + (id_ & 0x3FF))


def runs(literal: str) -> list[Run]:
    """Split a literal into texts and ids in turns; the first and last are texts, perhaps empty."""
    found: list[Run] = list(_PAIR.split(literal))
    for at, pair in enumerate(found):
        if at % 2:
            high, low = map(ord, str(pair))
            found[at] = (high - 0xD800) << 10 | low - 0xDC00
    return found


def lexeme(text: str) -> str:
    return f"/{pattern_of(syntax.Literal(text))}/" if text else ""


# Rules --------------------------------------------------------------------------------------------
#
# The rules of a grammar in llguidance's dialect, as they are made.


class LexemeRules:
    """Rules and lexemes, under names made up here."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names = 0
        self._tokens: dict[frozenset[int], str] = {}

    def name(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def define(self, name: str, body: str, how: str = "") -> str:
        self._lines.append(f"{name}{how}: {body}")
        return name

    def add(self, stem: str, body: str, how: str = "") -> str:
        return self.define(self.name(stem), body, how)

    def one_of(self, token_ids: Collection[int]) -> str:
        ids = frozenset(token_ids)
        if ids not in self._tokens:
            self._tokens[ids] = self.name("token")
        return self._tokens[ids]

    def literal(self, literal: str) -> str:
        """Write a literal; "" for an empty one."""
        parts = [self.one_of([r]) if isinstance(r, int) else lexeme(r) for r in runs(literal)]
        return " ".join(filter(None, parts))

    def lines(self) -> list[str]:
        """Return the lines that define the lexemes. If two sets of tokens at one place overlap,
        llguidance matches the first set only. So all sets are unions of disjoint parts."""
        member: dict[int, list[str]] = {}
        for ids, name in self._tokens.items():
            for id_ in ids:
                member.setdefault(id_, []).append(name)
        apart: dict[tuple[str, ...], list[int]] = {}
        for id_, names in sorted(member.items()):
            apart.setdefault(tuple(names), []).append(id_)
        parts: dict[str, list[str]] = {name: [] for name in self._tokens.values()}
        for owners, members in apart.items():
            for name in owners:
                parts[name].append(_tokens(members))
        tokens = [f"{name}: {' | '.join(each)}" for name, each in parts.items()]
        return [*self._lines, *tokens]


def _tokens(ids: list[int]) -> str:
    """Write a choice among the ids, which ascend."""
    ranges = []
    for _, pairs in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        first, *_, last = members = [id_ for _, id_ in pairs] * 2
        ranges.append(f"{first}-{last}" if len(members) > 2 else f"{first}")
    return f"<[{','.join(ranges)}]>"


# Embedded schemas ---------------------------------------------------------------------------------
#
# JSON schemas inside a Lark grammar (`%json {…}`): as exact as schemas that stand alone.


# Strings, comments and regular expressions may contain the word without its meaning.
_TOKEN = re.compile(
    r"""
      "(?:\\.|[^"\\\n])*"
    | //[^\n]* | \#[^\n]*
    | /(?:\\.|[^/\\\n])+/
    | (?P<json>%json\s*)(?=\{)
    """,
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()


def with_exact_schemas(
    lark: str, exact: Callable[[int, dict[str, Any]], dict[str, Any] | str]
) -> str:
    """Return the grammar with each schema replaced by `exact(line, schema)`, another schema or the
    name of a rule; lines keep their places.

    Text that is no JSON is left for llguidance to refuse.
    """
    parts: list[str] = []
    position = 0
    while (found := _TOKEN.search(lark, position)) is not None:
        end = found.end()
        if found["json"] is not None:
            try:
                schema, end = _DECODER.raw_decode(lark, found.end())
            except (ValueError, RecursionError):
                return "".join(parts) + lark[position:]
            line = lark.count("\n", 0, found.start()) + 1
            given = exact(line, schema)
            replaced = given if isinstance(given, str) else f"%json {json.dumps(given)}"
            breaks = "\n" * lark.count("\n", found.start(), end)
            parts += [lark[position : found.start()], replaced, breaks]
        else:
            parts.append(lark[position:end])
        position = end
    return "".join(parts) + lark[position:]


def schemas_of_grammar(lark: str) -> list[str]:
    """Return the schemas in a grammar, each as JSON text."""
    found: list[str] = []

    def note(line: int, schema: dict[str, Any]) -> dict[str, Any]:
        found.append(json.dumps(schema))
        return schema

    with_exact_schemas(lark, note)
    return found


def names_tokens(lark: str) -> bool:
    """Return whether a grammar names tokens of the vocabulary (`<|name|>`, `<[id]>`)."""
    bare = _TOKEN.sub(lambda found: found["json"] or "", with_exact_schemas(lark, lambda *_: {}))
    return "<|" in bare or "<[" in bare
