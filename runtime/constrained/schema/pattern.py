"""The `pattern` keyword: an ECMA-262 regular expression as a tree over the string's value.

Validators differ in small ways (Python's `re` takes `\\d` for every Unicode digit, ECMA-262 for
ASCII only; their `\\s`, `.` and `$` differ too). A tree made here holds only strings on which
both agree that they match: every character class is the intersection of the two meanings. That is
sound because the constructs that are taken contain no negation but that of a class.

Python's own parser does the reading; what the two languages write differently is refused.
"""

from __future__ import annotations

import re
import warnings
from itertools import groupby, product, starmap
from typing import Any, NamedTuple

from rootlace.runtime.constrained.automaton.char_sets import ALL, complement, intersection
from rootlace.runtime.constrained.automaton.lookaround import has_look
from rootlace.runtime.constrained.automaton.parse import Context, Translation, sre, sre_parser
from rootlace.runtime.constrained.automaton.syntax import (
    Chars,
    Concat,
    Either,
    Look,
    LookBehind,
    Regex,
)
from rootlace.runtime.constrained.automaton.trees import BLANK, concat, either, repeat
from rootlace.runtime.constrained.automaton.utf8 import Ranges

_ANYTHING = repeat(Chars(ALL), 0, None)
_REFUSED_ESCAPES = frozenset("AZaNUkpPQEc0123456789")
_TAKEN = (
    *(sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN),
    *(sre.BRANCH, sre.SUBPATTERN, sre.MAX_REPEAT, sre.MIN_REPEAT),
)
_ECMA_BREAKS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ECMA_SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
# The other classes are those of Python with re.ASCII.
_IN_ECMA = {
    (sre.CATEGORY, sre.CATEGORY_SPACE): [(sre.RANGE, part) for part in ECMA_SPACE],
    (sre.CATEGORY, sre.CATEGORY_NOT_SPACE): [(sre.RANGE, part) for part in complement(ECMA_SPACE)],
}
_ANCHORS: dict[Any, Regex] = {
    sre.AT_BEGINNING: LookBehind(Chars(ALL), negative=True),
    sre.AT_END: Look(Chars(ALL), negative=True),
}
_INSIDE = Context(flags=0, at_begin=False, after_text=True, at_end=False)


class NotTranslated(ValueError):
    """The pattern uses something that is not exact in both dialects, or not regular."""


def regex_of_pattern(pattern: str) -> Regex:
    """The strings in which `pattern` is found (anywhere, unless it has anchors)."""
    _refuse_dialect(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python warns of changes its meaning some day
            tree = sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise NotTranslated(f"pattern {pattern!r}: {error}") from None
    ways = _ways(_Agreed("", verbose=False).sequence(tree, _INSIDE))
    return either(*(way.whole() for way in ways))


_PIECE = re.compile(
    r"\\(?P<escape>.)|(?P<empty>\[(?=\^?\]))|(?P<unbounded>\{(?=,))|(?P<group>\((?=\?(?!:)))|.",
    re.DOTALL,
)
_REFUSED = {
    "empty": "a class that is empty in ECMA-262",
    "unbounded": "a repetition without a lower bound",
    "group": "a group that is not a plain one",
}


def _refuse_dialect(pattern: str) -> None:
    """Raise for spellings that mean one thing to Python and another to ECMA-262."""
    in_class = False
    for piece in _PIECE.finditer(pattern):
        if piece["escape"]:
            if piece["escape"] in _REFUSED_ESCAPES:
                raise NotTranslated(f"pattern {pattern!r}: {piece[0]}")
        elif in_class:
            in_class = piece[0] != "]"
        elif piece.lastgroup:
            here = pattern[piece.start() : piece.start() + 8]
            raise NotTranslated(f"pattern {pattern!r}: {_REFUSED[piece.lastgroup]}, {here!r}")
        else:
            in_class = piece[0] == "["


class _Way(NamedTuple):
    """One way to match, and whether it must begin, or end, where the string does."""

    regex: Regex
    begins: bool = False
    ends: bool = False

    def whole(self) -> Regex:
        before = BLANK if self.begins else _ANYTHING
        return concat(before, self.regex, BLANK if self.ends else _ANYTHING)


def _ways(regex: Regex) -> list[_Way]:
    """`regex` without its anchors, which stand where nothing else is before, or behind, them."""
    match regex:
        case LookBehind():
            return [_Way(BLANK, begins=True)]
        case Look():
            return [_Way(BLANK, ends=True)]
        case _ if not has_look(regex):
            return [_Way(regex)]
        case Either(options):
            return [way for option in options for way in _ways(option)]
        case Concat(parts):
            found = [_Way(BLANK)]
            for anchored, run in groupby(parts, has_look):
                for ways in map(_ways, run) if anchored else [[_Way(concat(*run))]]:
                    found = list(dict.fromkeys(starmap(_joined, product(found, ways))))
            return found
    raise NotTranslated("an anchor that is repeated")


def _joined(one: _Way, other: _Way) -> _Way:
    if (one.ends and other.regex != BLANK) or (other.begins and one.regex != BLANK):
        raise NotTranslated("an anchor inside the pattern")
    regex = concat(one.regex, other.regex)
    return _Way(regex, one.begins or other.begins, one.ends or other.ends)


class _Agreed(Translation):
    """What both dialects take for a pattern."""

    def operation(self, code: Any, argument: Any, context: Context) -> Regex:
        if code is sre.ANY:
            return Chars(complement(_ECMA_BREAKS))
        if code is sre.AT and argument in _ANCHORS:
            return _ANCHORS[argument]
        if code not in _TAKEN or (code is sre.LITERAL and 0xD800 <= argument <= 0xDFFF):
            raise NotTranslated(f"{str(code).lower()} inside the pattern")
        return super().operation(code, argument, context)

    def characters(self, code: Any, members: tuple[tuple[Any, Any], ...], flags: int) -> Ranges:
        python = super().characters(code, members, flags)
        as_ecma = tuple(one for member in members for one in _IN_ECMA.get(member, (member,)))
        # Sets are negated in each dialect, before what they agree on is taken.
        return intersection(python, super().characters(code, as_ecma, flags | re.ASCII))
