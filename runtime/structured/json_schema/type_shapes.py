"""Cases of a conjunction as schemas of one type each.

Where a shape needs the schema of a part (a property, an item), it holds the conjunction of the
part's schemas; `normal_form` replaces the conjunction by a schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal
from operator import methodcaller
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from rootlace.runtime.structured.json_schema.cases import (
    FALSE,
    NEVER,
    TYPES,
    Atom,
    Case,
    Conjunction,
    Keys,
)
from rootlace.runtime.structured.json_schema.json_text import NotRegular, content_of, type_of
from rootlace.runtime.structured.json_schema.load import (
    EXCLUDED,
    OURS,
    OWN,
    CheckedSchema,
    Located,
    Residual,
    evaluated_items,
    notes_of,
)
from rootlace.runtime.structured.json_schema.pattern import (
    FORMATS,
    MAX_POSITIONS,
    NotTranslated,
    disputed,
    few_strings,
    for_llguidance,
    in_all,
    pattern_of_format,
    regex_of_pattern,
    written,
)
from rootlace.runtime.structured.json_schema.to_llguidance import nothing_matches, patterns_apart
from rootlace.runtime.structured.regex.syntax import (
    ALL,
    LAST,
    NOTHING,
    Chars,
    Literal,
    Regex,
    TooLarge,
    concat,
    either,
    repeat,
)

# Shape --------------------------------------------------------------------------------------------
#
# The parts of a normal form: schemas of one type each.


class Shape(msgspec.Struct, frozen=True):
    """Values of one type, or listed values.

    `schema` has the keywords of the normal form; each part (a property, an item) is a conjunction
    of schemas. `shown`: schemas for llguidance, if it does not accept `schema`. `lost`: the
    keywords that `shown` does not hold.
    """

    schema: dict[str, Any]
    shown: tuple[dict[str, Any], ...] = ()
    lost: frozenset[Residual] = frozenset()

    def for_mask(self) -> tuple[dict[str, Any], ...]:
        return self.shown or (self.schema,)


# Number shapes ------------------------------------------------------------------------------------
#
# A case of a conjunction as ranges of numbers.


MAX_EXCLUDED = 8
MAX_DIGITS = 40
MAX_INTEGER = 2**53
"""First integer hidden from llguidance 1.9, which reads such integers as floats. Some integers near
the ends of 64 bits end the process of llguidance."""
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

    def schema(self) -> dict[str, Any]:
        found = {}
        if self.low > -math.inf:
            found["exclusiveMinimum" if self.low_open else "minimum"] = self.low
        if self.high < math.inf:
            found["exclusiveMaximum" if self.high_open else "maximum"] = self.high
        return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(case: Case, excluded: list[Any], notes: set[Residual]) -> list[Shape]:
    """Return the shapes of a case's numbers; add the keywords not held to `notes`."""
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
                # The mask counts in decimals; most validators divide floats, and find 8.1 to be no
                # multiple of 0.1. An output must satisfy both.
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
    """Return the shape of a range; llguidance 1.9 gets weaker ranges where it would not hold the
    range exactly."""
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
    shown.append({**base, **_Range(low, low_open, high, high_open).schema(), **factors})
    return Shape({**base, **wanted.schema(), **factors}, tuple(shown), frozenset(lost))


def _is_far(bound: float, integer: bool) -> bool:
    """Return whether a mask cannot hold a bound, because llguidance reads bounds as floats or
    64-bit integers."""
    far = integer and abs(bound) >= MAX_INTEGER
    return abs(bound) < math.inf and (far or float(bound) != bound)


def _nudged(bound: float, sign: int) -> float:
    """Return the first number that a mask should allow above (`sign` 1) or below (-1) an exclusive
    bound. The number differs within 15 digits, as 1.00000000000000000001 reads as 1."""
    if abs(bound) >= 1e15:
        return math.nextafter(bound, sign * math.inf)
    exact = Decimal(repr(bound))
    step = Decimal(1).scaleb((exact.adjusted() if exact else 0) - 14)
    return float(exact + sign * step)


def _missed(bound: float) -> list[float]:
    """Return numbers that llguidance 1.9 wrongly takes to be beyond a bound: 1.5 beyond 1.55."""
    if abs(bound) == math.inf:
        return []
    text = format(Decimal(repr(bound)), "f")
    point = text.find(".")
    if point <= 0:
        return []
    return [float(text[:end]) for end in range(point + 2, min(len(text), MAX_DIGITS))]


# Shapes -------------------------------------------------------------------------------------------


LLGUIDANCE_FORMATS = frozenset(["duration", "email", "ipv4", "ipv6", "uuid", "uri"])
"""Formats that llguidance holds as exactly as our patterns, with more of their values. Of other
formats llguidance accepts too much (leap seconds, 29 February in any year) or knows nothing."""
MAX_SPLIT = 16
"""Most optional properties separated by cases, if the number of properties is bounded."""
MAX_COUNTED = 4
"""Bound of properties and a pattern's listed keys where the schema bounds their number."""
_LEAST = {"string": "minLength", "array": "minItems", "object": "minProperties"}
MAX_REFUSED = 1 << 16
"""Most characters of a pattern of forbidden keys."""
_ANYTHING = repeat(Chars(ALL), 0, None)
_NOT_PLAIN = concat(_ANYTHING, Chars(((0, 0x1F), (0x80, LAST))), _ANYTHING)
"""Texts with a character that is not plain ASCII; on all other texts the dialects agree."""

Leaf = tuple[Located, dict[str, Any]]


@dataclass
class Shapes:
    """Builder of shapes, for one schema.

    `empty(conjunction)` returns the place because of which nothing satisfies a conjunction, or "".
    `shapes_of(conjunction)` returns its shapes and the keywords that these lack. `satisfies` as in
    `Cases`.
    """

    checked: CheckedSchema
    satisfies: Callable[[Located, Any], bool]
    empty: Callable[[Conjunction], str]
    shapes_of: Callable[[Conjunction], tuple[list[Shape], set[Residual]]]
    reason: str = ""
    """Place in the schema because of which the last case has no shapes."""

    def child(self, parent: Located, path: str, schema: Any) -> Atom:
        return Atom(self.checked.child(parent, path, schema))

    def of(self, case: Case) -> tuple[list[Shape], set[Residual]]:
        """Return the shapes whose union is the case, and the keywords not held by the shapes."""
        notes = set(case.notes)
        if case.values is not None:
            return [_listed(case.values, case.source)], notes
        excluded = [
            (located, value) for located, leaf in case.leaves for value in leaf.get(EXCLUDED, ())
        ]
        shapes: list[Shape] = []
        for name in TYPES:
            if name in case.types:
                shapes += self._typed(name, case, excluded, notes)
        return shapes, notes

    def _typed(
        self, name: str, case: Case, excluded: list[tuple[Located, Any]], notes: set[Residual]
    ) -> list[Shape]:
        if name == "null":
            gone = any(value is None for _, value in excluded)
            return [] if gone else [Shape({"type": "null"})]
        if name == "boolean":
            taken = [value for _, value in excluded if isinstance(value, bool)]
            left = [value for value in (True, False) if value not in taken]
            schema: dict[str, Any] = {"type": "boolean"} if len(left) == 2 else {"enum": left}
            return [Shape(schema)] if left else []
        if name == "number":
            return numbers(case, [v for _, v in excluded if is_number(v)], notes)
        kind: Any = {"string": str, "array": list, "object": dict}[name]
        own: set[Residual] = set()
        leaves = case.leaves
        for located, value in excluded:
            if isinstance(value, kind) and not value:
                leaves += ((located, {_LEAST[name]: 1}),)
            elif isinstance(value, kind):
                own.add(Residual(located.pointer.removesuffix(OWN), "not"))
        if name == "string":
            found = self._strings(leaves)
        elif name == "array":
            found = self._arrays(leaves, own)
        else:
            found = self._objects(leaves, own)
        if found:
            notes |= own
        return found

    # ------------------------------------------------------------ strings

    def _strings(self, leaves: tuple[Leaf, ...]) -> list[Shape]:
        schema: dict[str, Any] = {"type": "string"}
        least = max((leaf.get("minLength", 0) for _, leaf in leaves), default=0)
        most = min((leaf.get("maxLength", math.inf) for _, leaf in leaves), default=math.inf)
        if least > most:
            return self._none(leaves, "minLength")
        if least:
            schema["minLength"] = int(least)
        if most < math.inf:
            schema["maxLength"] = int(most)
        shown, lost = dict(schema), set()
        for located, leaf in leaves:
            if "pattern" in leaf:
                _require(schema, "pattern", leaf["pattern"])
                if taken := for_llguidance(leaf["pattern"]):
                    for pattern in taken:
                        _require(shown, "pattern", pattern)
                elif nothing_matches({"type": "string", "pattern": leaf["pattern"]}):
                    return self._none(((located, leaf),), "pattern")
                else:
                    lost.add(Residual(f"{located.pointer}/pattern", "pattern"))
            if leaf.get("format") in FORMATS:
                name = leaf["format"]
                known = name in LLGUIDANCE_FORMATS
                for one in (schema, shown):
                    _require(
                        one, *(("format", name) if known else ("pattern", pattern_of_format(name)))
                    )
        if {"pattern", "format"} & shown.keys() and len(shown) > 2 and nothing_matches(shown):
            return self._none(leaves, "pattern", "format")
        return [Shape(schema, (shown,) if shown != schema else (), frozenset(lost))]

    # ------------------------------------------------------------ arrays

    def _arrays(self, leaves: tuple[Leaf, ...], notes: set[Residual]) -> list[Shape]:
        least = max((leaf.get("minItems", 0) for _, leaf in leaves), default=0)
        most = min((leaf.get("maxItems", math.inf) for _, leaf in leaves), default=math.inf)
        given = max((len(leaf.get("prefixItems", ())) for _, leaf in leaves), default=0)
        places: list[list[Atom]] = [[] for _ in range(given)]
        rest: list[Atom] = []
        contained: list[Leaf] = []
        for located, leaf in leaves:
            for index, place in enumerate(places):
                place += map(Atom, self.checked.members(located, index))
            if "items" in leaf:
                rest.append(self.child(located, "/items", leaf["items"]))
            if "contains" in leaf:
                contained.append((located, leaf))
        for located, leaf in leaves:
            if leaf.get("unevaluatedItems", True) is not True:
                self._unevaluated_items(located, leaf, places, rest, notes)
        length = len(places)
        for located, leaf in contained:
            wanted, at_most = leaf.get("minContains", 1), leaf.get("maxContains", math.inf)
            if leaf["contains"] is True or leaf["contains"] == {}:
                least, most = max(least, wanted), min(most, at_most)
                continue
            atom = self.child(located, "/contains", leaf["contains"])
            if wanted:
                least = max(least, wanted)
                if self.empty((atom,)):
                    return self._none(leaves, "contains")
            if wanted or at_most < math.inf:
                notes.add(Residual(f"{located.pointer}/contains", "contains"))
        for index, atoms in enumerate(places):
            if index < most and self.empty(tuple(atoms)):
                most = index
        if rest and most > length and self.empty(tuple(rest)):
            most = length
        if least > most:
            return self._none(leaves, "minItems")
        for located, leaf in leaves:
            if leaf.get("uniqueItems") is True and most > 1:
                notes.add(Residual(f"{located.pointer}/uniqueItems", "uniqueItems"))
        shape: dict[str, Any] = {"type": "array"}
        if places[: int(min(most, length))]:
            shape["prefixItems"] = [tuple(atoms) for atoms in places[: int(min(most, length))]]
        if rest and most > length:
            shape["items"] = tuple(rest)
        if least:
            shape["minItems"] = int(least)
        if most < math.inf:
            shape["maxItems"] = int(most)
        return [Shape(shape)]

    def _unevaluated_items(
        self,
        located: Located,
        leaf: dict[str, Any],
        places: list[list[Atom]],
        rest: list[Atom],
        notes: set[Residual],
    ) -> None:
        count, sure = evaluated_items(self.checked, located)
        atom = self.child(located, "/unevaluatedItems", leaf["unevaluatedItems"])
        if not sure:
            notes.add(Residual(f"{located.pointer}/unevaluatedItems", "unevaluatedItems"))
        if count is None:
            return
        while len(places) < count:
            places.append(list(rest))
        for index in range(count, len(places)):
            places[index].append(atom)
        rest.append(atom)

    # ------------------------------------------------------------ objects

    def _objects(self, leaves: tuple[Leaf, ...], notes: set[Residual]) -> list[Shape]:
        spec = _Object.of(self, leaves, notes)
        if spec is None:
            return []
        return [Shape(one.schema()) for one in self._split(spec, leaves, notes)]

    def _split(
        self, spec: _Object, leaves: tuple[Leaf, ...], notes: set[Residual]
    ) -> list[_Object]:
        """Split an object into objects whose number of properties llguidance can bound."""
        optional = [name for name in spec.optional if not self.empty(spec.properties[name])]
        needed = len(spec.required)
        least, most = spec.least, spec.most
        if not spec.more:
            if needed + len(optional) < least:
                return self._none(leaves, "minProperties")
            most = math.inf if needed + len(optional) <= most else most
        if most < max(least, needed):
            return self._none(leaves, "maxProperties")
        if least <= needed:
            least = 0
        spec = replace(spec, least=least, most=most)
        if not least and most == math.inf:
            return [spec]
        if not optional:
            if not spec.more:
                return [replace(spec, least=0)]
            if least - needed >= 2:  # a repeated key would count twice
                notes.update(notes_of(leaves, "minProperties"))
            return [spec]
        if most == needed:
            return [spec.only(optional, 0, math.inf)]
        if least == needed + len(optional) and not spec.more:
            return [replace(spec, required=(*spec.required, *optional), least=0, most=math.inf)]
        if len(optional) > MAX_SPLIT:
            notes.update(notes_of(leaves, "minProperties") + notes_of(leaves, "maxProperties"))
            return [replace(spec, least=0, most=math.inf)]
        found = []
        gone: list[str] = []
        for name in optional:  # the first of them that is there
            one = spec.without(gone)
            one = replace(one, required=(*spec.required, name))
            found += self._split(one, leaves, notes)
            gone.append(name)
            if len(found) > MAX_SPLIT:
                notes.update(notes_of(leaves, "minProperties") + notes_of(leaves, "maxProperties"))
                return [replace(spec, least=0, most=math.inf)]
        if not least or spec.more:
            found += self._split(spec.without(gone), leaves, notes)
        return found

    def names(
        self, leaves: tuple[Leaf, ...], notes: set[Residual]
    ) -> tuple[list[str], Regex | str] | None:
        """Return the keys that all `propertyNames` allow: listed keys, and the others as a tree (or
        as a pattern that only llguidance can read).

        None if any key is allowed, or if the allowed keys are unknown, which is noted.
        """
        names = [
            self.child(located, "/propertyNames", leaf["propertyNames"])
            for located, leaf in leaves
            if leaf.get("propertyNames", True) is not True
        ]
        if not names:
            return None
        first = names[0].located
        text = Located({"type": "string"}, first.resolver, OURS, f"{first.pointer}{OWN}text")
        shapes, lost = self.shapes_of((Atom(text), *names))
        notes |= lost
        listed: list[str] = []
        trees: list[Regex] = []
        for schema in (shape.schema for shape in shapes):
            if list(schema) == ["type"]:
                return None
            try:
                if list(schema) == ["enum"]:
                    listed += schema["enum"]
                else:
                    trees.append(content_of(schema, MAX_POSITIONS))
            except NotRegular:
                if len(shapes) == 1 and schema.keys() == {"type", "pattern"}:
                    for pattern in for_llguidance(schema["pattern"], one=True):
                        return [], pattern
                notes.update(notes_of(leaves, "propertyNames"))
                return None
        return listed, either(*trees)

    def _none(self, leaves: tuple[Leaf, ...], *keywords: str) -> list[Any]:
        for keyword in keywords:
            for located, leaf in leaves:
                if keyword in leaf:
                    self.reason = f"{located.pointer}/{keyword}"
                    return []
        self.reason = leaves[0][0].pointer if leaves else ""
        return []


class _Object(msgspec.Struct, frozen=True):
    properties: dict[str, Conjunction]
    required: tuple[str, ...]
    patterns: dict[str, Conjunction]
    additional: Conjunction
    more: bool  # keys other than those of `properties` are possible
    least: float
    most: float

    @property
    def optional(self) -> list[str]:
        return [name for name in self.properties if name not in self.required]

    def without(self, names: list[str]) -> _Object:
        properties = {n: FALSE if n in names else c for n, c in self.properties.items()}
        return replace(self, properties=properties)

    def only(self, gone: list[str], least: float, most: float) -> _Object:
        return replace(
            self.without(gone), patterns={}, additional=FALSE, more=False, least=least, most=most
        )

    def schema(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"type": "object"}
        if self.properties:
            shape["properties"] = self.properties
        if self.patterns:
            shape["patternProperties"] = self.patterns
        if self.additional:
            shape["additionalProperties"] = self.additional
        if self.required:
            shape["required"] = list(self.required)
        if self.least:
            shape["minProperties"] = int(self.least)
        if self.most < math.inf:
            shape["maxProperties"] = int(self.most)
        return shape

    @staticmethod
    def of(shapes: Shapes, leaves: tuple[Leaf, ...], notes: set[Residual]) -> _Object | None:
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        required: dict[str, None] = {}
        for _, leaf in leaves:
            names |= dict.fromkeys(leaf.get("properties", {}))
            patterns |= dict.fromkeys(leaf.get("patternProperties", {}))
            required |= dict.fromkeys(leaf.get("required", ()))
        allowed = shapes.names(leaves, notes)
        names |= dict.fromkeys(allowed[0] if allowed else ()) | required
        ends = [
            Keys(shapes.checked, shapes.satisfies, located, leaf, notes) for located, leaf in leaves
        ]
        for keys in ends:
            names |= dict.fromkeys(sorted(keys.known_names or ()))
            patterns |= dict.fromkeys(keys.known_patterns)

        def of_all(atoms_of: Callable[[Keys], list[Atom]]) -> Conjunction:
            return tuple(dict.fromkeys(atom for keys in ends for atom in atoms_of(keys)))

        least = max((leaf.get("minProperties", 0) for _, leaf in leaves), default=0)
        most = min((leaf.get("maxProperties", math.inf) for _, leaf in leaves), default=math.inf)
        properties = {name: of_all(methodcaller("of_name", name)) for name in names}
        additional = of_all(Keys.others)
        found = {one: of_all(methodcaller("of_pattern", one)) for one in patterns}
        held: dict[str, Conjunction] = {}
        if allowed is not None:
            try:
                held = _held(found, additional, allowed[1], names)
                found, additional = {}, FALSE
            except (NotTranslated, TooLarge):
                notes.update(notes_of(leaves, "propertyNames"))
        if shapes.empty(additional):  # then they need not be separated from other keys
            found = {pattern: part for pattern, part in found.items() if not shapes.empty(part)}
            # Each of few keys comes once, so no comma may follow the last one.
            most_keys = MAX_COUNTED - len(properties) if least or most < math.inf else math.inf
            for few in [pattern for pattern in found if 0 < len(few_strings(pattern)) <= most_keys]:
                del found[few]
                for name in few_strings(few):
                    properties[name] = of_all(methodcaller("of_name", name))
        apart = _undisputed(found) if len(found) > 1 or not shapes.empty(additional) else {}
        for pattern in [] if apart else list(found):
            part = found.pop(pattern)
            if taken := for_llguidance(pattern, one=True):
                found[taken[0]] = part
            else:
                # Matching keys may fall under `additionalProperties` only if that is weaker.
                notes.update(notes_of(leaves, "patternProperties"))
                additional = ()
        found = apart or found
        found |= {pattern: part for pattern, part in held.items() if not shapes.empty(part)}
        if len(found) > 1 and not patterns_apart(found):
            notes.update(notes_of(leaves, "patternProperties"))
            found = {"|".join(f"(?:{pattern})" for pattern in found): _any(found)}
        for name in required:
            if place := shapes.empty(properties[name]):
                if NEVER in properties[name]:
                    shapes._none(leaves, "propertyNames")
                else:
                    shapes.reason = place
                return None
        more = not shapes.empty(additional) or any(not shapes.empty(c) for c in found.values())
        return _Object(properties, tuple(required), found, additional, more, least, most)


def _undisputed(found: dict[str, Conjunction]) -> dict[str, Conjunction]:
    """Return patterns of the keys on which both dialects agree, and one pattern, mapped to false,
    of the other keys.

    A key on which the dialects disagree is refused, since a validator may use either. Returns {} if
    the dialects agree everywhere, or if that is unknown.
    """
    try:
        doubtful = either(*map(disputed, found))
        if doubtful == NOTHING:
            return {}
        trees = {pattern: regex_of_pattern(pattern) for pattern in found}
        for but in (doubtful, _NOT_PLAIN):
            # llguidance cannot prove that large patterns are disjoint.
            refused = written(but)
            if but is _NOT_PLAIN or len(refused) <= MAX_REFUSED:
                kept = {written(in_all([trees[p]], but=[but])): part for p, part in found.items()}
                if len(kept) == len(found) and patterns_apart([*kept, refused]):
                    return {**kept, refused: FALSE}
    except (NotTranslated, TooLarge):
        pass
    return {}


def _held(
    found: dict[str, Conjunction],
    additional: Conjunction,
    allowed: Regex | str,
    named: Collection[str],
) -> dict[str, Conjunction]:
    """Return the patterns of `allowed` keys, and the schemas of their values: a pattern's schemas
    from `found`; `additional` for keys of no pattern that are not `named`. Raises NotTranslated or
    TooLarge."""
    if isinstance(allowed, str):
        if found or (additional and named):
            raise NotTranslated(allowed)
        return {allowed: additional}
    parts = [(in_all([allowed, regex_of_pattern(p)]), part) for p, part in found.items()]
    but = [regex_of_pattern(pattern, wide=True) for pattern in found]
    but += map(Literal, named if additional else ())
    parts.append((in_all([allowed], but=but) if but else allowed, additional))
    return {written(tree): part for tree, part in parts if tree != NOTHING}


def _require(schema: dict[str, Any], keyword: str, value: str) -> None:
    """Add a keyword, in `allOf` if the schema has another value of the keyword already."""
    if schema.setdefault(keyword, value) != value:
        schema.setdefault("allOf", []).append({"type": "string", keyword: value})


def _listed(values: tuple[Any, ...], source: Residual | None) -> Shape:
    """Given values. Of large integers a mask holds no more than the type."""
    held = [value for value in values if _is_held(value)]
    if len(held) == len(values):
        return Shape({"enum": held})
    kinds = sorted({type_of(value) for value in values if not _is_held(value)})
    shown: list[dict[str, Any]] = [{"enum": held}] if held else []
    shown += [{"type": kind} for kind in kinds]
    return Shape({"enum": list(values)}, tuple(shown), frozenset({source} if source else ()))


def _is_held(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_held, value))
    if isinstance(value, dict):
        return all(map(_is_held, value.values()))
    return not isinstance(value, int) or abs(value) < MAX_INTEGER


def _any(patterns: dict[str, Conjunction]) -> Conjunction:
    """Return the condition on the value of a key that matches some of the patterns: at least one of
    their schemas. Negated schemas are left out, which weakens the condition."""
    options, pointer = [], ""
    resolver = None
    for conjunction in patterns.values():
        options.append(
            {"allOf": [a.located.schema for a in conjunction if not a.negated] or [True]}
        )
        for atom in conjunction:
            pointer += f"|{atom.located.pointer}"
            resolver = resolver or atom.located.resolver
    if resolver is None:  # true and false only
        return () if {"allOf": [True]} in options else FALSE
    return (Atom(Located({"anyOf": options}, resolver, OURS, f"#{OWN}any{pointer}")),)
