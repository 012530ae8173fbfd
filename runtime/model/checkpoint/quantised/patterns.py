"""Compile patterns of module names, and refuse patterns that may take long to match.

A regular expression may try too many ways to match a name. Ways multiply for a repetition in a
repetition, and for repeated alternatives that match the same text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import msgspec

LONGEST = 1000
"""Most characters of a pattern."""
SHOWN = 60
"""Characters of a pattern that a message shows."""
MOST = 5_000_000
"""Largest `MatchCost` of a pattern."""
NAME = 64
"""Most characters of a module's name."""
DIGITS = 4
"""Most digits of a number in a module's name."""
FEW = 8
"""Most repetitions of a choice."""


class TooManyWays(ValueError):
    """Pattern that might take too long to match."""


class MatchCost(msgspec.Struct, frozen=True):
    """Bound on the ways a pattern matches at one place. `choices`: the product of independent
    choices. `repetitions`: the number of repetitions that may end at any character of a name."""

    choices: int = 1
    repetitions: int = 0

    def total(self) -> int:
        return self.choices * math.comb(NAME + self.repetitions, self.repetitions)


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that matches module names in little time. Raises `TooManyWays` or
    `re.error`, with the reason."""
    if len(pattern) > LONGEST:
        raise TooManyWays(f"it has more than {LONGEST} characters")
    if _sequence(_parser.parse(pattern)).total() > MOST:
        raise TooManyWays("it has too many repetitions or alternatives")
    return re.compile(pattern)


def shown(pattern: str) -> str:
    """Return the pattern quoted, and cut if long."""
    return repr(pattern if len(pattern) <= SHOWN else pattern[:SHOWN] + "...")


def _sequence(items: Iterable[tuple[Any, Any]]) -> MatchCost:
    choices, repetitions = 1, 0
    for operation, argument in items:
        found = _item(str(operation), argument)
        choices, repetitions = choices * found.choices, repetitions + found.repetitions
        if choices > MOST:
            raise TooManyWays("it has too many alternatives")
    return MatchCost(choices, repetitions)


def _either(branches: Iterable[Any]) -> MatchCost:
    found = [_sequence(branch) for branch in branches if branch is not None]
    return MatchCost(sum(one.choices for one in found), max(one.repetitions for one in found))


def _item(operation: str, argument: Any) -> MatchCost:
    match operation:
        case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT" | "GROUPREF" | "FAILURE":
            return MatchCost()
        case "SUBPATTERN":
            return _sequence(argument[3])
        case "ASSERT" | "ASSERT_NOT":
            return _sequence(argument[1])
        case "ATOMIC_GROUP":
            return _sequence(argument)
        case "BRANCH":
            return _either(argument[1])
        case "GROUPREF_EXISTS":
            return _either(argument[1:])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return _repeated(*argument)
    raise TooManyWays(f"{operation} is not known")


def _repeated(least: int, most: int, body: Any) -> MatchCost:
    ways = _sequence(body)
    if most <= 1:
        return MatchCost(ways.choices + (most - least), ways.repetitions)
    if body.getwidth()[0] == 0:
        raise TooManyWays("what is repeated in it may be nothing")
    if ways.repetitions:
        raise TooManyWays("it has a repetition in a repetition")
    if ways.choices > 1:
        if most > FEW:
            raise TooManyWays("it has a choice in a repetition")
        return MatchCost((ways.choices + 1) ** most)
    if least == most:
        return MatchCost()
    if _is_digit(body):
        return MatchCost(1 + min(most - least, DIGITS))
    return MatchCost(1 + most - least) if most - least < FEW else MatchCost(1, 1)


def _is_digit(body: Any) -> bool:
    """Tell whether a pattern's body matches exactly one digit."""
    if len(body) != 1 or str(body[0][0]) != "IN":
        return False
    ranges = [(str(operation), argument) for operation, argument in body[0][1]]
    return all(
        (operation == "CATEGORY" and str(argument) == "CATEGORY_DIGIT")
        or (operation == "RANGE" and chr(argument[0]).isdigit() and chr(argument[1]).isdigit())
        or (operation == "LITERAL" and chr(argument).isdigit())
        for operation, argument in ranges
    )
