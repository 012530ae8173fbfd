"""JSON texts as regex trees: white space, strings, numbers, whole values.

Source: RFC 8259 (JSON).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import msgspec

from rootlace.runtime.structured.json_schema import pattern
from rootlace.runtime.structured.json_schema.pattern import NotTranslated, in_all, regex_of_pattern
from rootlace.runtime.structured.regex.syntax import (
    ALL,
    BLANK,
    NOTHING,
    Chars,
    Literal,
    Ranges,
    Regex,
    TooLarge,
    chars,
    complement,
    concat,
    contains,
    either,
    intersection,
    one_of,
    optional,
    repeat,
    size,
    with_leaves,
    with_length,
)

MAX_DIGITS, EXPONENT_DIGITS = 20, 2
"""Most digits of a number before and after the decimal point, and of its exponent.

The exponent cannot overflow a double. Python's `json` refuses integers of more than 4,300 digits,
and a model that has begun a number should end it.
"""


_SPACES, _TABS = 24, 6
WHITESPACE = either(
    Literal(" "),
    concat(
        Literal("\n"), either(repeat(Literal(" "), 0, _SPACES), repeat(Literal("\t"), 1, _TABS))
    ),
)
"""White space between two tokens of flexible JSON, at most once: a space, or a line break and an
indentation of up to six levels (four spaces or one tab each).

Without a bound a weak model may never end a run.
"""
WHITESPACES = (
    *(" ", *("\n" + " " * n for n in range(_SPACES + 1))),
    *("\n" + "\t" * n for n in range(1, _TABS + 1)),
)
"""Texts of `WHITESPACE`."""


def gap_of(flexible: bool) -> Regex:
    """Return the regex of the text between two tokens of JSON."""
    return optional(WHITESPACE) if flexible else BLANK


def enclosed(opening: str, body: Regex, closing: str, gap: Regex) -> Regex:
    return concat(Literal(opening), gap, body, gap, Literal(closing))


def separated(separator: str, gap: Regex) -> Regex:
    return concat(gap, Literal(separator), gap)


class Escapes(msgspec.Struct, frozen=True, eq=False):
    """Spellings of characters in a string: `plain` ones unescaped, `letters` as a backslash and a
    letter, `coded` ones as `\\u` and four digits (`capitals`: A to F in either case)."""

    plain: Ranges
    letters: tuple[tuple[str, str], ...]
    coded: str
    capitals: bool


_LETTERS = (
    ('"', '"'),
    ("\\", "\\"),
    ("\b", "b"),
    ("\f", "f"),
    ("\n", "n"),
    ("\r", "r"),
    ("\t", "t"),
)
_CONTROLS = "".join(map(chr, range(0x20)))
_MUST_BE_ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))

OURS = Escapes(
    complement(_MUST_BE_ESCAPED),
    _LETTERS,
    "".join(c for c in _CONTROLS if c not in dict(_LETTERS)),
    capitals=False,
)
"""Escapes of the mask's own strings: one spelling for each character."""


@lru_cache(maxsize=4)
def guidance_escapes(letters: str) -> Escapes:
    """Return llguidance's escapes: `letters` after a backslash, possibly `u` among the letters."""
    return Escapes(
        complement((*_MUST_BE_ESCAPED, (0x7F, 0x7F))),
        tuple(pair for pair in _LETTERS if pair[1] in letters),
        _CONTROLS + "\x7f" if "u" in letters else "",
        capitals=True,
    )


def key_escapes(mask: Mapping[str, Any]) -> Escapes:
    """Return the escapes of keys not named by a mask schema, and of llguidance's strings."""
    return guidance_escapes(mask.get("x-guidance", {}).get("json_allowed_escapes", 'nrbtf\\"u'))


def free_character() -> Regex:
    """Return a character of a string in any of its spellings: always one code point."""
    digit = one_of("0123456789abcdefABCDEF")
    ordinary = either(
        concat(one_of("0123456789abcefABCEF"), repeat(digit, 3, 3)),
        concat(one_of("dD"), one_of("01234567"), repeat(digit, 2, 2)),
    )
    pair = concat(
        one_of("dD"), one_of("89abAB"), repeat(digit, 2, 2), Literal("\\u"),
        one_of("dD"), one_of("cdefCDEF"), repeat(digit, 2, 2),
    )  # fmt: skip
    escaped = either(one_of('"\\/bfnrt'), concat(Literal("u"), either(ordinary, pair)))
    return either(Chars(OURS.plain), concat(Literal("\\"), escaped))


def any_string() -> Regex:
    return concat(Literal('"'), repeat(free_character(), 0, None), Literal('"'))


def string_of(content: Regex, escapes: Escapes = OURS) -> Regex:
    """Return the JSON strings whose value matches `content`, a regex without look-around."""
    return concat(
        Literal('"'), with_leaves(content, lambda leaf: _escaped(leaf, escapes)), Literal('"')
    )


def _escaped(leaf: Literal | Chars, escapes: Escapes) -> Regex:
    if isinstance(leaf, Chars):
        return _character(leaf.ranges, escapes)
    return concat(*(_character(((ord(c), ord(c)),), escapes) for c in leaf.text))


@lru_cache(maxsize=512)  # the same few classes come again and again
def _character(ranges: Ranges, escapes: Escapes) -> Regex:
    """Return a character of `ranges` in all its spellings."""
    plain = intersection(ranges, escapes.plain)
    if len(plain) == 1 and plain == ranges and plain[0][0] == plain[0][1]:
        return Literal(chr(plain[0][0]))
    options = [one_of("".join(short for c, short in escapes.letters if contains(ranges, ord(c))))]
    codes: dict[str, str] = {}
    for character in escapes.coded:
        if contains(ranges, ord(character)):
            code = f"{ord(character):04x}"
            last = code[3] + code[3].upper() if escapes.capitals else code[3]
            codes[code[:3]] = codes.get(code[:3], "") + last
    options += [concat(Literal(f"u{head}"), one_of(last)) for head, last in codes.items()]
    return either(chars(plain), concat(Literal("\\"), either(*options)))


def literal(value: Any, gap: Regex) -> Regex:
    """Return the texts of one value, with the order of its parts. Raises ValueError for a value
    that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if isinstance(value, list):
        return _bracketed("[", [literal(item, gap) for item in value], "]", gap)
    if isinstance(value, dict):
        colon = separated(":", gap)
        pairs = [
            concat(Literal(text_of(name)), colon, literal(item, gap))
            for name, item in value.items()
        ]
        return _bracketed("{", pairs, "}", gap)
    return Literal(text_of(value))


def _bracketed(opening: str, items: list[Regex], closing: str, gap: Regex) -> Regex:
    if not items:
        return concat(Literal(opening), gap, Literal(closing))
    comma = separated(",", gap)
    rest = (concat(comma, item) for item in items[1:])
    return enclosed(opening, concat(items[0], *rest), closing, gap)


def text_of(value: Any) -> str:
    """Return the text of a value without parts. Raises ValueError for a value that JSON cannot
    write."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate is no text: UnicodeEncodeError is a ValueError
    return text


def type_of(value: Any) -> str:
    """Return the type of a JSON value by the name that schemas use."""
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "number"


def digits(least: int, most: int | None) -> Regex:
    return repeat(Chars(((0x30, 0x39),)), least, most)


def any_integer() -> Regex:
    """Return the integers: zero without a sign, no fraction, no exponent."""
    return either(Literal("0"), concat(optional(Literal("-")), _positive()))


def any_number(most: int | None = MAX_DIGITS, exponent: int | None = EXPONENT_DIGITS) -> Regex:
    """Return the numbers with `most` digits before and behind the point, and `exponent` digits."""
    fraction = concat(Literal("."), digits(1, most))
    power = concat(one_of("eE"), optional(one_of("+-")), digits(1, exponent))
    natural = either(Literal("0"), _positive(most))
    return concat(optional(Literal("-")), natural, optional(fraction), optional(power))


def _positive(most: int | None = MAX_DIGITS) -> Regex:
    return concat(one_of("123456789"), digits(0, None if most is None else most - 1))


# Strings and numbers ------------------------------------------------------------------------------
#
# Spellings of strings, numbers and listed values: Rootlace's, and llguidance's.
#
# Both take a schema of one type in the keywords of the normal form. Rootlace's spellings make a
# model end, and all readers agree on them: at most 20 digits, no `-0`. llguidance's spellings must
# be all that its masks allow, so that an automaton can replace it.


# Numeric range ------------------------------------------------------------------------------------
#
# Numbers between two bounds, as regex trees over their decimal texts.
#
# Integers are exact for bounds of any size. Decimals have at most `MAX_DIGITS` digits on either
# side of the point and no exponent. A validator compares the double nearest to a text with the
# bound. So a decimal on the right side of the bound must stay there when rounded. Rounding is
# monotone, which suffices for inclusive bounds. At exclusive bounds the digits after the point are
# limited, until the nearest remaining text rounds to another double than the bound.


_TOP = 10**MAX_DIGITS - 1
_MAX_SUFFIXES = 1000
_MAX_LISTED = 512


class OutOfReach(ValueError):
    """Error of numbers between bounds: none can be written by the rules here, or too many must be
    listed."""


_Limit = tuple[str, bool]
"""Digits after a point, and whether the limit itself is included."""


class Bound(msgspec.Struct, frozen=True):
    """Limit of a schema (int or finite float), inclusive or not."""

    value: int | float
    inclusive: bool = True

    @property
    def decimal(self) -> Decimal:
        return Decimal(repr(self.value))

    @property
    def fraction(self) -> _Limit:
        """Return the digits after the point, without zeros at the end."""
        return format(self.decimal, "f").partition(".")[2].rstrip("0"), self.inclusive

    @property
    def whole(self) -> int:
        return int(self.decimal)

    def negated(self) -> Bound:
        return Bound(-self.value, self.inclusive)


def integers(low: int | None, high: int | None, factor: int = 1) -> Regex:
    """Return the multiples of `factor` (positive) from `low` to `high`, both included (None:
    bounded by digits alone).

    Few multiples are listed. Otherwise `factor` must divide a small power of ten, so that the last
    digits decide. Raises OutOfReach for other factors.
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
    naturals: Callable[[int, int], Regex] = _natural_numbers
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
    """Return the first and last integer within the bounds."""
    first = last = None
    if low is not None:
        exact = Fraction(low.value)
        first = math.ceil(exact) if low.inclusive else math.floor(exact) + 1
    if high is not None:
        exact = Fraction(high.value)
        last = math.floor(exact) if high.inclusive else math.ceil(exact) - 1
    return first, last


def _natural_multiples(factor: int, places: int, low: int, high: int) -> Regex:
    """Return the multiples of `factor` from `low` (0 or more) to `high`. A number is a head and its
    last `places` digits, which decide divisibility."""
    block = 10**places
    options: list[Regex] = []

    def add(head_low: int, head_high: int, tail_low: int, tail_high: int) -> None:
        tails = range(-(-tail_low // factor) * factor, tail_high + 1, factor)
        if head_low > head_high:
            return
        if head_low == 0:  # no head and no leading zeros
            options.extend(Literal(str(tail)) for tail in tails)
            head_low = 1
        if head_low <= head_high:
            endings = either(*(Literal(str(tail).zfill(places)) for tail in tails))
            options.append(concat(_natural_numbers(head_low, head_high), endings))

    first, first_tail = divmod(low, block)
    last, last_tail = divmod(high, block)
    if first == last:
        add(first, first, first_tail, last_tail)
    else:
        add(first, first, first_tail, block - 1)
        add(first + 1, last - 1, 0, block - 1)
        add(last, last, 0, last_tail)
    return either(*options)


def _natural_numbers(low: int, high: int) -> Regex:
    """Return the texts of numbers from `low` (0 or more) to `high`, without leading zeros."""
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
    """Return the digit strings from `low` to `high`, all three of one length."""
    return _strings((low, True), (high, True), len(low), len(low))


def _strings(low: _Limit | None, high: _Limit | None, least: int, most: int) -> Regex:
    """Return the strings g of `least` to `most` digits for which 0.g lies between 0.low and 0.high
    (None: no limit)."""
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
    """Return the limit on the digits after the first one."""
    return limit[0][1:], limit[1]


# --- decimals -------------------------------------------------------------------------------------


def decimals(low: Bound | None, high: Bound | None) -> Regex:
    """Return the decimals within the bounds. Raises OutOfReach where none can be written."""
    low = _fitting(low, lower=True)
    high = _fitting(high, lower=False)
    if low is not None and high is not None:
        if low.value > high.value:
            return NOTHING
        if low.value == high.value and not (low.inclusive and high.inclusive):
            return NOTHING
    places = min(_places(low, upwards=True), _places(high, upwards=False))
    options: list[Regex] = []
    if low is None or low.value < 0:  # negative numbers, without -0
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


def _fitting(bound: Bound | None, *, lower: bool) -> Bound | None:
    """Return `bound`, or None if every written number satisfies it. Raises OutOfReach if no written
    number does, or if doubles cannot hold the bound exactly."""
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
    """Return the number of digits after the point that separate an exclusive bound, as a double,
    from the nearest text beyond it."""
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
    """Return the non-negative decimals between the bounds."""
    if high is not None and low.whole == high.whole:
        return _decimal(Literal(str(low.whole)), low.fraction, high.fraction, places)
    options = [_decimal(Literal(str(low.whole)), low.fraction, None, places)]
    last = _TOP if high is None else high.whole - 1
    if low.whole < last:
        options.append(_decimal(_natural_numbers(low.whole + 1, last), None, None, places))
    if high is not None:
        options.append(_decimal(Literal(str(high.whole)), None, high.fraction, places))
    return either(*options)


def _decimal(whole: Regex, low: _Limit | None, high: _Limit | None, places: int) -> Regex:
    """Write `whole`, and digits behind a point if the limits allow; without digits if 0 fits."""
    fraction = concat(Literal("."), _strings(low, high, 1, places))
    return concat(whole, either(_strings(low, high, 0, 0), fraction))


# Spellings ----------------------------------------------------------------------------------------


MAX_SIZE = 8192
"""Approximate maximum of states before determinisation, reached by a string of 500 characters.
Beyond it, every position would need a mask row of its own, and llguidance is the better tool."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ESCAPED_BY_NUMBER = re.compile(r"(?<!\\)(?:\\\\)*\\u")
_ESCAPED_CONTROL = re.compile(r'(?<!\\)(?:\\\\)*\\[^"\\]')
_ESCAPED_PUNCTUATION = re.compile(r"\\[-./+*?()\[\]{}^$|]")


class NotRegular(Exception):
    """Error of a schema without a regular form of modest size, or without a modelled one; the text
    says why."""


class Ours:
    """Spellings of `json.dumps(..., ensure_ascii=False)`, in free strings also `\\/` and the escape
    `\\uXXXX`, because models write both. Numbers have bounded length."""

    def literal(self, value: Any, gap: Regex) -> Regex:
        return _literal(value, gap)

    def string(self, schema: dict[str, Any]) -> Regex:
        if schema.keys() == {"type"}:
            return any_string()
        return string_of(content_of(schema, MAX_SIZE), OURS)

    def number(self, schema: dict[str, Any]) -> Regex:
        low, high = _bounds(schema)
        keywords = schema.keys() - {"type"}
        factor = schema.get("multipleOf")
        try:
            if not keywords <= _BOUNDS | {"multipleOf"}:
                raise NotRegular(f"a number with {sorted(keywords)}")
            if schema["type"] == "number" and factor is None:
                return decimals(low, high) if keywords else any_number()
            if factor is not None and factor % 1:
                raise NotRegular("multiples of a fraction")
            if not keywords:
                return any_integer()
            first, last = tightest_integers(low, high)
            return integers(first, last, int(factor or 1))
        except OutOfReach as error:
            raise NotRegular(str(error)) from None


class Guidance:
    """Spellings of strings and numbers by llguidance 1.9 in a mask schema."""

    def __init__(self, mask: Mapping[str, Any]) -> None:
        self._escapes = key_escapes(mask)
        self._respelt = _ESCAPED_CONTROL if self._escapes.coded else _ESCAPED_BY_NUMBER

    def literal(self, value: Any, gap: Regex) -> Regex:
        tree = _literal(value, gap)
        if isinstance(value, float) or not isinstance(tree, Literal):
            raise NotRegular("a value that llguidance writes in its own way")
        if "\x7f" in tree.text or self._respelt.search(tree.text):
            raise NotRegular("a value that is spelt in several ways")
        return tree

    def string(self, schema: dict[str, Any]) -> Regex:
        if "format" in schema or "allOf" in schema:
            raise NotRegular("a format, which llguidance reads in its own way")
        # The same holds for patterns that dialects read differently.
        plain = _ESCAPED_PUNCTUATION.sub("", schema.get("pattern", ""))
        if "\\" in plain or "." in plain or "(?" in plain:
            raise NotRegular("a pattern that llguidance may read otherwise")
        return string_of(content_of(schema, MAX_SIZE), self._escapes)

    def number(self, schema: dict[str, Any]) -> Regex:
        keywords = schema.keys() - {"type"}
        if schema["type"] == "number" and not keywords:
            return any_number(most=None, exponent=None)
        if schema["type"] == "number" or not keywords <= {"minimum", "maximum"}:
            raise NotRegular(f"a number with {sorted(keywords)}")
        low, high = tightest_integers(*_bounds(schema))
        if low is not None and high is not None and low > high:
            return NOTHING
        options: list[Regex] = []
        if high is None or high >= 0:
            options.append(_naturals(max(low or 0, 0), high))
        if low is None or low < 0:  # zero may have a sign where a negative number may
            top = None if low is None else -low
            options.append(concat(Literal("-"), _naturals(max(-high, 0) if high else 0, top)))
        return either(*options)


def _literal(value: Any, gap: Regex) -> Regex:
    try:
        return literal(value, gap)
    except ValueError as error:
        raise NotRegular(f"a value that JSON cannot write: {error}") from None


def content_of(schema: dict[str, Any], max_size: int) -> Regex:
    """Return the texts that a string of this schema may have. Raises NotRegular."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not schema.keys() <= {"type", "minLength", "maxLength", "pattern", "format", "allOf"}:
        raise NotRegular(f"a string with {sorted(schema)}")
    if max(least, most or 0) > max_size:
        raise NotRegular("too large")
    contents: list[Regex] = []
    try:
        for one in (schema, *schema.get("allOf", ())):
            contents += [pattern.regex_of_format(one["format"])] if "format" in one else []
            contents += [regex_of_pattern(one["pattern"])] if "pattern" in one else []
        if not contents:
            return repeat(Chars(ALL), least, most)
        if sum(size(content, max_size) for content in contents) > max_size:
            raise NotRegular("too large")
        fitted = with_length(contents[0], least, most) if len(contents) == 1 else None
        if fitted is None:
            fitted = in_all(contents, least, most)
    except (NotTranslated, TooLarge) as error:
        raise NotRegular(str(error)) from None
    if size(fitted, max_size) > max_size:
        raise NotRegular("too large")
    return fitted


def _bounds(schema: dict[str, Any]) -> tuple[Bound | None, Bound | None]:
    low = high = None
    for keyword, inclusive in (("minimum", True), ("exclusiveMinimum", False)):
        if keyword in schema:
            low = Bound(schema[keyword], inclusive)
    for keyword, inclusive in (("maximum", True), ("exclusiveMaximum", False)):
        if keyword in schema:
            high = Bound(schema[keyword], inclusive)
    return low, high


def _naturals(low: int, high: int | None) -> Regex:
    """Return the non-negative integers, without a bound of digits."""
    if high is not None:
        return integers(low, high)
    if low == 0:
        return either(Literal("0"), concat(one_of("123456789"), digits(0, None)))
    places = len(str(low))
    longer = concat(one_of("123456789"), digits(places, None))
    return either(integers(low, 10**places - 1), longer)
