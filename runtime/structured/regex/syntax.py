"""Regular expressions and bodies of grammar rules, as trees over Unicode scalar values.

Every tree describes whole texts. Sections: the nodes; sets of characters; building and measuring.
The constructors carry a tree without any text (`NOTHING`) upwards: a dead option disappears, a dead
necessary part makes the whole dead.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import groupby

import msgspec
import numpy as np

from rootlace.wire.errors import InvalidConstraint

LAST = 0x10FFFF


class Literal(msgspec.Struct, frozen=True):
    """Literal text, possibly empty. A surrogate escape is a byte of a character."""

    text: str


class Chars(msgspec.Struct, frozen=True):
    """Set that matches one character of `ranges`: inclusive code points, ascending, neither
    overlapping nor adjacent, without surrogates. Without ranges, nothing matches."""

    ranges: tuple[tuple[int, int], ...]


class Concat(msgspec.Struct, frozen=True):
    parts: tuple[Regex, ...]


class Either(msgspec.Struct, frozen=True):
    """Choice among `options`; without options, nothing matches."""

    options: tuple[Regex, ...]


class Repeat(msgspec.Struct, frozen=True):
    """Repeat of `item`, at least `least` and at most `most` times (None: without bound), never
    below `least`."""

    item: Regex
    least: int
    most: int | None


class Look(msgspec.Struct, frozen=True):
    """Lookahead: matches the empty text where `item` can (or, `negative`, cannot) match next."""

    item: Regex
    negative: bool


class LookBehind(msgspec.Struct, frozen=True):
    """Lookbehind: matches the empty text after (or, `negative`, not after) a character of
    `chars`."""

    chars: Chars
    negative: bool


class Graph(msgspec.Struct, frozen=True):
    """Deterministic automaton of characters, which begins in state 0.

    `edges[state]`: the characters read next and the state behind them; `accepting[state]`: whether
    a text may end there. From every state a text can end.
    """

    edges: tuple[tuple[tuple[Regex, int], ...], ...]
    accepting: tuple[bool, ...]


class Reference(msgspec.Struct, frozen=True):
    """Texts of the rule `name` of a grammar. Regular trees have no references."""

    name: str


Regex = Literal | Chars | Concat | Either | Repeat | Graph | Look | LookBehind | Reference


def nodes(regex: Regex) -> Iterator[Regex]:
    """Yield `regex` and all of its parts; a part in several places comes once."""
    seen: set[int] = set()
    stack = [regex]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            match node:
                case Concat(parts) | Either(parts):
                    stack += parts
                case Repeat(item):
                    stack.append(item)


# Utf8 ---------------------------------------------------------------------------------------------
#
# Sets of code points as automata over the bytes of their UTF-8 form.
#
# A range of code points is a short list of sequences of byte ranges (K. Thompson, "Regular
# Expression Search Algorithm", 1968; R. Cox, "Regular Expression Matching in the Wild", 2010: the
# same in RE2). Sequences are merged at their common beginnings, and equal endings are one state, so
# that all of Unicode is 8 states and `\w` about 200.


Ranges = tuple[tuple[int, int], ...]
Edge = tuple[int, int, int]
"""Edge: first byte, last byte, state after the edge."""

DONE = -1
"""State after a whole character."""

_BORDERS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


class CharAutomaton:
    """Deterministic automaton of one character out of a set.

    `edges[state]`: byte ranges, ascending and disjoint; state 0 is the beginning, `DONE` the end.
    Every state is on the way to `DONE`.
    """

    __slots__ = ("edges",)

    def __init__(self, ranges: Ranges) -> None:
        sequences = [s for first, last in ranges for s in _sequences(first, last)]
        self.edges: list[tuple[Edge, ...]] = [()]
        known: dict[tuple[Edge, ...], int] = {}
        self.edges[0] = self._merge(sequences, 0, known)

    def _merge(
        self,
        sequences: list[tuple[tuple[int, int], ...]],
        depth: int,
        known: dict[tuple[Edge, ...], int],
    ) -> tuple[Edge, ...]:
        """Return the edges of the state reached by the first `depth` bytes of all `sequences`."""
        merged: list[Edge] = []
        begin, count = 0, len(sequences)
        while begin < count:
            # Two sequences begin with the same byte range or with disjoint ones: a range of several
            # bytes is only ever followed by all continuations.
            head = sequences[begin][depth]
            end = begin + 1
            while end < count and sequences[end][depth] == head:
                end += 1
            if len(sequences[begin]) == depth + 1:
                target = DONE
            else:
                edges = self._merge(sequences[begin:end], depth + 1, known)
                found = known.get(edges)
                if found is None:
                    found = known[edges] = len(self.edges)
                    self.edges.append(edges)
                target = found
            if merged and merged[-1][2] == target and merged[-1][1] + 1 == head[0]:
                merged[-1] = (merged[-1][0], head[1], target)
            else:
                merged.append((head[0], head[1], target))
            begin = end
        return tuple(merged)


@lru_cache(maxsize=512)
def char_automaton(ranges: Ranges) -> CharAutomaton:
    """Return the automaton of `ranges` (as in `syntax.Chars`); shared, as it never changes."""
    return CharAutomaton(ranges)


def _sequences(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield sequences of byte ranges that are together the UTF-8 forms of `first` to `last`,
    ascending. The range has no surrogates."""
    for border in _BORDERS:
        if first <= border < last:
            yield from _sequences(first, border)
            yield from _sequences(border + 1, last)
            return
    # All of one length now. Split where a byte's range would not be followed by all continuations.
    for bits in (6, 12, 18):
        block = (1 << bits) - 1
        if first >> bits != last >> bits:
            if first & block:
                yield from _sequences(first, first | block)
                yield from _sequences((first | block) + 1, last)
                return
            if last & block != block:
                yield from _sequences(first, (last & ~block) - 1)
                yield from _sequences(last & ~block, last)
                return
    low, high = chr(first).encode(), chr(last).encode()
    yield tuple(zip(low, high, strict=True))


# Char sets ----------------------------------------------------------------------------------------
#
# Sets of code points as sorted ranges, and the sets that Python's `re` means by its escapes.
#
# `re` itself gives its matches, so its rules are not restated here: a class is searched for in the
# text of all code points, once. The search goes piece by piece, because it holds the interpreter.


ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
"""All Unicode scalar values."""
_PIECE = 4096


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of code points in `ranges` (any order, overlapping or not), no surrogates."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    if not any(last >= 0xD800 and first <= 0xDFFF for first, last in merged):
        return tuple(merged)
    return intersection(tuple(merged), ALL)


def complement(ranges: Ranges) -> Ranges:
    """Return all scalar values that are not in `ranges`."""
    gaps = []
    begin = 0
    for first, last in (*ranges, (LAST + 1, LAST + 1)):
        if first > begin:
            gaps.append((begin, first - 1))
        begin = last + 1
    return intersection(tuple(gaps), ALL)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    both = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            both.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)


def contains(ranges: Ranges, code: int) -> bool:
    index = bisect_right(ranges, (code, LAST + 1)) - 1
    return index >= 0 and code <= ranges[index][1]


@lru_cache(maxsize=16)
def category(escape: str, ascii_only: bool) -> Ranges:
    """Return the set of characters of the class escape `escape` (`\\d`, `\\W`, …)."""
    if escape[1].isupper():
        return complement(category(escape.lower(), ascii_only))
    pattern = re.compile(f"{escape}+", re.ASCII if ascii_only else re.UNICODE)
    return union(
        (begin + match.start(), begin + match.end() - 1)
        for begin in range(0, 128 if ascii_only else LAST + 1, _PIECE)
        for match in pattern.finditer(_characters(begin, _PIECE))
    )


def prepare() -> None:
    """Find the most common character sets, 15 to 30 ms each, before the first request needs one."""
    for escape in (r"\d", r"\w", r"\s"):
        category(escape, False)
    _cased()


@lru_cache(maxsize=1024)
def ignoring_case(one: str, plain: Ranges, ascii_only: bool) -> Ranges:
    """Return the characters that `one`, a pattern of one character that matches `plain`, matches if
    case is ignored.

    Only characters that take part in case mappings can differ from `plain`.
    """
    cased, text = _cased()
    flags = re.IGNORECASE | (re.ASCII if ascii_only else re.UNICODE)
    matched = re.findall(one, text, flags | re.DOTALL)
    return union((*intersection(plain, complement(cased)), *((ord(c), ord(c)) for c in matched)))


@lru_cache(maxsize=1)
def _cased() -> tuple[Ranges, str]:
    """Return the characters with a case, or with a case mapping to them, as ranges and text."""
    cased: set[str] = set()
    for begin in range(0, LAST + 1, 256):
        block = _characters(begin, 256)
        if block.lower() != block or block.upper() != block:
            for char in block:
                others = {*char.lower(), *char.upper(), *char.lower().upper(), *char.title()}
                if others != {char}:
                    cased |= others | {char}
    ranges = union((ord(char), ord(char)) for char in cased)
    return ranges, "".join(sorted(cased))


def _characters(begin: int, count: int) -> str:
    """Return the text of `count` code points from `begin` on, surrogates included."""
    return (
        np.arange(begin, begin + count, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    )


# Limits -------------------------------------------------------------------------------------------
#
# Error of an automaton that would grow beyond its bounds.


class TooLarge(InvalidConstraint):
    """Error of an automaton with too many states; another engine may still hold the regex."""


# Build and measure --------------------------------------------------------------------------------

NOTHING = Either(())
BLANK = Literal("")


def concat(*parts: Regex) -> Regex:
    """Return a regex that matches the parts one after the other."""
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
    """Return a regex that matches one of the options; equal literals appear once."""
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
    """Return `item` from `least` to `most` times (None: without bound)."""
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
    """Return a regex that matches one of the characters."""
    return chars(union((ord(c), ord(c)) for c in characters))


def chars(ranges: Iterable[tuple[int, int]]) -> Regex:
    """Return a regex that matches one character of `ranges` (sorted as `Chars` requires)."""
    kept = tuple(ranges)
    return Chars(kept) if kept else NOTHING


def with_leaves(regex: Regex, change: Callable[[Literal | Chars], Regex]) -> Regex:
    """Return `regex`, without look-around, with each text and each set of characters changed."""
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
    """Estimate the states of a byte-level automaton without determinisation; repeated parts count
    as often as they may occur.

    `uncounted` is not counted, since few texts go through it. Ends early, with a number above
    `limit`.
    """
    if regex is uncounted:
        return 0
    match regex:
        case Literal(text):
            return len(text.encode(errors="surrogateescape")) + 1
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
        case _:  # look-around is never written for schemas
            return 1


def texts_of(regex: Regex, most: int) -> list[str] | None:
    """Return all texts that a tree describes; None if there may be more than `most`."""
    found: list[str] = []
    parts: tuple[Regex, ...] = ()
    least = 1
    if isinstance(regex, Literal):
        found.append(regex.text)
    elif isinstance(regex, Chars):
        for first, last in regex.ranges:
            found += map(chr, range(first, min(last, first + most) + 1))
    elif isinstance(regex, Either):
        for option in regex.options:
            if (texts := texts_of(option, most)) is None:
                return None
            found += texts
    elif isinstance(regex, Concat):
        parts, least = regex.parts, len(regex.parts)
    elif isinstance(regex, Repeat) and regex.most is not None and regex.most <= most:
        parts, least = (regex.item,) * regex.most, regex.least
    else:
        return None
    begun = [""]
    for at in range(len(parts) + 1):
        if at >= least:
            found += begun
        if at < len(parts):
            if (texts := texts_of(parts[at], most)) is None or len(begun) * len(texts) > most:
                return None
            begun = [text + more for text in begun for more in texts]
    found = list(dict.fromkeys(found))
    return found if len(found) <= most else None


def lengths(regex: Regex) -> tuple[float, float]:
    """Return the shortest and the longest text in code points; (inf, 0) without texts. Look-around
    counts as matching: it can only narrow the result."""
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
    """Return the texts of `regex` that have `least` to `most` code points (None: no upper bound).

    None if the trees have no small exact expression for these texts. They have one if all lengths
    fit, or if a single repetition of single characters can take up the difference.
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


# Writing patterns ---------------------------------------------------------------------------------
#
# Trees as pattern text for other engines: Rust's regex-syntax (llguidance, outlines-core).
#
# The text is self-contained: no flags, no anchors, no class escapes whose meaning depends on the
# engine's Unicode version; sets are ranges of `\x{…}`. Python's `re` is not among the readers,
# since it has no `\x{…}`.


_NOTHING = r"[^\x{0}-\x{10FFFF}]"
_SPECIAL = re.compile("[^0-9A-Za-z]")
"""Characters to escape: all but ASCII letters and digits."""


def pattern_of(regex: Regex, max_length: int = 1 << 22) -> str:
    """Return the pattern that matches, anchored at both ends, the language of `regex`.

    Raises InvalidConstraint if it has look-around, which these engines lack, and `TooLarge` if it
    is nested too deeply or longer than `max_length` characters (each `\\w` is some 12,000).
    """
    try:
        return _Writer(max_length).alternatives(regex)
    except RecursionError:
        raise TooLarge("the pattern is nested too deeply") from None


class _Writer:
    """Writer of the parts of one pattern, with a bound on the length of the whole."""

    def __init__(self, max_length: int) -> None:
        self._left = max_length

    def alternatives(self, regex: Regex) -> str:
        if isinstance(regex, Either):
            return "|".join(map(self._sequence, regex.options)) or _NOTHING
        return self._sequence(regex)

    def _sequence(self, regex: Regex) -> str:
        """Write the pattern of `regex` so that other patterns may stand next to it."""
        match regex:
            case Literal(text):
                return self._counted(_SPECIAL.sub(_escaped, text) or "(?:)")
            case Concat(parts):
                return "".join(map(self._sequence, parts)) or self._counted("(?:)")
            case Either():
                return f"(?:{self.alternatives(regex)})"
            case Repeat(item, least, most):
                return self._atom(item) + quantifier(least, most)
            case Chars():
                return self._counted(_set(regex))
            case Graph():
                return self._sequence(_without_states(regex))
            case _:
                raise InvalidConstraint("regex: look-around has no equivalent in other engines")

    def _atom(self, regex: Regex) -> str:
        """Return the pattern of `regex` for a following quantifier."""
        if isinstance(regex, Chars) or (isinstance(regex, Literal) and len(regex.text) == 1):
            return self._sequence(regex)
        return f"(?:{self.alternatives(regex)})"

    def _counted(self, text: str) -> str:
        self._left -= len(text)
        if self._left < 0:
            raise TooLarge("the pattern is too long for other engines")
        return text


@lru_cache(maxsize=64)  # a pattern has the same few sets again and again
def _set(chars: Chars) -> str:
    ranges = chars.ranges
    if not ranges:
        return _NOTHING
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(chr(ranges[0][0]))
    return "[" + "".join(_range(first, last) for first, last in ranges) + "]"


def quantifier(least: int, most: int | None) -> str:
    """Write a repeat's bounds in the syntax that patterns and Lark share."""
    if most is None:
        return "*" if least == 0 else "+" if least == 1 else f"{{{least},}}"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _range(first: int, last: int) -> str:
    if first == last:
        return _char(chr(first))
    return f"{_char(chr(first))}-{_char(chr(last))}"


def _char(char: str) -> str:
    return _SPECIAL.sub(_escaped, char)


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{{{ord(match[0]):X}}}"


def _without_states(graph: Graph) -> Regex:
    """Return the texts of an automaton as a tree: remove state after state and lead its paths
    around it (Brzozowski & McCluskey 1963), first the states with the fewest paths."""
    count = len(graph.edges)
    first, last = count, count + 1
    into: dict[int, dict[int, Regex]] = {state: {} for state in range(count + 2)}
    out: dict[int, dict[int, Regex]] = {state: {} for state in range(count + 2)}

    def add(source: int, to: int, label: Regex) -> None:
        known = out[source].get(to)
        out[source][to] = into[to][source] = label if known is None else either(known, label)

    add(first, 0, BLANK)
    for state, edges in enumerate(graph.edges):
        for label, to in edges:
            add(state, to, label)
        if graph.accepting[state]:
            add(state, last, BLANK)
    left = set(range(count))
    while left:
        state = min(left, key=lambda one: (len(into[one]) * len(out[one]), one))
        left.remove(state)
        loop = repeat(out[state].pop(state), 0, None) if state in out[state] else BLANK
        into[state].pop(state, None)
        for source, before in into.pop(state).items():
            del out[source][state]
            for to, after in out[state].items():
                into[to].pop(state, None)
                add(source, to, concat(before, loop, after))
        out.pop(state)
    return out[first][last]
