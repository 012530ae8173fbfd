"""Where in a pattern a construct stands, for messages: Python's parser does not keep places."""

from __future__ import annotations

import enum
import re


class Construct(enum.Enum):
    BACK_REFERENCE = "a back-reference"
    CONDITIONAL = "a conditional on a group"
    LOOK_BEHIND = "look-behind of other than one character"
    ATOMIC = "an atomic group with a choice in it"
    POSSESSIVE = "a possessive quantifier on more than one character"


# A piece of a pattern: what the constructs look like, after what would hide them.
_PIECES = re.compile(
    r"""(?P<comment>\(\?\#[^)]*\))
    | \[ \^? \]? (?: [^]\\] | \\. )* \]
    | (?P<reference> \\[1-9] | \(\?P= )
    | \\.
    | (?P<conditional> \(\?\( )
    | (?P<behind> \(\?<[=!] )
    | (?P<atomic> \(\?> )
    | (?P<possessive> [*+?}]\+ )
    | (?P<line_comment> \#[^\n]* )
    | .""",
    re.VERBOSE | re.DOTALL,
)

_NAMES = {
    Construct.BACK_REFERENCE: "reference",
    Construct.CONDITIONAL: "conditional",
    Construct.LOOK_BEHIND: "behind",
    Construct.ATOMIC: "atomic",
    Construct.POSSESSIVE: "possessive",
}


def place_of(pattern: str, construct: Construct, verbose: bool) -> str:
    """The first place of `construct` in `pattern` as words; empty if it is not found."""
    name = _NAMES[construct]
    position = 0
    while position < len(pattern):
        piece = _PIECES.match(pattern, position)
        if piece is None:
            break
        if piece.lastgroup == "line_comment" and not verbose:
            position += 1
            continue
        if piece.lastgroup == name:
            return f" ({piece.group()!r} at position {position})"
        position = piece.end()
    return ""
