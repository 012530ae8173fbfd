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
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as reader  # type: ignore[attr-defined]
from typing import Any

from rootlace.runtime.constrained.automaton.char_sets import (
    ALL,
    category,
    complement,
    intersection,
    union,
)
from rootlace.runtime.constrained.automaton.syntax import Chars, Literal, Regex
from rootlace.runtime.constrained.automaton.utf8 import Ranges
from rootlace.runtime.constrained.schema.trees import (
    BLANK,
    chars,
    concat,
    either,
    repeat,
)

_ANYTHING = repeat(Chars(ALL), 0, None)
_REFUSED_ESCAPES = frozenset("AZaNUkpPQEc0123456789")
_ECMA_BREAKS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ECMA_SPACE: Ranges = union(
    (c, c)
    for c in (
        *range(0x09, 0x0E),
        0x20,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
        0xFEFF,
    )
)
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))


class NotTranslated(ValueError):
    """The pattern uses something that is not exact in both dialects, or not regular."""


def regex_of_pattern(pattern: str) -> Regex:
    """The strings in which `pattern` is found (anywhere, unless it has anchors)."""
    _refuse_dialect(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python warns of changes its meaning some day
            tree = reader.parse(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise NotTranslated(f"pattern {pattern!r}: {error}") from None
    if tree.state.flags & ~re.UNICODE:
        raise NotTranslated(f"pattern {pattern!r}: flags")
    return either(*(found.whole() for found in _anchored(list(tree))))


def _refuse_dialect(pattern: str) -> None:
    """Raise for spellings that mean one thing to Python and another to ECMA-262."""
    i, in_class = 0, False
    while i < len(pattern):
        character = pattern[i]
        if character == "\\":
            if pattern[i + 1 : i + 2] in _REFUSED_ESCAPES and pattern[i + 1 : i + 2]:
                raise NotTranslated(f"pattern {pattern!r}: \\{pattern[i + 1]}")
            i += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            start = i + 2 if pattern[i + 1 : i + 2] == "^" else i + 1
            if pattern[start : start + 1] == "]":
                raise NotTranslated(f"pattern {pattern!r}: a class that is empty in ECMA-262")
            in_class = True
        elif pattern.startswith("{,", i):
            raise NotTranslated(f"pattern {pattern!r}: a repetition without a lower bound")
        elif pattern.startswith("(?", i) and pattern[i + 2 : i + 3] != ":":
            raise NotTranslated(f"pattern {pattern!r}: (?{pattern[i + 2 : i + 3]}")
        i += 1


class _Option:
    """One way to match: a tree, and whether it must begin or end where the string does."""

    def __init__(self, regex: Regex, begins: bool = False, ends: bool = False) -> None:
        self.regex, self.begins, self.ends = regex, begins, ends

    def whole(self) -> Regex:
        before = BLANK if self.begins else _ANYTHING
        return concat(before, self.regex, BLANK if self.ends else _ANYTHING)


def _anchored(items: list[Any]) -> list[_Option]:
    """The options of a sequence at the top, where anchors may stand at either end (also within
    groups there, as in `^(a|b)$` or `(^a$)|b`)."""
    begins = ends = False
    while items and items[0] == (op.AT, op.AT_BEGINNING):
        begins, items = True, items[1:]
    while items and items[-1] == (op.AT, op.AT_END):
        ends, items = True, items[:-1]
    if not any(_has_anchor(item) for item in items):
        return [_Option(_sequence(items), begins, ends)]
    if len(items) == 1:
        kind, detail = items[0]
        if kind is op.BRANCH:
            bodies = [list(branch) for branch in detail[1]]
        elif kind is op.SUBPATTERN:
            bodies = [list(detail[3])]
        else:
            raise NotTranslated("an anchor inside the pattern")
        found = [option for body in bodies for option in _anchored(body)]
        return [_Option(o.regex, begins or o.begins, ends or o.ends) for o in found]
    heads = _anchored(items[:1]) if _has_anchor(items[0]) else None
    tails = _anchored(items[-1:]) if _has_anchor(items[-1]) else None
    middle = _sequence(items[1 if heads else 0 : -1 if tails else None])
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
    if kind is op.AT:
        return True
    if kind is op.BRANCH:
        return any(_has_anchor(inner) for branch in detail[1] for inner in branch)
    if kind is op.SUBPATTERN:
        return any(_has_anchor(inner) for inner in detail[3])
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        return any(_has_anchor(inner) for inner in detail[2])
    return False


def _sequence(items: list[Any]) -> Regex:
    return concat(*(_item(kind, detail) for kind, detail in items))


def _item(kind: Any, detail: Any) -> Regex:
    if kind is op.LITERAL:
        if 0xD800 <= detail <= 0xDFFF:
            raise NotTranslated("a surrogate")
        return Literal(chr(detail))
    if kind is op.NOT_LITERAL:
        return chars(complement(((detail, detail),)))
    if kind is op.ANY:
        return chars(complement(_ECMA_BREAKS))
    if kind is op.IN:
        return chars(_class(detail))
    if kind is op.BRANCH:
        return either(*(_sequence(list(branch)) for branch in detail[1]))
    if kind is op.SUBPATTERN:
        _, set_flags, cleared_flags, body = detail
        if set_flags or cleared_flags:
            raise NotTranslated("flags inside the pattern")
        return _sequence(list(body))
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, body = detail
        top = None if most is op.MAXREPEAT else int(most)
        return repeat(_sequence(list(body)), int(least), top)
    raise NotTranslated(f"{str(kind).lower()} inside the pattern")


def _class(members: list[Any]) -> Ranges:
    """What both dialects take for the class; complements are formed in each of them first."""
    negated = bool(members) and members[0][0] is op.NEGATE
    ecma: list[tuple[int, int]] = []
    python: list[tuple[int, int]] = []
    for kind, detail in members[1:] if negated else members:
        own: Ranges
        theirs: Ranges
        if kind is op.LITERAL:
            own = theirs = ((detail, detail),)
        elif kind is op.RANGE:
            own = theirs = (detail,)
        elif kind is op.CATEGORY:
            own, theirs = _category(detail)
        else:
            raise NotTranslated(f"{str(kind).lower()} inside a class")
        ecma.extend(own)
        python.extend(theirs)
    sides = [intersection(union(side), ALL) for side in (ecma, python)]
    return intersection(*(complement(side) if negated else side for side in sides))


def _category(name: Any) -> tuple[Ranges, Ranges]:
    """A class like `\\d` in ECMA-262 and in Python."""
    for positive, negative, ecma, escape in (
        (op.CATEGORY_DIGIT, op.CATEGORY_NOT_DIGIT, _DIGIT, "\\d"),
        (op.CATEGORY_WORD, op.CATEGORY_NOT_WORD, _WORD, "\\w"),
        (op.CATEGORY_SPACE, op.CATEGORY_NOT_SPACE, _ECMA_SPACE, "\\s"),
    ):
        if name is positive:
            return ecma, category(escape, ascii_only=False)
        if name is negative:
            return complement(ecma), category(escape.upper(), ascii_only=False)
    raise NotTranslated(str(name).lower())
