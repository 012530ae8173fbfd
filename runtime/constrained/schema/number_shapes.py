"""A case of a conjunction as ranges of numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from rootlace.runtime.constrained.schema.conjunction import EXCLUDED, MAX_INTEGER, Case
from rootlace.runtime.constrained.schema.residual import Residual, notes_of

MAX_EXCLUDED = 8
MAX_DIGITS = 40
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", EXCLUDED)
Shape = dict[str, Any]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(case: Case, excluded: list[Any], notes: set[Residual]) -> list[Shape]:
    base: Shape = {"type": "integer" if case.integer else "number"}
    low, low_open, high, high_open = -math.inf, False, math.inf, False
    multiples: list[Any] = []
    for _, leaf in case.leaves:
        for key, open_ in (("minimum", False), ("exclusiveMinimum", True)):
            if key in leaf and (leaf[key], open_) > (low, low_open):
                low, low_open = leaf[key], open_
        for key, open_ in (("maximum", False), ("exclusiveMaximum", True)):
            if key in leaf and (-leaf[key], open_) > (-high, high_open):
                high, high_open = leaf[key], open_
        if "multipleOf" in leaf and leaf["multipleOf"] not in multiples:
            multiples.append(leaf["multipleOf"])
            if leaf["multipleOf"] % 1:
                # The mask counts in decimals; most validators divide floats, and find 8.1 to be
                # no multiple of 0.1. What is emitted has to satisfy both.
                notes.update(notes_of(case.leaves, "multipleOf"))
    ranges = [(low, low_open, high, high_open)]
    if len(set(excluded)) > MAX_EXCLUDED:
        notes.update(notes_of(case.leaves, EXCLUDED))
    for value in sorted(set(excluded))[:MAX_EXCLUDED]:
        low, low_open, high, high_open = ranges[-1]
        above = low < value or (low == value and not low_open)
        below = value < high or (value == high and not high_open)
        if above and below:
            ranges[-1:] = [(low, low_open, value, True), (value, True, high, high_open)]
    shapes = []
    for low, low_open, high, high_open in ranges:
        if low > high or (low == high and (low_open or high_open)):
            continue
        if not case.integer:
            if low_open and low > -math.inf and _nudged(low, 1) <= high:
                low, low_open = _nudged(low, 1), False
            if high_open and high < math.inf and _nudged(high, -1) >= low:
                high, high_open = _nudged(high, -1), False
            if low_open or high_open:
                for keyword in ("exclusiveMinimum", "exclusiveMaximum", EXCLUDED):
                    notes.update(notes_of(case.leaves, keyword))
            missed = [v for bound in (low, high) for v in _missed(bound) if low <= v <= high]
            if missed and not multiples:
                shapes.append({"enum": missed})
        if any(_is_far(bound, case.integer) for bound in (low, high)):
            for keyword in _BOUNDS:
                notes.update(notes_of(case.leaves, keyword))
            if case.integer:
                low = low if abs(low) < MAX_INTEGER else -math.inf
                high = high if abs(high) < MAX_INTEGER else math.inf
        shape = dict(base)
        if low > -math.inf:
            shape["exclusiveMinimum" if low_open else "minimum"] = low
        if high < math.inf:
            shape["exclusiveMaximum" if high_open else "maximum"] = high
        if multiples:
            shape["multipleOf"] = multiples[0]
        if multiples[1:]:
            shape["allOf"] = [{"multipleOf": multiple} for multiple in multiples[1:]]
        shapes.append(shape)
    return shapes


def _is_far(bound: float, integer: bool) -> bool:
    """Whether a mask does not hold a bound: llguidance reads it as a float, or 64 bits."""
    far = integer and abs(bound) >= MAX_INTEGER
    return abs(bound) < math.inf and (far or float(bound) != bound)


def _nudged(bound: float, sign: int) -> float:
    """The first number that a mask should allow above (`sign` 1) or below (-1) an exclusive bound.

    Digits beyond those that a float holds are lost in reading, and 1.00000000000000000001 is 1
    then: a decimal that is to be read as another number has to differ within 15 digits.
    """
    if abs(bound) >= 1e15:
        return math.nextafter(bound, sign * math.inf)
    exact = Decimal(repr(bound))
    step = Decimal(1).scaleb((exact.adjusted() if exact else 0) - 14)
    return float(exact + sign * step)


def _missed(bound: float) -> list[float]:
    """The numbers that llguidance 1.9 takes to be beyond a bound, though they are not: with the
    bound 1.55, it is 1.5 (with -1.55, -1.5)."""
    if abs(bound) == math.inf:
        return []
    text = format(Decimal(repr(bound)), "f")
    point = text.find(".")
    return (
        [float(text[:end]) for end in range(point + 2, min(len(text), MAX_DIGITS))]
        if (point > 0)
        else []
    )
