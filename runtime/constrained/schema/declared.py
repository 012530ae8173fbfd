"""The declared part of a schema that is no finite automaton: where llguidance stands in its texts.

A mask schema (`relax`) becomes a regex tree over the texts that llguidance writes for it, except
that what is not declared, or not regular, is a *mark*: a text that no JSON has, which stands for
"anything that may be here". Marks of different places differ. So the automaton of the tree tells
all beginnings apart from which llguidance could go on differently, as long as they are declared:
texts that lead to one of its states have the same marks behind them at the same places, in the
same surroundings.

For that, an undeclared property is marked at every place of its key up to which the key might
still become a declared one: behind `{"name` the mark of the key `name…` says that it need not.

The trees are in llguidance's spelling, with all it allows: `json_text` writes fewer numbers and
more escapes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rootlace.runtime.constrained.automaton.char_sets import ALL, intersection
from rootlace.runtime.constrained.automaton.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Regex,
    Repeat,
)
from rootlace.runtime.constrained.schema import numeric_range
from rootlace.runtime.constrained.schema.numeric_range import Bound
from rootlace.runtime.constrained.schema.pattern import NotTranslated, regex_of_pattern
from rootlace.runtime.constrained.schema.trees import (
    NOTHING,
    chars,
    concat,
    either,
    one_of,
    optional,
    repeat,
    size,
    with_length,
)

MARK = "\0"
"""Marks begin with it. JSON has it nowhere."""
MAX_SIZE = 8192
"""Of the tree, as in `finite`."""
MAX_VALUES = 2000
"""Schemas that are written, each as often as it is referred to."""
_MAX_DEPTH = 32

_DIGITS = Chars(((0x30, 0x39),))
_LEADING = Chars(((0x31, 0x39),))
_HEX = one_of("0123456789abcdefABCDEF")
_PLAIN = intersection(ALL, ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0x10FFFF)))
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_EVERYTHING = {"string", "number", "boolean", "null", "array", "object"}
_ESCAPED_PUNCTUATION = re.compile(r"\\[-./+*?()\[\]{}^$|]")


class NotDeclared(Exception):
    """The value is not regular, or not modelled."""


def declared_part(schema: dict[str, Any], max_size: int = MAX_SIZE) -> Regex | None:
    """The declared part of a compact mask schema, or None where there is none to speak of."""
    try:
        tree = _Writer(schema).value(schema, 0, frozenset())
    except (NotDeclared, RecursionError):
        return None
    return None if tree == NOTHING or size(tree, max_size) > max_size else tree


class _Writer:
    """Turns mask schemas into trees, one value at a time; of one root."""

    def __init__(self, root: dict[str, Any]) -> None:
        options = root.get("x-guidance", {})
        self._spelling = _Spelling(options.get("json_allowed_escapes", 'nrbtf\\"u'))
        self._known = set(options) <= {"json_allowed_escapes"}
        self._root = root
        self._marks = itertools.count()
        self._values = 0

    def value(self, schema: Any, depth: int, refs: frozenset[str]) -> Regex:
        """Raises NotDeclared where the whole value is a mark."""
        self._values += 1
        if self._values > MAX_VALUES or depth > _MAX_DEPTH or not self._known:
            raise NotDeclared
        while isinstance(schema, dict) and "$ref" in schema:
            ref = schema["$ref"]
            if ref in refs or not ref.startswith("#/$defs/"):
                raise NotDeclared
            refs |= {ref}
            schema = self._root.get("$defs", {}).get(ref.removeprefix("#/$defs/"))
        if schema is False:
            return NOTHING
        if not isinstance(schema, dict) or not schema:
            raise NotDeclared
        if "anyOf" in schema:
            if len(schema) > 1:
                raise NotDeclared
            options = schema["anyOf"]
        else:
            options = [schema]
        return self._either([one for option in options for one in _typed(option)], depth, refs)

    def _part(self, schema: Any, depth: int, refs: frozenset[str]) -> Regex:
        """A value inside: a mark where it is not declared."""
        try:
            tree = self.value(schema, depth, refs)
        except NotDeclared:
            return self._mark()
        return self._mark() if size(tree, MAX_SIZE) > MAX_SIZE else tree

    def _mark(self) -> Regex:
        return Literal(f"{MARK}{next(self._marks)};")

    def _either(self, options: list[dict[str, Any]], depth: int, refs: frozenset[str]) -> Regex:
        """One of some schemas of one type, or of values. One that is not declared is marked if
        its first byte tells it from all others: then nothing of it is in their texts."""
        trees: list[Regex] = []
        marked: list[str] = []
        for option in options:
            try:
                trees.append(self._option(option, depth, refs))
            except NotDeclared:
                marked.append(_kind(option))
        if not marked:
            return either(*trees)
        kinds = [_kind(option) for option in options]
        if not trees or any(kinds.count(kind) > 1 for kind in marked) or "" in kinds:
            raise NotDeclared
        return either(*trees, self._mark())

    def _option(self, schema: dict[str, Any], depth: int, refs: frozenset[str]) -> Regex:
        if "enum" in schema:
            if len(schema) > 1:
                raise NotDeclared
            return either(*(Literal(_text(value)) for value in schema["enum"]))
        said = schema.keys() - {"type"}
        match schema.get("type"):
            case "null" if not said:
                return Literal("null")
            case "boolean" if not said:
                return either(Literal("true"), Literal("false"))
            case "string" if said <= {"minLength", "maxLength", "pattern"}:
                return self._spelling.string(schema)
            case "integer" if said <= _BOUNDS:
                return _integers(*_range(schema))
            case "number" if not said:
                return _number()
            case "array" if said <= {"items", "prefixItems", "minItems", "maxItems"}:
                return self._array(schema, depth + 1, refs)
            case "object" if said <= _OF_OBJECTS:
                return self._object(schema, depth + 1, refs)
        raise NotDeclared

    # ------------------------------------------------------------ arrays and objects

    def _array(self, schema: dict[str, Any], depth: int, refs: frozenset[str]) -> Regex:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = [self._part(item, depth, refs) for item in schema.get("prefixItems", ())]
        rest: Regex = NOTHING
        if most is None or most > len(items):
            rest = self._part(schema.get("items", {}), depth, refs)
        if NOTHING in items or max(least, most or 0) > MAX_SIZE:
            raise NotDeclared
        if rest == NOTHING:
            most = len(items) if most is None else min(most, len(items))
        if most == 0 or (most is not None and least > most):
            return NOTHING if least else Literal("[]")
        comma = Literal(",")
        count = len(items)
        top = None if most is None else most - max(count, 1)
        if count:
            body = repeat(concat(comma, rest), max(0, least - count), top)
        else:
            body = concat(rest, repeat(concat(comma, rest), max(0, least - 1), top))
        for index in range(count - 1, -1, -1):
            last = index + 1 == count
            behind = body if last else concat(comma, body)
            # `least` items at least: what is behind them may be missing.
            if not last and index + 1 >= least:
                behind = optional(behind)
            body = concat(items[index], behind)
        full = concat(Literal("["), body, Literal("]"))
        return full if least else either(Literal("[]"), full)

    def _object(self, schema: dict[str, Any], depth: int, refs: frozenset[str]) -> Regex:
        properties: dict[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if not required <= properties.keys():
            raise NotDeclared
        pairs: list[tuple[Regex, bool]] = []
        for name, inner in properties.items():
            held = self._part(inner, depth, refs)
            if held != NOTHING:
                pairs.append((concat(Literal(f"{_text(name)}:"), held), name in required))
            elif name in required:
                return NOTHING
        if schema.get("additionalProperties", True) is not False or "patternProperties" in schema:
            pairs.append((self._undeclared(properties), False))
        if not pairs:
            return Literal("{}")
        full = concat(Literal("{"), joined(pairs, Literal(",")), Literal("}"))
        return full if any(must for _, must in pairs) else either(Literal("{}"), full)

    def _undeclared(self, names: Iterable[str]) -> Regex:
        """Properties that are not declared, from the first one on: their key up to where it can
        become none of `names` any more, every place of it marked."""
        return self._keys([_text(name)[1:-1] for name in names], '"')

    def _keys(self, texts: list[str], begun: str) -> Regex:
        """The `texts` all of which go on behind `begun`, letter by letter."""
        following: dict[str, list[str]] = {}
        for text in texts:
            if text:
                following.setdefault(text[0], []).append(text[1:])
        inner = [self._keys(rest, letter) for letter, rest in following.items()]
        return concat(Literal(begun), either(self._mark(), *inner))


def joined(pairs: Sequence[tuple[Regex, bool]], comma: Regex) -> Regex:
    """One or more of `pairs` in this order, those that must be there among them, separated by
    commas; each is written once where some pair must, log n times where all may be left out."""
    at = next((i for i, (_, must) in enumerate(pairs) if must), None)
    if at is not None:
        before = [optional(concat(pair, comma)) for pair, _ in pairs[:at]]
        return concat(*before, pairs[at][0], _following(pairs[at + 1 :], comma))
    if len(pairs) == 1:
        return pairs[0][0]
    middle = (len(pairs) + 1) // 2
    first = concat(joined(pairs[:middle], comma), _following(pairs[middle:], comma))
    return either(first, joined(pairs[middle:], comma))


def _following(pairs: Sequence[tuple[Regex, bool]], comma: Regex) -> Regex:
    """`pairs` after something, each with its comma."""
    texts = ((concat(comma, pair), must) for pair, must in pairs)
    return concat(*(text if must else optional(text) for text, must in texts))


def _typed(schema: Any) -> list[dict[str, Any]]:
    """A schema as one per type that it names."""
    if not isinstance(schema, dict):
        raise NotDeclared
    names = schema.get("type")
    if not isinstance(names, list):
        return [schema]
    return [{**schema, "type": name} for name in names]


def _kind(schema: dict[str, Any]) -> str:
    """What the first byte of the value tells; empty if it does not."""
    name = schema.get("type", "")
    return "number" if name == "integer" else str(name)


# ---------------------------------------------------------------- strings


class _Spelling:
    """How strings are written: which escapes there are besides those that must be."""

    def __init__(self, escapes: str) -> None:
        """`escapes`: the letters that may follow a backslash."""
        self._escapes = set(escapes)
        self._any = self._character(ALL)

    def string(self, schema: dict[str, Any]) -> Regex:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        pattern = schema.get("pattern")
        if max(least, most or 0) > MAX_SIZE:
            raise NotDeclared
        content = repeat(Chars(ALL), least, most)
        if pattern is not None:
            # What dialects read differently is not the same as what llguidance reads.
            plain = _ESCAPED_PUNCTUATION.sub("", pattern)
            if "\\" in plain or "." in plain or "(?" in plain:
                raise NotDeclared
            try:
                fitted = with_length(regex_of_pattern(pattern), least, most)
            except NotTranslated:
                raise NotDeclared from None
            if fitted is None or fitted == NOTHING:
                raise NotDeclared
            content = fitted
        return concat(Literal('"'), self._spelled(content), Literal('"'))

    def _spelled(self, content: Regex) -> Regex:
        match content:
            case Literal(text):
                return concat(*(self._spelled(Chars(((ord(c), ord(c)),))) for c in text))
            case Chars(ranges):
                return self._any if ranges == ALL else self._character(ranges)
            case Concat(parts):
                return concat(*(self._spelled(part) for part in parts))
            case Either(options):
                return either(*(self._spelled(option) for option in options))
            case Repeat(item, least, most):
                return repeat(self._spelled(item), least, most)
            case _:
                raise NotDeclared

    def _character(self, ranges: tuple[tuple[int, int], ...]) -> Regex:
        """One character of `ranges` in all its spellings."""
        held = [chr(c) for c in (*range(0x20), 0x22, 0x5C, 0x7F) if _holds(ranges, c)]
        letters = {_SHORT[c] for c in held if c in _SHORT} & self._escapes
        plain = chars(intersection(ranges, _PLAIN))
        if isinstance(plain, Chars) and len(plain.ranges) == 1 and not held:
            low, high = plain.ranges[0]
            if low == high:
                return Literal(chr(low))
        options = [one_of("".join(letters))] if letters else []
        if "u" in self._escapes:
            for high in (0, 1):
                digits = "".join(
                    f"{ord(c) & 15:x}{ord(c) & 15:X}" for c in held if ord(c) >> 4 == high
                )
                if digits:
                    options.append(concat(Literal(f"u00{high}"), one_of(digits)))
            if "\x7f" in held:
                options.append(concat(Literal("u007"), one_of("fF")))
        if not options:
            return plain
        return either(plain, concat(Literal("\\"), either(*options)))


def _holds(ranges: tuple[tuple[int, int], ...], code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _text(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except ValueError:
        raise NotDeclared from None
    if MARK in text or "\x7f" in text:
        raise NotDeclared
    return text


# ---------------------------------------------------------------- numbers

_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties"}


def _range(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema or "exclusiveMaximum" in schema:
        raise NotDeclared
    return numeric_range.tightest_integers(
        None if low is None else Bound(low), None if high is None else Bound(high)
    )


def _integers(low: int | None, high: int | None) -> Regex:
    """Zero may have a sign where a negative number may."""
    if low is not None and high is not None and low > high:
        return NOTHING
    options: list[Regex] = []
    if high is None or high >= 0:
        options.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        top = None if low is None else -low
        options.append(concat(Literal("-"), _naturals(max(-high, 0) if high else 0, top)))
    return either(*options)


def _naturals(low: int, high: int | None) -> Regex:
    if high is not None:
        return numeric_range.integers(low, high)
    if low == 0:
        return either(Literal("0"), concat(_LEADING, repeat(_DIGITS, 0, None)))
    places = len(str(low))
    longer = concat(_LEADING, repeat(_DIGITS, places, None))
    return either(numeric_range.integers(low, 10**places - 1), longer)


def _number() -> Regex:
    fraction = concat(Literal("."), repeat(_DIGITS, 1, None))
    exponent = concat(one_of("eE"), optional(one_of("+-")), repeat(_DIGITS, 1, None))
    sign = optional(Literal("-"))
    return concat(sign, _naturals(0, None), optional(fraction), optional(exponent))
