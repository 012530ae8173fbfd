"""Trees as pattern text for other engines: Rust's regex-syntax (llguidance, outlines-core).

The text says everything by itself: no flags, no class escapes whose meaning depends on the engine's
Unicode version, no anchors; sets are ranges of `\\x{…}`. Python's `re` is not among the readers: it
has no `\\x{…}`.
"""

from __future__ import annotations

from rootlace.errors import InvalidConstraint
from rootlace.runtime.constrained.automaton.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    Regex,
    Repeat,
)

_NOTHING = r"[^\x{0}-\x{10FFFF}]"


def pattern_of(regex: Regex) -> str:
    """The pattern that matches, anchored at both ends, the language of `regex`.

    Raises InvalidConstraint if it has look-ahead, which these engines lack, or is too deep.
    """
    try:
        return _alternatives(regex)
    except RecursionError:
        raise InvalidConstraint("regex: the pattern is nested too deeply") from None


def _alternatives(regex: Regex) -> str:
    if isinstance(regex, Either):
        return "|".join(map(_sequence, regex.options)) or _NOTHING
    return _sequence(regex)


def _sequence(regex: Regex) -> str:
    """The pattern of `regex` where it may stand next to others."""
    match regex:
        case Literal(text):
            return "".join(map(_char, text)) or "(?:)"
        case Concat(parts):
            return "".join(map(_sequence, parts)) or "(?:)"
        case Either():
            return f"(?:{_alternatives(regex)})"
        case Repeat(item, least, most):
            if most is not None and most < least:
                return _NOTHING
            return _atom(item) + _quantifier(least, most)
        case Chars(ranges):
            if not ranges:
                return _NOTHING
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return _char(chr(ranges[0][0]))
            return "[" + "".join(_range(first, last) for first, last in ranges) + "]"
        case Look():
            raise InvalidConstraint("regex: look-ahead has no equivalent in other engines")


def _atom(regex: Regex) -> str:
    """The pattern of `regex` where a quantifier follows."""
    if isinstance(regex, Chars) or (isinstance(regex, Literal) and len(regex.text) == 1):
        return _sequence(regex)
    return f"(?:{_alternatives(regex)})"


def _quantifier(least: int, most: int | None) -> str:
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
    """ASCII letters and digits as they are; for the rest nobody has to know what is special."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"
