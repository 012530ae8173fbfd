"""JSON Schema to a regex tree, for schemas that are finite automata of modest size.

Every text of the tree is valid (draft 2020-12, formats asserted); not every valid text is in it:
properties come in the order of the schema, strings and numbers in the spellings of `json_text`.
What is not modelled exactly (open objects, recursion, `not`, `uniqueItems`, …) makes the whole
schema not finite; others take it then.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from rootlace.runtime.constrained.automaton.char_sets import ALL
from rootlace.runtime.constrained.automaton.syntax import Literal as Text
from rootlace.runtime.constrained.automaton.syntax import Regex
from rootlace.runtime.constrained.schema import formats, json_text, numeric_range, trees
from rootlace.runtime.constrained.schema.expansion import (
    Conjunction,
    Expander,
    NotFinite,
    Schema,
)
from rootlace.runtime.constrained.schema.members import Members
from rootlace.runtime.constrained.schema.numeric_range import Bound
from rootlace.runtime.constrained.schema.pattern import NotTranslated, regex_of_pattern

MAX_SIZE = 8192
"""States of the automaton before determinisation, about. A string of up to 500 characters has so
many; beyond, every position would need a mask row of its own, and llguidance is the better tool."""

_MAX_DEPTH = 32


def regex_of_schema(
    schema: Schema,
    whitespace: Literal["compact", "flexible"] = "compact",
    max_size: int = MAX_SIZE,
) -> Regex | None:
    """The JSON texts we write for `schema`, or None where it is no finite automaton of modest size.

    A tree that matches nothing (`trees.NOTHING`) is returned only where no instance is valid.
    """
    try:
        return _Writer(schema, json_text.Layout(whitespace == "flexible"), max_size).texts()
    except (NotFinite, NotTranslated, numeric_range.OutOfReach, RecursionError, OverflowError):
        return None


class _Writer:
    """Turns schemas into trees, one value at a time."""

    def __init__(self, root: Schema, layout: json_text.Layout, max_size: int) -> None:
        self._root = root
        self._layout = layout
        self._max_size = max_size
        self._expander = Expander(root)

    def texts(self) -> Regex:
        return self._value([self._root], 0, frozenset())

    def _value(self, schemas: list[Schema], depth: int, refs: frozenset[str]) -> Regex:
        """The texts of what satisfies all of `schemas`, standing `depth` deep."""
        if depth > _MAX_DEPTH:
            raise NotFinite("too deep")
        listed = self._expander.enumerated(schemas)
        if listed is not None:
            return self._bounded(self._literals(listed, depth))
        options = [
            self._alternative(conjunction, schemas, depth)
            for conjunction in self._expander.expand(schemas, refs)
        ]
        return self._bounded(trees.either(*options))

    def _alternative(self, found: Conjunction, schemas: list[Schema], depth: int) -> Regex:
        listed = self._expander.enumerated([part.schema for part in found.parts])
        if listed is not None:
            valid = [value for value in listed if self._expander.valid(value, schemas)]
            return self._literals(valid, depth)
        return self._bounded(
            trees.either(*(self._typed(name, found, depth) for name in sorted(found.types())))
        )

    def _typed(self, name: str, found: Conjunction, depth: int) -> Regex:
        match name:
            case "null":
                return Text("null")
            case "boolean":
                return trees.either(Text("true"), Text("false"))
            case "string":
                return self._string(found)
            case "integer":
                return self._integer(found)
            case "number":
                return self._number(found)
            case "array":
                return self._array(found, depth)
            case _:
                return self._object(found, depth)

    def _literals(self, values: list[Any], depth: int) -> Regex:
        try:
            return trees.either(*(json_text.literal(v, self._layout, depth) for v in values))
        except ValueError as error:
            raise NotFinite(f"a value that JSON cannot write: {error}") from None

    def _bounded(self, regex: Regex) -> Regex:
        if trees.size(regex, self._max_size) > self._max_size:
            raise NotFinite("too large")
        return regex

    def _string(self, found: Conjunction) -> Regex:
        least, most = _range(found, "minLength", "maxLength")
        patterns = set(_strings(found, "pattern"))
        names = set(_strings(found, "format"))
        if len(patterns) + len(names) > 1:
            raise NotFinite("several patterns or formats for one string")
        if most is not None and least > most:
            return trees.NOTHING
        if not patterns and not names:
            if least == 0 and most is None:
                return json_text.any_string()
            self._afford(least if most is None else most)
            every = trees.repeat(trees.chars(ALL), least, most)
            return json_text.string_of(every)
        if names:
            name = names.pop()
            if name not in formats.FORMATS:
                raise NotFinite(f"format {name!r}")
            content = formats.regex_of_format(name)
        else:
            content = regex_of_pattern(patterns.pop())
        self._bounded(content)
        fitted = trees.with_length(content, least, most)
        if fitted is None or fitted == trees.NOTHING:
            raise NotFinite("a pattern or format whose length is limited")
        self._bounded(fitted)
        return json_text.string_of(fitted)

    def _afford(self, count: int) -> None:
        if count > self._max_size:
            raise NotFinite("too large")

    def _integer(self, found: Conjunction) -> Regex:
        low, high = numeric_range.tightest_integers(*_bounds(found))
        factor = _integer_factor(found)
        if low is None and high is None and factor == 1:
            return json_text.any_integer()
        return numeric_range.multiples(low, high, factor)

    def _number(self, found: Conjunction) -> Regex:
        factors = list(found.values("multipleOf"))
        low, high = _bounds(found)
        if not factors:
            if low is None and high is None:
                return json_text.any_number()
            return numeric_range.decimals(low, high)
        if all(_is_whole(factor) for factor in factors):
            return self._integer(found)
        if len(factors) > 1:
            raise NotFinite("several multipleOf")
        texts = numeric_range.listed_multiples(low, high, _number_of(factors[0]))
        schemas: list[Schema] = [part.schema for part in found.parts]
        valid = [text for text in texts if self._expander.valid(_value_of(text), schemas)]
        if not valid:
            raise NotFinite("multiples that are lost in rounding")
        return trees.either(*(Text(text) for text in valid))

    def _array(self, found: Conjunction, depth: int) -> Regex:
        members = Members(found)
        least, most = _range(found, "minItems", "maxItems")
        prefix, most = members.prefix(most)
        if any(True for _ in found.values("contains")):
            raise NotFinite("contains")
        if any(unique is True for unique in found.values("uniqueItems")) and (
            most is None or most > 1
        ):
            raise NotFinite("uniqueItems")
        items: list[Regex] = []
        for schemas in prefix:
            item = self._value(schemas, depth + 1, found.refs)
            if item == trees.NOTHING:
                most = len(items)
                break
            items.append(item)
        tail: Regex = trees.NOTHING
        if most is None or most > len(items):
            rest = members.rest()
            if not rest:
                raise NotFinite("an array of anything")
            tail = self._value(rest, depth + 1, found.refs)
            if tail == trees.NOTHING:
                most = len(items)
        if most is not None and least > most:
            return trees.NOTHING
        self._afford(max(least, most or 0))
        return self._sequence(items, tail, least, most, depth + 1)

    def _sequence(
        self, items: list[Regex], tail: Regex, least: int, most: int | None, depth: int
    ) -> Regex:
        """`items` and then any number of `tail`, `least` to `most` in all, in brackets."""
        empty = self._layout.empty("[", "]")
        if most == 0:
            return empty
        comma = self._layout.comma(depth)
        if items:
            count = len(items)
            top = None if most is None else most - count
            body = trees.repeat(trees.concat(comma, tail), max(0, least - count), top)
            for i in range(count - 1, -1, -1):
                if i + 1 < count or body != trees.BLANK:
                    body = body if i + 1 < least else trees.optional(body)
                body = trees.concat(items[i] if i == 0 else trees.concat(comma, items[i]), body)
        else:
            top = None if most is None else most - 1
            more = trees.repeat(trees.concat(comma, tail), max(0, least - 1), top)
            body = trees.concat(tail, more)
        full = self._layout.enclosed("[", body, "]", depth)
        return full if least > 0 else trees.either(empty, full)

    def _object(self, found: Conjunction, depth: int) -> Regex:
        members = Members(found)
        names = members.names()
        required = members.required()
        for rule in found.values("propertyNames"):
            names = [name for name in names if self._expander.valid(name, [rule])]
        pairs: list[tuple[Regex, bool]] = []
        for name in names:
            held = members.schemas_of(name)
            value = self._value(held, depth + 1, found.refs)
            if value == trees.NOTHING:
                if name in required:
                    return trees.NOTHING
                continue
            pair = trees.concat(_key(name), self._layout.colon(), value)
            pairs.append((pair, name in required))
        if required - set(names):
            return trees.NOTHING
        return self._pairs(pairs, found, depth + 1)

    def _pairs(self, pairs: list[tuple[Regex, bool]], found: Conjunction, depth: int) -> Regex:
        """An object of these members in this order, the necessary ones marked."""
        least, most = _range(found, "minProperties", "maxProperties")
        needed = sum(must for _, must in pairs)
        if least > len(pairs) or (most is not None and needed > most):
            return trees.NOTHING
        if least > max(needed, 1) or (most is not None and most < len(pairs)):
            raise NotFinite("a limited number of properties")
        empty = self._layout.empty("{", "}")
        if not pairs:
            return empty
        body = _joined(pairs, self._layout.comma(depth))
        full = self._layout.enclosed("{", body, "}", depth)
        return full if needed or least else trees.either(empty, full)


def _joined(pairs: list[tuple[Regex, bool]], comma: Regex) -> Regex:
    """One or more of `pairs`, separated by commas; each is written once where some pair is
    necessary, log n times where all may be left out."""
    at = next((i for i, (_, must) in enumerate(pairs) if must), None)
    if at is not None:
        before = [trees.optional(trees.concat(pair, comma)) for pair, _ in pairs[:at]]
        return trees.concat(*before, pairs[at][0], _following(pairs[at + 1 :], comma))
    if len(pairs) == 1:
        return pairs[0][0]
    middle = (len(pairs) + 1) // 2
    first = trees.concat(_joined(pairs[:middle], comma), _following(pairs[middle:], comma))
    return trees.either(first, _joined(pairs[middle:], comma))


def _following(pairs: list[tuple[Regex, bool]], comma: Regex) -> Regex:
    """`pairs` after something, each with its comma."""
    texts = ((trees.concat(comma, pair), must) for pair, must in pairs)
    return trees.concat(*(text if must else trees.optional(text) for text, must in texts))


def _key(name: str) -> Regex:
    try:
        return json_text.key(name)
    except ValueError as error:
        raise NotFinite(f"a name that JSON cannot write: {error}") from None


def _strings(found: Conjunction, keyword: str) -> list[str]:
    stated = list(found.values(keyword))
    if not all(isinstance(value, str) for value in stated):
        raise NotFinite(f"{keyword} that is no string")
    return stated


def _range(found: Conjunction, least: str, most: str) -> tuple[int, int | None]:
    """The tightest counts that two keywords state."""
    low = [_count(value, least) for value in found.values(least)]
    high = [_count(value, most) for value in found.values(most)]
    return max(low, default=0), min(high, default=None)


def _count(value: Any, keyword: str) -> int:
    number = _number_of(value)
    if number != int(number) or number < 0:
        raise NotFinite(f"{keyword} that is no count")
    return int(number)


def _number_of(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise NotFinite(f"{value!r} where a number should be")
    return value


def _bounds(found: Conjunction) -> tuple[Bound | None, Bound | None]:
    """The tightest lower and upper bound."""
    low = [Bound(_number_of(value)) for value in found.values("minimum")]
    low += [Bound(_number_of(value), False) for value in found.values("exclusiveMinimum")]
    high = [Bound(_number_of(value)) for value in found.values("maximum")]
    high += [Bound(_number_of(value), False) for value in found.values("exclusiveMaximum")]
    return (
        max(low, key=lambda bound: (bound.value, not bound.inclusive), default=None),
        min(high, key=lambda bound: (bound.value, bound.inclusive), default=None),
    )


def _is_whole(value: Any) -> bool:
    number = _number_of(value)
    return number == int(number)


def _integer_factor(found: Conjunction) -> int:
    """The number of which an integer has to be a multiple."""
    factor = 1
    for value in found.values("multipleOf"):
        number = _number_of(value)
        if number <= 0:
            raise NotFinite("multipleOf that is not positive")
        if number == int(number):
            factor = math.lcm(factor, int(number))
        elif not (1 / number).is_integer() or math.frexp(number)[0] != 0.5:
            # Every integer is a multiple of 1/2, 1/4, …, also in binary arithmetic.
            raise NotFinite("an integer that is a multiple of a fraction")
    return factor


def _value_of(text: str) -> int | float:
    return float(text) if "." in text else int(text)
