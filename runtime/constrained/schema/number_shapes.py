"""A case of a conjunction as ranges of numbers."""

from __future__ import annotations

import math
from typing import Any

from rootlace.runtime.constrained.schema.conjunction import EXCLUDED, Case
from rootlace.runtime.constrained.schema.residual import Residual, notes_of

MAX_EXCLUDED = 8
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
        if not case.integer and _misread(low, low_open, high, high_open):
            notes.update(notes_of(case.leaves, "exclusiveMinimum"))
            notes.update(notes_of(case.leaves, "exclusiveMaximum"))
            if excluded:
                notes.update(notes_of(case.leaves, EXCLUDED))
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


def _misread(low: float, low_open: bool, high: float, high_open: bool) -> bool:
    """Whether llguidance 1.9 takes in the whole number that is an exclusive bound: it does where
    the other bound is a fraction right beside it (`exclusiveMinimum: 1, maximum: 1.5`)."""
    whole = (low_open and low == int(low)) or (high_open and high == int(high))
    return high - low <= 1 and whole
