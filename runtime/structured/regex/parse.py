"""Patterns in the syntax of Python's `re`, as trees: the language of `re.fullmatch`.

Python's own parser reads the pattern, so quirks of the syntax are its quirks. Constructs that no
finite automaton can hold (back-references) are refused, naming the place. So is look-behind of more
than one character.

A full match begins at the beginning and ends at the end, so anchors there have no effect. `\\Z` and
`$` elsewhere are look-ahead; `\\A`, `^` and `\\b` look behind.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.syntax import (
    BLANK,
    NOTHING,
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    LookBehind,
    Ranges,
    Regex,
    Repeat,
    chars,
    concat,
    either,
    lengths,
    repeat,
)
from rootlace.wire.errors import InvalidConstraint

# Pattern positions --------------------------------------------------------------------------------
#
# Places of constructs in a pattern, for messages: Python's parser keeps none.


CONSTRUCTS = {
    "reference": "a back-reference",
    "conditional": "a conditional on a group",
    "behind": "look-behind of other than one character",
    "atomic": "an atomic group with a choice in it",
    "possessive": "a possessive quantifier on more than one character",
}
"""Constructs without an automaton, by the names of their groups in `_PIECES`."""

_POSIX = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "xdigit": "0-9a-fA-F",
    "word": r"\w",
    "space": r"\s",
    "punct": "!-/:-@\\[-`{-~",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "graph": "!-~",
    "print": " -~",
}
"""Classes of other languages, and the set to write instead. `re` reads such a class as the set of
its letters, with a warning."""

# Spellings of the constructs, behind parts that could hide them.
_PIECES = re.compile(
    rf"""\(\?\#[^)]*\)
    | (?P<posix> \[ \^? (?: \]? (?: [^][\\] | \\. | \[(?!:) )* \[: (?:{"|".join(_POSIX)}) :\]
        (?= (?: [^][\\] | \\. | \[: \w+ :\] )* \] ) | \[: (?:{"|".join(_POSIX)}) :\] ) )
    | \[ \^? \]? (?: [^]\\] | \\. )* \]
    | (?P<reference> \\[1-9] | \(\?P= )
    | \\.
    | (?P<conditional> \(\?\( )
    | (?P<behind> \(\?<[=!] )
    | (?P<atomic> \(\?> )
    | (?P<possessive> [*+?}}]\+ )
    | (?P<line_comment> \#[^\n]* )
    | .""",
    re.VERBOSE | re.DOTALL,
)


def place_of(pattern: str, construct: str, verbose: bool) -> str:
    """Return the first place of one of CONSTRUCTS, or of a class of `_POSIX`, in `pattern` as
    words; "" if none is found."""
    position = 0
    while (piece := _PIECES.match(pattern, position)) is not None:
        if piece.lastgroup == construct:
            return f" ({piece.group()!r} at position {position})"
        is_character = piece.lastgroup == "line_comment" and not verbose
        position = position + 1 if is_character else piece.end()
    return ""


# Parse --------------------------------------------------------------------------------------------


# Private, but the only way to read patterns as `re` does; unchanged from 3.11 on.
sre: Any = importlib.import_module("re._constants")
sre_parser: Any = importlib.import_module("re._parser")

_ANY = Chars(syntax.ALL)
_NEWLINE = Chars(((10, 10),))
_NOT_NEWLINE = Chars(syntax.complement(((10, 10),)))
_AT_END = Look(_ANY, negative=True)
AT_LAST_NEWLINE = Look(Concat((_NEWLINE, _AT_END)), negative=False)
"""Place before a last line break, where `$` matches, too."""
_READING_NOTHING = (sre.AT, sre.ASSERT, sre.ASSERT_NOT)
_UNBOUNDED = sre.MAXREPEAT
_TEMPLATE = getattr(sre, "SRE_FLAG_TEMPLATE", 0)
_IGNORE_CASE, _ASCII = int(re.IGNORECASE), int(re.ASCII)  # quicker than the flags themselves

_ESCAPES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def parse(pattern: str, at_begin: bool = True, at_end: bool = True) -> Regex:
    """Return the tree of `pattern`, which matches the texts of `re.fullmatch(pattern, text)`.

    Without `at_begin`, text may stand before the match, and without `at_end` behind the match.
    Surrogates match nothing. Raises InvalidConstraint for a pattern that is malformed, uses a
    construct that is not supported, or is nested too deeply; the message gives the place.
    """
    try:
        parsed = sre_parser.parse(pattern)
        flags = parsed.state.flags
        place = place_of(pattern, "posix", bool(flags & re.VERBOSE)) if "[:" in pattern else ""
        if place:
            name = place.partition("[:")[2].partition(":]")[0]
            raise InvalidConstraint(f"regex: there is no [:{name}:]{place}; write {_POSIX[name]}")
        if flags & _TEMPLATE:
            raise InvalidConstraint("regex: the flag 't' is not supported")
        return Translation(pattern, bool(flags & re.VERBOSE)).sequence(
            parsed, Context(flags, at_begin, after_text=False, at_end=at_end)
        )
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise InvalidConstraint(f"regex: {error.msg}{where}") from None
    except OverflowError as error:
        raise InvalidConstraint(f"regex: {error}") from None
    except RecursionError:
        raise InvalidConstraint("regex: the pattern is nested too deeply") from None


class Context(NamedTuple):
    """Place of a part of the pattern. `at_begin`: nothing has been read before the part.
    `after_text`: some text has been read. (Neither: it depends.) `at_end`: nothing follows the part
    in the pattern."""

    flags: int
    at_begin: bool
    after_text: bool
    at_end: bool


class Translation:
    """Translation of the operations of Python's parser, pairs of a code and an argument, to
    trees."""

    def __init__(self, pattern: str, verbose: bool) -> None:
        self._pattern = pattern
        self._verbose = verbose
        self._known: dict[tuple[Any, ...], Regex] = {}  # its classes, each computed once

    def sequence(self, operations: Sequence[tuple[Any, Any]], context: Context) -> Regex:
        parts: list[Regex] = []
        inner = context._replace(at_end=False)
        # The last operations that read nothing all stand at the end.
        last = len(operations)
        while last and operations[last - 1][0] in _READING_NOTHING:
            last -= 1
        for index, (code, argument) in enumerate(operations):
            ends = context.at_end and index >= last - 1
            here = inner._replace(at_end=True) if ends else inner
            part = self.operation(code, argument, here)
            if part == NOTHING:
                return NOTHING  # later parts are never reached, so they are not refused either
            parts.append(part)
            if not inner.after_text and code not in _READING_NOTHING:
                least, most = lengths(part)
                inner = inner._replace(at_begin=inner.at_begin and most == 0, after_text=least > 0)
        return concat(*parts)

    def operation(self, code: Any, argument: Any, context: Context) -> Regex:
        flags = context.flags
        if code is sre.LITERAL and not flags & _IGNORE_CASE:
            return NOTHING if 0xD800 <= argument <= 0xDFFF else Literal(chr(argument))
        if code in (sre.LITERAL, sre.NOT_LITERAL, sre.IN):
            return self._characters(code, argument, flags)
        if code is sre.ANY:
            return _ANY if flags & re.DOTALL else _NOT_NEWLINE
        if code is sre.BRANCH:
            return either(*(self.sequence(option, context) for option in argument[1]))
        if code is sre.SUBPATTERN:
            _, added, removed, inner = argument
            if added & (re.ASCII | re.UNICODE):
                flags &= ~(re.ASCII | re.UNICODE)
            return self.sequence(inner, context._replace(flags=(flags | added) & ~removed))
        if code in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(argument, context)
        if code is sre.POSSESSIVE_REPEAT:
            return self._possessive(argument, context)
        if code is sre.ATOMIC_GROUP:
            return self._atomic(argument, context)
        if code in (sre.ASSERT, sre.ASSERT_NOT):
            direction, inner = argument
            if direction < 0:
                return self._look_behind(inner, code is sre.ASSERT_NOT, context)
            # Any text may follow the match of a look-ahead.
            item = self.sequence(inner, context._replace(at_end=False))
            return Look(item, negative=code is sre.ASSERT_NOT)
        if code is sre.AT:
            return self._anchor(argument, context)
        if code is sre.GROUPREF:
            self._refuse("reference")
        if code is sre.GROUPREF_EXISTS:
            self._refuse("conditional")
        if code is sre.FAILURE:
            return NOTHING
        raise InvalidConstraint(f"regex: {str(code).lower()} is not supported")

    def _repeat(self, argument: Any, context: Context) -> Regex:
        least, most, inner = argument
        item = self.sequence(inner, self._repeated(most, inner, context))
        return repeat(item, int(least), None if most is _UNBOUNDED else int(most))

    def _repeated(self, most: Any, inner: Any, context: Context) -> Context:
        """Return the context of a repeated part; a second repetition has the first before it."""
        if most == 0 or most == 1:
            return context
        begin = context.at_begin and inner.getwidth()[1] == 0
        return context._replace(at_begin=begin, at_end=False)

    def _possessive(self, argument: Any, context: Context) -> Regex:
        """Return `x*+` of one character `x` as `x*(?!x)`, since it would have taken another `x`."""
        least, most, inner = argument
        item = self._repeat((1, 1, inner), context)
        if not isinstance(item, Chars) and not (isinstance(item, Literal) and len(item.text) == 1):
            self._refuse("possessive")
        if context.at_end or least == most:
            return self._repeat(argument, context)
        stop = Look(item, negative=True)
        if most is _UNBOUNDED:
            return Concat((Repeat(item, int(least), None), stop))
        least, most = int(least), int(most)
        return Either((Repeat(item, most, most), Concat((Repeat(item, least, most - 1), stop))))

    def _atomic(self, inner: Any, context: Context) -> Regex:
        item = self.sequence(inner, context._replace(at_end=False))
        if not _is_single(item):
            self._refuse("atomic")
        return item

    def _anchor(self, anchor: Any, context: Context) -> Regex:
        lines = context.flags & re.MULTILINE
        if anchor is sre.AT_BEGINNING or anchor is sre.AT_BEGINNING_STRING:
            if context.at_begin:
                return BLANK
            if lines and anchor is sre.AT_BEGINNING:
                return LookBehind(_NOT_NEWLINE, negative=True)
            return NOTHING if context.after_text else LookBehind(_ANY, negative=True)
        if anchor is sre.AT_END or anchor is sre.AT_END_STRING:
            if context.at_end:
                return BLANK
            if anchor is sre.AT_END_STRING:
                return _AT_END
            if lines:
                return Look(_NOT_NEWLINE, negative=True)
            return Either((_AT_END, AT_LAST_NEWLINE))
        word = Chars(syntax.category(r"\w", bool(context.flags & _ASCII)))
        differs = anchor is sre.AT_BOUNDARY
        place = boundary(word, differs)
        if differs or re.search(r"\B", ""):
            return place
        # Before Python 3.14, `\B` does not match in an empty text.
        return Concat((Either((LookBehind(_ANY, False), Look(_ANY, False))), place))

    def _look_behind(self, inner: Any, negative: bool, context: Context) -> Regex:
        item = self.sequence(inner, context._replace(at_begin=False, at_end=False))
        options = item.options if isinstance(item, Either) else (item,)
        ranges: list[tuple[int, int]] = []
        for option in options:
            if isinstance(option, Chars):
                ranges += option.ranges
            elif isinstance(option, Literal) and len(option.text) == 1:
                ranges.append((ord(option.text), ord(option.text)))
            else:
                self._refuse("behind")
        if context.at_begin:
            return BLANK if negative else NOTHING
        return LookBehind(Chars(syntax.union(ranges)), negative)

    def _characters(self, code: Any, argument: Any, flags: int) -> Regex:
        members = tuple(argument) if code is sre.IN else ((code, argument),)
        key = (members, flags & (_ASCII | _IGNORE_CASE))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = chars(self.characters(code, members, flags))
        return known

    def characters(self, code: Any, members: tuple[tuple[Any, Any], ...], flags: int) -> Ranges:
        """Return the set of characters that `members` (`code` LITERAL: the only one) describe."""
        ascii_only = bool(flags & _ASCII)
        ranges: list[tuple[int, int]] = []
        spelt = []
        negated = False
        for kind, argument in members:
            if kind is sre.NEGATE:
                negated = True
            elif kind in (sre.LITERAL, sre.NOT_LITERAL):
                negated = negated or kind is sre.NOT_LITERAL
                ranges.append((argument, argument))
                spelt.append(f"\\U{argument:08x}")
            elif kind is sre.RANGE:
                ranges.append(argument)
                spelt.append(f"\\U{argument[0]:08x}-\\U{argument[1]:08x}")
            else:
                escape = _ESCAPES[argument]
                ranges += syntax.category(escape, ascii_only)
                spelt.append(escape)
        result = syntax.union(ranges)
        if negated:
            result = syntax.complement(result)
        if flags & _IGNORE_CASE:
            # The same set, spelt without special characters, for `re` to judge.
            one = "".join(spelt) if code is sre.LITERAL else f"[{'^' * negated}{''.join(spelt)}]"
            result = syntax.ignoring_case(one, result, ascii_only)
        return result

    def _refuse(self, construct: str) -> None:
        place = place_of(self._pattern, construct, self._verbose)
        raise InvalidConstraint(f"regex: {CONSTRUCTS[construct]}{place} is not supported")


def boundary(word: Chars, differs: bool) -> Regex:
    """Return the places with a character of `word` on one side only or, without `differs`, on both
    or neither."""
    ways = (
        Concat((LookBehind(word, negative=not before), Look(word, negative=before == differs)))
        for before in (True, False)
    )
    return Either(tuple(ways))


def _is_single(regex: Regex) -> bool:
    """Return whether `regex` matches in one way only at every place: no choice, no repeat."""
    if isinstance(regex, Concat):
        return all(_is_single(part) for part in regex.parts)
    return isinstance(regex, Literal | Chars | Look | LookBehind)
