"""Trees as pattern text for other engines: Rust's regex-syntax (llguidance, outlines-core).

The text says everything by itself: no flags, no class escapes whose meaning depends on the engine's
Unicode version, no anchors; sets are ranges of `\\x{…}`. Python's `re` is not among the readers: it
has no `\\x{…}`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rootlace.runtime.structured.regex.syntax import (
    BLANK,
    Chars,
    Concat,
    Either,
    Graph,
    Literal,
    Regex,
    Repeat,
    TooLarge,
    concat,
    either,
    repeat,
)
from rootlace.wire.errors import InvalidConstraint

_NOTHING = r"[^\x{0}-\x{10FFFF}]"
_SPECIAL = re.compile("[^0-9A-Za-z]")
"""ASCII letters and digits stand as they are; for the rest nobody has to know what is special."""


def pattern_of(regex: Regex, max_length: int = 1 << 22) -> str:
    """The pattern that matches, anchored at both ends, the language of `regex`.

    Raises InvalidConstraint if it has look-around, which these engines lack, and `TooLarge` if it
    is nested too deeply or longer than `max_length` characters (each `\\w` is some 12,000).
    """
    try:
        return _Writer(max_length).alternatives(regex)
    except RecursionError:
        raise TooLarge("the pattern is nested too deeply") from None


class _Writer:
    """Writes parts of one pattern, as long as they are not too long together."""

    def __init__(self, max_length: int) -> None:
        self._left = max_length

    def alternatives(self, regex: Regex) -> str:
        if isinstance(regex, Either):
            return "|".join(map(self._sequence, regex.options)) or _NOTHING
        return self._sequence(regex)

    def _sequence(self, regex: Regex) -> str:
        """The pattern of `regex` where it may stand next to others."""
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
        """The pattern of `regex` where a quantifier follows."""
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
    """In the syntax that patterns and Lark share."""
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


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{{{ord(found[0]):X}}}"


def _without_states(graph: Graph) -> Regex:
    """The texts of an automaton as a tree: state after state is taken out, and what led through it
    leads around it (Brzozowski & McCluskey 1963), those first through which the least leads."""
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
