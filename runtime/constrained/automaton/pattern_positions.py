"""Where in a pattern a construct stands, for messages: Python's parser does not keep places."""

from __future__ import annotations

import re

CONSTRUCTS = {
    "reference": "a back-reference",
    "conditional": "a conditional on a group",
    "behind": "look-behind of other than one character",
    "atomic": "an atomic group with a choice in it",
    "possessive": "a possessive quantifier on more than one character",
}
"""Those that no automaton has, by the names of their groups in `_PIECES`."""

# What the constructs look like, behind what would hide them.
_PIECES = re.compile(
    r"""\(\?\#[^)]*\)
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


def place_of(pattern: str, construct: str, verbose: bool) -> str:
    """The first place of one of CONSTRUCTS in `pattern` as words; empty if it is not found."""
    position = 0
    while (piece := _PIECES.match(pattern, position)) is not None:
        if piece.lastgroup == construct:
            return f" ({piece.group()!r} at position {position})"
        is_character = piece.lastgroup == "line_comment" and not verbose
        position = position + 1 if is_character else piece.end()
    return ""
