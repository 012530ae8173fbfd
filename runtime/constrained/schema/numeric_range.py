"""Numbers between two bounds, as regex trees over their decimal texts.

Integers are exact for bounds of any size. Decimals have at most `MAX_DIGITS` digits on either side
of the point and no exponent. A validator compares the double nearest to a text with the bound, so
a decimal on the right side of the bound must stay there when it is rounded: rounding is monotone,
which is enough for inclusive bounds; at exclusive ones the digits after the point are limited
until the nearest text that is left rounds to another double than the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial

from rootlace.runtime.constrained.automaton.syntax import Chars, Literal, Regex
from rootlace.runtime.constrained.automaton.trees import BLANK, NOTHING, concat, either, repeat
from rootlace.runtime.constrained.schema.json_text import MAX_DIGITS, digits

_TOP = 10**MAX_DIGITS - 1
_MAX_SUFFIXES = 1000
_MAX_LISTED = 512


class OutOfReach(ValueError):
    """There are numbers between the bounds, but none that we would write, or too many to list."""


_Limit = tuple[str, bool]
"""Digits after a point, and whether what is equal to them is within the limit."""


@dataclass(frozen=True)
class Bound:
    """A limit as the schema states it (int or finite float), itself included or not."""

    value: int | float
    inclusive: bool = True

    @property
    def decimal(self) -> Decimal:
        return Decimal(repr(self.value))

    @property
    def fraction(self) -> _Limit:
        """The digits after the point, without zeros at the end."""
        return format(self.decimal, "f").partition(".")[2].rstrip("0"), self.inclusive

    @property
    def whole(self) -> int:
        return int(self.decimal)

    def negated(self) -> Bound:
        return Bound(-self.value, self.inclusive)


def integers(low: int | None, high: int | None, factor: int = 1) -> Regex:
    """The multiples of `factor` (positive) from `low` to `high`, both included (None: no bound but
    that of digits).

    Few multiples are listed; otherwise `factor` must divide a small power of ten, so that the last
    digits tell. Raises OutOfReach for other factors.
    """
    if low is not None and high is not None:
        first, last = -(-low // factor), high // factor
        if first > last:
            return NOTHING
        if factor > 1 and last - first < _MAX_LISTED:
            return either(*(Literal(str(q * factor)) for q in range(first, last + 1)))
    low = -_TOP if low is None else low
    high = _TOP if high is None else high
    if low > high:
        raise OutOfReach("the integers have too many digits")
    naturals: Callable[[int, int], Regex] = _naturals
    if factor > 1:
        places = next((k for k in range(1, MAX_DIGITS) if 10**k % factor == 0), None)
        if places is None or 10**places // factor > _MAX_SUFFIXES:
            raise OutOfReach(f"multiples of {factor}")
        naturals = partial(_natural_multiples, factor, places)
    options: list[Regex] = []
    if low < 0:
        options.append(concat(Literal("-"), naturals(max(1, -high), -low)))
    if high >= 0:
        options.append(naturals(max(0, low), high))
    return either(*options)


def tightest_integers(low: Bound | None, high: Bound | None) -> tuple[int | None, int | None]:
    """The first and last integer within the bounds."""
    first = last = None
    if low is not None:
        exact = Fraction(low.value)
        first = math.ceil(exact) if low.inclusive else math.floor(exact) + 1
    if high is not None:
        exact = Fraction(high.value)
        last = math.floor(exact) if high.inclusive else math.ceil(exact) - 1
    return first, last


def _natural_multiples(factor: int, places: int, low: int, high: int) -> Regex:
    """0 <= low. A number is a head and its last `places` digits; those decide divisibility."""
    block = 10**places
    options: list[Regex] = []

    def add(head_low: int, head_high: int, tail_low: int, tail_high: int) -> None:
        tails = range(-(-tail_low // factor) * factor, tail_high + 1, factor)
        if head_low > head_high:
            return
        if head_low == 0:  # no head is written, and no leading zeros
            options.extend(Literal(str(tail)) for tail in tails)
            head_low = 1
        if head_low <= head_high:
            endings = either(*(Literal(str(tail).zfill(places)) for tail in tails))
            options.append(concat(_naturals(head_low, head_high), endings))

    first, first_tail = divmod(low, block)
    last, last_tail = divmod(high, block)
    if first == last:
        add(first, first, first_tail, last_tail)
    else:
        add(first, first, first_tail, block - 1)
        add(first + 1, last - 1, 0, block - 1)
        add(last, last, 0, last_tail)
    return either(*options)


def _naturals(low: int, high: int) -> Regex:
    """0 <= low; texts without leading zeros."""
    if low > high:
        return NOTHING
    shortest, longest = len(str(low)), len(str(high))
    if shortest == longest:
        return _between(str(low), str(high))
    options = [_between(str(low), "9" * shortest)]
    if shortest + 1 < longest:
        options.append(concat(Chars(((0x31, 0x39),)), digits(shortest, longest - 2)))
    options.append(_between("1" + "0" * (longest - 1), str(high)))
    return either(*options)


def _between(low: str, high: str) -> Regex:
    """The digit strings from `low` to `high`, all three of one length."""
    return _strings((low, True), (high, True), len(low), len(low))


def _strings(low: _Limit | None, high: _Limit | None, least: int, most: int) -> Regex:
    """The strings g of `least` to `most` digits for which 0.g lies between 0.low and 0.high (None:
    no limit)."""
    if low is not None and low[1] and not low[0].strip("0"):
        low = None
    if high is not None and high[1] and not high[0].strip("9") and len(high[0]) >= most:
        high = None
    if low is None and high is None:
        return digits(least, most)
    if high is not None and not high[0].strip("0"):
        return repeat(Literal("0"), least, most) if low is None and high[1] else NOTHING
    empty = BLANK if low is None and not least else NOTHING
    if not most:
        return empty
    first = int(low[0][:1] or 0) if low else 0
    last = int(high[0][0]) if high else 9
    inner = max(least - 1, 0), most - 1
    if low and high and first >= last:
        both = _strings(_rest(low), _rest(high), *inner)
        return either(empty, concat(_digit(first, last), both))
    free = digits(*inner)
    above = _strings(_rest(low), None, *inner) if low else free
    below = _strings(None, _rest(high), *inner) if high else free
    edges = [concat(_digit(d, d), g) for d, g in ((first, above), (last, below)) if g != free]
    middle = _digit(first + (above != free), last - (below != free))
    return either(empty, *edges, concat(middle, free))


def _digit(low: int, high: int) -> Regex:
    if low == high:
        return Literal(str(low))
    return Chars(((0x30 + low, 0x30 + high),)) if low < high else NOTHING


def _rest(limit: _Limit) -> _Limit:
    """Behind its first digit."""
    return limit[0][1:], limit[1]


# --- decimals -------------------------------------------------------------------------------------


def decimals(low: Bound | None, high: Bound | None) -> Regex:
    """The decimals within the bounds. Raises OutOfReach where none of them can be written."""
    low = _kept(low, lower=True)
    high = _kept(high, lower=False)
    if low is not None and high is not None:
        if low.value > high.value:
            return NOTHING
        if low.value == high.value and not (low.inclusive and high.inclusive):
            return NOTHING
    places = min(_places(low, upwards=True), _places(high, upwards=False))
    options: list[Regex] = []
    if low is None or low.value < 0:  # negative numbers; their own zero is left out
        bottom = Bound(0, False) if high is None or high.value >= 0 else high.negated()
        top = None if low is None else low.negated()
        options.append(concat(Literal("-"), _unsigned(bottom, top, places)))
    if high is None or high.value >= 0:
        bottom = Bound(0) if low is None or low.value < 0 else low
        options.append(_unsigned(bottom, high, places))
    found = either(*options)
    if found == NOTHING:
        raise OutOfReach("no decimal of modest length lies between the bounds")
    return found


def _kept(bound: Bound | None, *, lower: bool) -> Bound | None:
    """`bound`, or None where every number we write keeps to it. Raises OutOfReach for one that no
    number we write keeps to, or that doubles cannot hold exactly."""
    if bound is None:
        return None
    if abs(bound.value) > _TOP:
        if (bound.value < 0) == lower:
            return None
        raise OutOfReach("the numbers have too many digits")
    if abs(bound.value) >= 10**15 and Fraction(float(bound.value)) != Fraction(bound.decimal):
        raise OutOfReach("a double cannot hold the bound")
    if len(bound.fraction[0]) > MAX_DIGITS:
        raise OutOfReach("the bound has too many digits")
    return bound


def _places(bound: Bound | None, *, upwards: bool) -> int:
    """How many digits after the point keep the nearest text beyond an exclusive bound apart from
    it as a double."""
    if bound is None or bound.inclusive:
        return MAX_DIGITS
    for places in range(MAX_DIGITS, -1, -1):
        unit = Fraction(1, 10**places)
        exact = Fraction(bound.decimal) / unit
        nearest = (math.floor(exact) + 1 if upwards else math.ceil(exact) - 1) * unit
        rounded = nearest.numerator / nearest.denominator  # correctly rounded by Python
        if rounded > bound.value if upwards else rounded < bound.value:
            return places
    raise OutOfReach("the bound has too many digits")


def _unsigned(low: Bound, high: Bound | None, places: int) -> Regex:
    """Non-negative decimals between the bounds."""
    if high is not None and low.whole == high.whole:
        return _decimal(Literal(str(low.whole)), low.fraction, high.fraction, places)
    options = [_decimal(Literal(str(low.whole)), low.fraction, None, places)]
    last = _TOP if high is None else high.whole - 1
    if low.whole < last:
        options.append(_decimal(_naturals(low.whole + 1, last), None, None, places))
    if high is not None:
        options.append(_decimal(Literal(str(high.whole)), None, high.fraction, places))
    return either(*options)


def _decimal(whole: Regex, low: _Limit | None, high: _Limit | None, places: int) -> Regex:
    """`whole`, and digits after a point where they are between the limits; none where that is 0."""
    fraction = concat(Literal("."), _strings(low, high, 1, places))
    return concat(whole, either(_strings(low, high, 0, 0), fraction))
