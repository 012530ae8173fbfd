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
from typing import Any

from rootlace.runtime.constrained.automaton.char_sets import ALL, complement, intersection
from rootlace.runtime.constrained.automaton.parse import Context, Translation, sre, sre_parser
from rootlace.runtime.constrained.automaton.syntax import Chars, Regex
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
    agreed = _Agreed("", verbose=False)
    return either(*(found.whole() for found in _anchored(list(tree), agreed)))


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


class _Option:
    """One way to match: a tree, and whether it must begin or end where the string does."""

    def __init__(self, regex: Regex, begins: bool = False, ends: bool = False) -> None:
        self.regex, self.begins, self.ends = regex, begins, ends

    def whole(self) -> Regex:
        before = BLANK if self.begins else _ANYTHING
        return concat(before, self.regex, BLANK if self.ends else _ANYTHING)


def _anchored(items: list[Any], agreed: _Agreed) -> list[_Option]:
    """The options of a sequence at the top, where anchors may stand at either end (also within
    groups there, as in `^(a|b)$` or `(^a$)|b`)."""
    begins = ends = False
    while items and items[0] == (sre.AT, sre.AT_BEGINNING):
        begins, items = True, items[1:]
    while items and items[-1] == (sre.AT, sre.AT_END):
        ends, items = True, items[:-1]
    if not any(_has_anchor(item) for item in items):
        return [_Option(agreed.sequence(items, _INSIDE), begins, ends)]
    if len(items) == 1:
        kind, detail = items[0]
        if kind is sre.BRANCH:
            bodies = [list(branch) for branch in detail[1]]
        elif kind is sre.SUBPATTERN:
            bodies = [list(detail[3])]
        else:
            raise NotTranslated("an anchor inside the pattern")
        found = [option for body in bodies for option in _anchored(body, agreed)]
        return [_Option(o.regex, begins or o.begins, ends or o.ends) for o in found]
    heads = _anchored(items[:1], agreed) if _has_anchor(items[0]) else None
    tails = _anchored(items[-1:], agreed) if _has_anchor(items[-1]) else None
    middle = agreed.sequence(items[1 if heads else 0 : -1 if tails else None], _INSIDE)
    options = []
    for head in heads or [_Option(BLANK)]:
        for tail in tails or [_Option(BLANK)]:
            if head.ends or tail.begins:
                raise NotTranslated("an anchor inside the pattern")
            regex = concat(head.regex, middle, tail.regex)
            options.append(_Option(regex, begins or head.begins, ends or tail.ends))
    return options


def _has_anchor(item: Any) -> bool:
    kind, detail = item
    if kind is sre.AT:
        return True
    if kind is sre.BRANCH:
        return any(_has_anchor(inner) for branch in detail[1] for inner in branch)
    if kind is sre.SUBPATTERN:
        return any(_has_anchor(inner) for inner in detail[3])
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return any(_has_anchor(inner) for inner in detail[2])
    return False


class _Agreed(Translation):
    """What both dialects take for a pattern without anchors."""

    def operation(self, code: Any, argument: Any, context: Context) -> Regex:
        if code is sre.ANY:
            return Chars(complement(_ECMA_BREAKS))
        if code not in _TAKEN or (code is sre.LITERAL and 0xD800 <= argument <= 0xDFFF):
            raise NotTranslated(f"{str(code).lower()} inside the pattern")
        return super().operation(code, argument, context)

    def characters(self, code: Any, members: tuple[tuple[Any, Any], ...], flags: int) -> Ranges:
        python = super().characters(code, members, flags)
        as_ecma = tuple(one for member in members for one in _IN_ECMA.get(member, (member,)))
        # Sets are negated in each dialect, before what they agree on is taken.
        return intersection(python, super().characters(code, as_ecma, flags | re.ASCII))
