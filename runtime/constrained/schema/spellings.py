"""How strings, numbers and given values are written: by us, and by llguidance.

Both take a schema of one type in the keywords of the normal form. Ours are chosen so that a model
comes to an end and every reader agrees: at most 20 digits, no `-0`. llguidance's have to be all
that its own masks allow, so that an automaton can stand in for it.
"""

from __future__ import annotations

import re
from typing import Any

from rootlace.runtime.constrained.automaton.char_sets import ALL
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.syntax import Chars, Literal, Regex
from rootlace.runtime.constrained.automaton.trees import (
    NOTHING,
    concat,
    either,
    one_of,
    repeat,
    size,
    with_length,
)
from rootlace.runtime.constrained.schema import formats, json_text, numeric_range
from rootlace.runtime.constrained.schema.json_text import digits
from rootlace.runtime.constrained.schema.numeric_range import Bound, OutOfReach
from rootlace.runtime.constrained.schema.pattern import NotTranslated, in_all, regex_of_pattern

_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ESCAPED_BY_NUMBER = re.compile(r"(?<!\\)(?:\\\\)*\\u")
_ESCAPED_CONTROL = re.compile(r'(?<!\\)(?:\\\\)*\\[^"\\]')
_ESCAPED_PUNCTUATION = re.compile(r"\\[-./+*?()\[\]{}^$|]")


class NotRegular(Exception):
    """A schema has no regular form of modest size, or none that is modelled; the text says why."""


class Ours:
    """Strings as `json.dumps(..., ensure_ascii=False)` writes them, free ones also with `\\/` and
    `\\uXXXX`, because models write these; numbers of bounded length."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size

    def literal(self, value: Any, gap: Regex) -> Regex:
        return _literal(value, gap)

    def string(self, schema: dict[str, Any]) -> Regex:
        if schema.keys() == {"type"}:
            return json_text.any_string()
        return json_text.string_of(content_of(schema, self._max_size), json_text.OURS)

    def number(self, schema: dict[str, Any]) -> Regex:
        low, high = _bounds(schema)
        said = schema.keys() - {"type"}
        factor = schema.get("multipleOf")
        try:
            if not said <= _BOUNDS | {"multipleOf"}:
                raise NotRegular(f"a number with {sorted(said)}")
            if schema["type"] == "number" and factor is None:
                return numeric_range.decimals(low, high) if said else json_text.any_number()
            if factor is not None and factor % 1:
                raise NotRegular("multiples of a fraction")
            if not said:
                return json_text.any_integer()
            first, last = numeric_range.tightest_integers(low, high)
            return numeric_range.integers(first, last, int(factor or 1))
        except OutOfReach as error:
            raise NotRegular(str(error)) from None


class Guidance:
    """What llguidance 1.9 writes. `escapes`: the letters that it lets follow a
    backslash in a free string."""

    def __init__(self, escapes: str, max_size: int) -> None:
        self._max_size = max_size
        self._escapes = json_text.guidance_escapes(escapes)
        self._respelt = _ESCAPED_CONTROL if "u" in escapes else _ESCAPED_BY_NUMBER

    def literal(self, value: Any, gap: Regex) -> Regex:
        tree = _literal(value, gap)
        if not isinstance(tree, Literal) or "\x7f" in tree.text or self._respelt.search(tree.text):
            raise NotRegular("a value that is spelt in several ways")
        return tree

    def string(self, schema: dict[str, Any]) -> Regex:
        if "format" in schema or "allOf" in schema:
            raise NotRegular("a format, which llguidance reads in its own way")
        # So it does what dialects of patterns read differently.
        plain = _ESCAPED_PUNCTUATION.sub("", schema.get("pattern", ""))
        if "\\" in plain or "." in plain or "(?" in plain:
            raise NotRegular("a pattern that llguidance may read otherwise")
        return json_text.string_of(content_of(schema, self._max_size), self._escapes)

    def number(self, schema: dict[str, Any]) -> Regex:
        said = schema.keys() - {"type"}
        if schema["type"] == "number" and not said:
            return json_text.any_number(most=None, exponent=None)
        if schema["type"] == "number" or not said <= {"minimum", "maximum"}:
            raise NotRegular(f"a number with {sorted(said)}")
        low, high = numeric_range.tightest_integers(*_bounds(schema))
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
        return json_text.literal(value, gap)
    except ValueError as error:
        raise NotRegular(f"a value that JSON cannot write: {error}") from None


def content_of(schema: dict[str, Any], max_size: int) -> Regex:
    """The texts that a string of this schema may have. Raises NotRegular."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not schema.keys() <= {"type", "minLength", "maxLength", "pattern", "format", "allOf"}:
        raise NotRegular(f"a string with {sorted(schema)}")
    if max(least, most or 0) > max_size:
        raise NotRegular("too large")
    contents: list[Regex] = []
    try:
        for one in (schema, *schema.get("allOf", ())):
            contents += [formats.regex_of_format(one["format"])] if "format" in one else []
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
    """Non-negative integers, without a bound of digits."""
    if high is not None:
        return numeric_range.integers(low, high)
    if low == 0:
        return either(Literal("0"), concat(one_of("123456789"), digits(0, None)))
    places = len(str(low))
    longer = concat(one_of("123456789"), digits(places, None))
    return either(numeric_range.integers(low, 10**places - 1), longer)
