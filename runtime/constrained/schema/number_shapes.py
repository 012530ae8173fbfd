"""A case of a conjunction as ranges of numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple

from rootlace.runtime.constrained.schema.conjunction import Case
from rootlace.runtime.constrained.schema.dialect import EXCLUDED
from rootlace.runtime.constrained.schema.residual import Residual, notes_of
from rootlace.runtime.constrained.schema.shape import Shape

MAX_EXCLUDED = 8
MAX_DIGITS = 40
MAX_INTEGER = 2**53
"""Integers from here on are not shown to llguidance 1.9: it reads them as floats, and on some near
the ends of 64 bits it ends the process."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", EXCLUDED)


class _Range(NamedTuple):
    low: float
    low_open: bool
    high: float
    high_open: bool

    @property
    def empty(self) -> bool:
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def without(self, value: Any) -> list[_Range]:
        above = self.low < value or (self.low == value and not self.low_open)
        below = value < self.high or (value == self.high and not self.high_open)
        if not (above and below):
            return [self]
        return [self._replace(high=value, high_open=True), self._replace(low=value, low_open=True)]

    def said(self) -> dict[str, Any]:
        found = {}
        if self.low > -math.inf:
            found["exclusiveMinimum" if self.low_open else "minimum"] = self.low
        if self.high < math.inf:
            found["exclusiveMaximum" if self.high_open else "maximum"] = self.high
        return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(case: Case, excluded: list[Any], notes: set[Residual]) -> list[Shape]:
    """`notes` takes in what the shapes do not hold."""
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
    if len(set(excluded)) > MAX_EXCLUDED:
        notes.update(notes_of(case.leaves, EXCLUDED))
    ranges = [_Range(low, low_open, high, high_open)]
    for value in sorted(set(excluded))[:MAX_EXCLUDED]:
        ranges[-1:] = ranges[-1].without(value)
    if not any(multiple % 1 for multiple in multiples):
        multiples = [math.lcm(*map(int, multiples))] if multiples else []
    factors: dict[str, Any] = {}
    if multiples:
        factors["multipleOf"] = multiples[0]
    if multiples[1:]:
        factors["allOf"] = [{"multipleOf": multiple} for multiple in multiples[1:]]
    return [_shape(range_, case, factors) for range_ in ranges if not range_.empty]


def _shape(wanted: _Range, case: Case, factors: dict[str, Any]) -> Shape:
    """What llguidance 1.9 is shown instead of a range that it does not hold exactly."""
    base = {"type": "integer" if case.integer else "number"}
    lost: set[Residual] = set()
    low, low_open, high, high_open = wanted
    missed: list[float] = []
    if not case.integer:
        if low_open and low > -math.inf and _nudged(low, 1) <= high:
            low, low_open = _nudged(low, 1), False
        if high_open and high < math.inf and _nudged(high, -1) >= low:
            high, high_open = _nudged(high, -1), False
        if low_open or high_open:
            for keyword in ("exclusiveMinimum", "exclusiveMaximum", EXCLUDED):
                lost.update(notes_of(case.leaves, keyword))
        missed = [v for bound in (low, high) for v in _missed(bound) if low <= v <= high]
    if any(_is_far(bound, case.integer) for bound in (low, high)):
        for keyword in _BOUNDS:
            lost.update(notes_of(case.leaves, keyword))
        if case.integer:
            low = low if abs(low) < MAX_INTEGER else -math.inf
            high = high if abs(high) < MAX_INTEGER else math.inf
    shown: list[dict[str, Any]] = [{"enum": missed}] if missed and not factors else []
    shown.append({**base, **_Range(low, low_open, high, high_open).said(), **factors})
    return Shape({**base, **wanted.said(), **factors}, tuple(shown), frozenset(lost))


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
    if point <= 0:
        return []
    return [float(text[:end]) for end in range(point + 2, min(len(text), MAX_DIGITS))]
