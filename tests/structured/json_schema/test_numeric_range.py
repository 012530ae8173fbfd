"""Numeric ranges, by brute force over intervals."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.structured.json_schema import json_text
from rootlace.runtime.structured.json_schema.json_text import Bound, OutOfReach
from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.syntax import Regex
from tests.structured.json_schema.regex_texts import draw


def _matcher(regex: Regex) -> LazyDfa:
    return LazyDfa(regex, 1 << 16)


def _matches(dfa: LazyDfa, text: str) -> bool:
    state = dfa.run(dfa.start, text.encode())
    return state >= 0 and dfa.accepting(state)


SPANS = [
    (0, 0), (0, 9), (1, 10), (5, 5), (7, 123), (99, 101), (100, 999), (0, 1000), (-1, 1), (-10, -1),
    (-123, -7), (-1000, 57), (-5, 0), (0, 255), (1900, 2100), (18, 120), (999, 1001), (-101, -99),
]  # fmt: skip


@pytest.mark.parametrize("low, high", SPANS)
def test_integers_between(low: int, high: int) -> None:
    dfa = _matcher(json_text.integers(low, high))
    for n in range(-1200, 2300):
        assert _matches(dfa, str(n)) == (low <= n <= high), n
    for text in ("-0", "00", "01", "-01", "+1", "1.0", "", "-", f"0{high}"):
        assert not _matches(dfa, text)


@pytest.mark.parametrize("bound", [-1001, -100, -1, 0, 1, 9, 10, 77, 1000])
def test_integers_from_and_to(bound: int) -> None:
    above = _matcher(json_text.integers(bound, None))
    below = _matcher(json_text.integers(None, bound))
    for n in [*range(-1200, 1200), 10**19, -(10**19), 10**20 - 1]:
        assert _matches(above, str(n)) == (n >= bound)
        assert _matches(below, str(n)) == (n <= bound)


@given(st.integers(-(10**19), 10**19), st.integers(-(10**19), 10**19), st.data())
@settings(max_examples=100, deadline=None)
def test_large_integers(a: int, b: int, data: st.DataObject) -> None:
    low, high = sorted((a, b))
    dfa = _matcher(json_text.integers(low, high))
    near = st.sampled_from([low, high]).flatmap(lambda n: st.integers(n - 5, n + 5))
    for n in data.draw(st.lists(near | st.integers(-(10**20) + 1, 10**20 - 1), max_size=20)):
        assert _matches(dfa, str(n)) == (low <= n <= high)


@given(
    st.sampled_from([*SPANS, (None, None), (3, None), (None, -17), (-250, None)]),
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 10, 15, 25, 100]),
)
@settings(max_examples=24)
def test_multiples(span: tuple[int | None, int | None], factor: int) -> None:
    low, high = span
    try:
        regex = json_text.integers(low, high, factor)
    except OutOfReach:
        assert factor in (3, 7, 15) and (low is None or high is None)
        return
    dfa = _matcher(regex)
    for n in range(-1200, 2300):
        inside = (low is None or low <= n) and (high is None or n <= high)
        assert _matches(dfa, str(n)) == (inside and n % factor == 0), n


def test_multiples_between_far_bounds() -> None:
    dfa = _matcher(json_text.integers(-123456, 987654, 25))
    for n in [*range(-123500, -123400), *range(-200, 200), *range(987600, 987700)]:
        assert _matches(dfa, str(n)) == (-123456 <= n <= 987654 and n % 25 == 0), n


ENDS = [
    (0, 1), (0.5, 0.75), (-1, 1), (0.1, 0.1), (-0.5, 0), (0, 0), (-2.25, -1.75), (1.25, 10),
    (9.99, 10.01), (-0.01, 0.01), (0.25, 0.3), (3, 3.5), (2.75, 3), (-12.5, 7.125), (0.999, 1.001),
]  # fmt: skip


@pytest.mark.parametrize("low, high", ENDS)
@pytest.mark.parametrize("low_in", [True, False])
@pytest.mark.parametrize("high_in", [True, False])
def test_decimals_between(low: float, high: float, low_in: bool, high_in: bool) -> None:
    regex = json_text.decimals(Bound(low, low_in), Bound(high, high_in))
    if low == high and not (low_in and high_in):
        assert regex == syntax.NOTHING
        return
    dfa = _matcher(regex)
    for whole in range(-14, 14):
        for text in [str(abs(whole))] + [
            f"{abs(whole)}.{digits:0{places}}"
            for places in (1, 2, 3)
            for digits in range(0, 10**places, 1 if places < 3 else 7)
        ]:
            signed = "-" + text if whole < 0 else text
            value = Decimal(signed)
            inside = (value >= Decimal(repr(low)) if low_in else value > Decimal(repr(low))) and (
                value <= Decimal(repr(high)) if high_in else value < Decimal(repr(high))
            )
            assert _matches(dfa, signed) == inside, signed
    for text in ("-0", "-0.0", "01", ".5", "1.", "1e0"):
        assert not _matches(dfa, text)


@given(
    st.floats(-1e9, 1e9) | st.integers(-(10**6), 10**6),
    st.booleans(),
    st.sampled_from(["low", "high"]),
    st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_what_is_read_back_keeps_to_the_bound(
    value: float, inclusive: bool, side: str, seed: int
) -> None:
    """Texts near an exclusive bound, which may round onto it, are checked as doubles too."""
    bound = Bound(value, inclusive)
    low, high = (bound, None) if side == "low" else (None, bound)
    try:
        regex = json_text.decimals(low, high)
    except OutOfReach:
        return
    source = random.Random(seed)
    for _ in range(30):
        read = json.loads(draw(regex, source))
        difference = Fraction(read) - Fraction(value)
        difference = difference if side == "low" else -difference
        assert difference > 0 or (inclusive and difference == 0)


@given(st.decimals(0, 100, places=17), st.integers(-3, 3), st.integers(15, 20))
@settings(max_examples=300, deadline=None)
def test_exclusive_bounds_are_exact_next_to_them(value: Decimal, offset: int, places: int) -> None:
    bound = float(value)
    try:
        dfa = _matcher(json_text.decimals(Bound(bound, inclusive=False), None))
    except OutOfReach:
        return
    text = format(Decimal(repr(bound)) + offset * Decimal(10) ** -places, "f")
    if _matches(dfa, text):
        assert float(text) > bound


@pytest.mark.parametrize(
    "low, high",
    [(Bound(10**25), None), (None, Bound(-(10**25))), (Bound(9007199254740993), None),
     (Bound(1e-30, False), Bound(2e-30))],
)  # fmt: skip
def test_out_of_reach(low: Bound | None, high: Bound | None) -> None:
    with pytest.raises(OutOfReach):
        json_text.decimals(low, high)
