"""Building regex trees: constructors that simplify, and measures of a tree.

A tree without any text (`NOTHING`) is carried upwards by the constructors, so that a dead option
disappears and a dead necessary part makes the whole dead.
"""

from __future__ import annotations

from collections.abc import Iterable

from rootlace.runtime.constrained.automaton.char_sets import union
from rootlace.runtime.constrained.automaton.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Regex,
    Repeat,
)

NOTHING = Either(())
BLANK = Literal("")


def concat(*parts: Regex) -> Regex:
    """One after the other."""
    flat: list[Regex] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        for piece in part.parts if isinstance(part, Concat) else (part,):
            if isinstance(piece, Literal) and flat and isinstance(flat[-1], Literal):
                flat[-1] = Literal(flat[-1].text + piece.text)
            elif piece != BLANK:
                flat.append(piece)
    if not flat:
        return BLANK
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


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


def size(regex: Regex, limit: int) -> int:
    """About how many states a byte-level automaton without determinisation has; repeated parts
    count as often as they may occur. Ends early, with a number above `limit`."""
    match regex:
        case Literal(text):
            return len(text.encode()) + 1
        case Chars(ranges):
            # Beyond ASCII a character is a small automaton over its two to four bytes.
            return 1 if not ranges or ranges[-1][1] < 0x80 else 8
        case Concat(parts) | Either(parts):
            total = 1
            for part in parts:
                total += size(part, limit)
                if total > limit:
                    break
            return total
        case Repeat(item, least, most):
            return size(item, limit) * max(least, 1 if most is None else most) + 1
        case _:  # a look at the text around is not written for schemas
            return 1


def lengths(regex: Regex) -> tuple[int, int | None] | None:
    """The shortest and the longest text in code points (None: no bound); None for no text.

    Looks at the text around are taken to match always: they can only narrow what is found."""
    match regex:
        case Literal(text):
            return len(text), len(text)
        case Chars(ranges):
            return (1, 1) if ranges else None
        case Concat(parts):
            least, most = 0, 0
            bounded = True
            for part in parts:
                found = lengths(part)
                if found is None:
                    return None
                least += found[0]
                bounded = bounded and found[1] is not None
                most += found[1] or 0
            return least, most if bounded else None
        case Either(options):
            known = [found for option in options if (found := lengths(option)) is not None]
            if not known:
                return None
            tops = [top for _, top in known]
            high = None if None in tops else max(top for top in tops if top is not None)
            return min(low for low, _ in known), high
        case Repeat(item, least, most):
            found = lengths(item)
            if found is None:
                return (0, 0) if least == 0 else None
            if most == 0 or found[1] == 0:
                return found[0] * least, 0
            top = None if most is None or found[1] is None else found[1] * most
            return found[0] * least, top
        case _:
            return 0, 0


def with_length(regex: Regex, least: int, most: int | None) -> Regex | None:
    """The texts of `regex` that have `least` to `most` code points (None: no upper bound).

    None where the trees have no exact expression for it that is small: that is, unless all lengths
    fit, or a single repetition of single characters can take up the difference.
    """
    found = lengths(regex)
    if found is None or (most is not None and (most < least or found[0] > most)):
        return NOTHING
    if found[1] is not None and found[1] < least:
        return NOTHING
    if least <= found[0] and (most is None or (found[1] is not None and found[1] <= most)):
        return regex
    if isinstance(regex, Either):
        options = [with_length(option, least, most) for option in regex.options]
        return None if None in options else either(*(o for o in options if o is not None))
    parts = regex.parts if isinstance(regex, Concat) else (regex,)
    spans = [lengths(part) for part in parts]
    loose = [i for i, span in enumerate(spans) if span is not None and span[0] != span[1]]
    if len(loose) != 1:
        return None
    at = loose[0]
    part = parts[at]
    rest = sum(span[0] for i, span in enumerate(spans) if i != at and span is not None)
    low, high = max(least - rest, 0), None if most is None else most - rest
    if isinstance(part, Repeat):
        unit = lengths(part.item)
        if unit is None or unit[0] != unit[1] or unit[0] == 0:
            return None
        count = unit[0]
        fewest = max(part.least, -(-low // count))
        tops = [
            top for top in (part.most, None if high is None else high // count) if top is not None
        ]
        fitted = repeat(part.item, fewest, min(tops) if tops else None)
    elif isinstance(part, (Either, Concat)):
        inner = with_length(part, low, high)
        if inner is None:
            return None
        fitted = inner
    else:
        return None
    return concat(*parts[:at], fitted, *parts[at + 1 :])
