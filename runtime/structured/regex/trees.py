"""Building regex trees: constructors that simplify, and measures of a tree.

A tree without any text (`NOTHING`) is carried upwards by the constructors, so that a dead option
disappears and a dead necessary part makes the whole dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby

from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Graph,
    Literal,
    Regex,
    Repeat,
    union,
)

NOTHING = Either(())
BLANK = Literal("")


def concat(*parts: Regex) -> Regex:
    """One after the other."""
    flat = [piece for p in parts for piece in (p.parts if isinstance(p, Concat) else (p,))]
    if NOTHING in flat:
        return NOTHING
    joined: list[Regex] = []
    for are_texts, run in groupby(flat, lambda piece: isinstance(piece, Literal)):
        if are_texts:
            text = "".join(piece.text for piece in run if isinstance(piece, Literal))
            joined += [Literal(text)] if text else []
        else:
            joined += run
    if not joined:
        return BLANK
    return joined[0] if len(joined) == 1 else Concat(tuple(joined))


def either(*options: Regex) -> Regex:
    """One of them; equal literals once."""
    flat: list[Regex] = []
    literals: set[str] = set()
    for option in options:
        for piece in option.options if isinstance(option, Either) else (option,):
            if isinstance(piece, Literal):
                if piece.text in literals:
                    continue
                literals.add(piece.text)
            elif isinstance(piece, Chars) and not piece.ranges:
                continue
            flat.append(piece)
    return flat[0] if len(flat) == 1 else Either(tuple(flat))


def repeat(item: Regex, least: int, most: int | None) -> Regex:
    """`item` from `least` to `most` times (None: without bound)."""
    if most is not None and most < least:
        return NOTHING
    if most == 0 or item == BLANK:
        return BLANK
    if item == NOTHING:
        return BLANK if least == 0 else NOTHING
    return item if least == most == 1 else Repeat(item, least, most)


def optional(item: Regex) -> Regex:
    return repeat(item, 0, 1)


def one_of(characters: str) -> Regex:
    """One of these characters."""
    return chars(union((ord(c), ord(c)) for c in characters))


def chars(ranges: Iterable[tuple[int, int]]) -> Regex:
    """A character of `ranges` (sorted, as `syntax.Chars` wants them)."""
    kept = tuple(ranges)
    return Chars(kept) if kept else NOTHING


def with_leaves(regex: Regex, change: Callable[[Literal | Chars], Regex]) -> Regex:
    """`regex`, which has no look-around, with each text and each set of characters changed."""
    match regex:
        case Literal() | Chars():
            return change(regex)
        case Concat(parts):
            return concat(*(with_leaves(part, change) for part in parts))
        case Either(options):
            return either(*(with_leaves(option, change) for option in options))
        case Repeat(item, least, most):
            return repeat(with_leaves(item, change), least, most)
        case Graph(edges, accepting):
            changed = (
                tuple((with_leaves(label, change), to) for label, to in those) for those in edges
            )
            return Graph(tuple(changed), accepting)
    raise AssertionError(regex)


def size(regex: Regex, limit: int, uncounted: Regex | None = None) -> int:
    """About how many states a byte-level automaton without determinisation has; repeated parts
    count as often as they may occur. `uncounted` is not counted: hardly a text goes through it.
    Ends early, with a number above `limit`."""
    if regex is uncounted:
        return 0
    match regex:
        case Literal(text):
            return len(text.encode()) + 1
        case Chars(ranges):
            # Beyond ASCII a character is a small automaton over its two to four bytes.
            return 1 if not ranges or ranges[-1][1] < 0x80 else 8
        case Concat(parts) | Either(parts):
            total = 1
            for part in parts:
                total += size(part, limit, uncounted)
                if total > limit:
                    break
            return total
        case Repeat(item, least, most):
            return size(item, limit, uncounted) * max(least, 1 if most is None else most) + 1
        case Graph(edges):
            return size(Concat(tuple(label for those in edges for label, _ in those)), limit)
        case _:  # a look at the text around is not written for schemas
            return 1


def lengths(regex: Regex) -> tuple[float, float]:
    """The shortest and the longest text in code points; (inf, 0) where there is no text.

    Looks at the text around are taken to match always: they can only narrow what is found."""
    match regex:
        case Literal(text):
            return len(text), len(text)
        case Chars(ranges):
            return (1, 1) if ranges else (math.inf, 0)
        case Concat(parts):
            inner = [lengths(part) for part in parts]
            if any(least == math.inf for least, _ in inner):
                return math.inf, 0
            return sum(least for least, _ in inner), sum(most for _, most in inner)
        case Either(options):
            inner = [lengths(option) for option in options]
            shortest = min((least for least, _ in inner), default=math.inf)
            return shortest, max((most for _, most in inner), default=0)
        case Repeat(item, least, most):
            shortest, longest = lengths(item)
            if longest == 0:
                return shortest if least else 0, 0
            return shortest * least, math.inf if most is None else longest * most
        case Graph():
            return 0, math.inf
        case _:
            return 0, 0


def with_length(regex: Regex, least: int, most: int | None) -> Regex | None:
    """The texts of `regex` that have `least` to `most` code points (None: no upper bound).

    None where the trees have no exact expression for it that is small: that is, unless all lengths
    fit, or a single repetition of single characters can take up the difference.
    """
    top = math.inf if most is None else most
    shortest, longest = lengths(regex)
    if max(least, shortest) > min(top, longest):
        return NOTHING
    if least <= shortest and longest <= top:
        return regex
    if isinstance(regex, Either):
        options = [with_length(option, least, most) for option in regex.options]
        return None if None in options else either(*(o for o in options if o is not None))
    parts = regex.parts if isinstance(regex, Concat) else (regex,)
    spans = [lengths(part) for part in parts]
    loose = [i for i, (low, high) in enumerate(spans) if low != high]
    if len(loose) != 1:
        return None
    at = loose[0]
    part = parts[at]
    rest = int(sum(low for low, _ in spans) - spans[at][0])
    low, high = max(least - rest, 0), None if most is None else most - rest
    fitted: Regex | None = None
    if isinstance(part, Repeat):
        unit, longest = lengths(part.item)
        if unit == longest and unit > 0:
            tops = [part.most] if part.most is not None else []
            tops += [] if high is None else [high // int(unit)]
            fewest = max(part.least, -(-low // int(unit)))
            fitted = repeat(part.item, fewest, min(tops, default=None))
    elif isinstance(part, Either | Concat):
        fitted = with_length(part, low, high)
    return None if fitted is None else concat(*parts[:at], fitted, *parts[at + 1 :])
