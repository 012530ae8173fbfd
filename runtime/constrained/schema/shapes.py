"""A case of a conjunction as schemas of one type each, in keywords that llguidance knows.

Where a shape needs the schema of a part (a property, an item), it holds the conjunction of what
applies to the part; `relax` puts a schema in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rootlace.runtime.constrained.schema.check import CheckedSchema, Located
from rootlace.runtime.constrained.schema.conjunction import (
    EXCLUDED,
    TYPES,
    Atom,
    Case,
    Conjunction,
)
from rootlace.runtime.constrained.schema.dialect import NEWEST
from rootlace.runtime.constrained.schema.evaluated import evaluated_items, evaluated_keys
from rootlace.runtime.constrained.schema.residual import Residual
from rootlace.runtime.constrained.schema.search import searcher

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""The formats that a mask holds; others say nothing, as the specification has it."""
MAX_EXCLUDED = 8
MAX_SPLIT = 16
"""Of so many optional properties the cases are told apart, where their number is bounded."""

Shape = dict[str, Any]
Leaf = tuple[Located, dict[str, Any]]


class Shapes:
    """Builds shapes, for one schema. `empty(conjunction)` says that nothing satisfies it;
    `child(parent, path, schema)` is an atom; `satisfies` as in `Cases`; `takes(pattern)` says
    whether a mask can hold it, `apart(patterns)` whether no key matches two of them."""

    def __init__(
        self,
        empty: Callable[[Conjunction], bool],
        child: Callable[[Located, str, Any], Atom],
        satisfies: Callable[[Located, Any], bool],
        takes: Callable[[str], bool],
        apart: Callable[[tuple[str, ...]], bool],
        checked: CheckedSchema,
    ) -> None:
        self._empty = empty
        self._child = child
        self._satisfies = satisfies
        self._takes = takes
        self._apart = apart
        self._checked = checked
        self.reason = ""
        """Where it showed that the case asked for last has no shapes."""

    def of(self, case: Case) -> tuple[list[Shape], set[Residual]]:
        """The shapes whose union is the case, and which keywords they do not hold."""
        notes = set(case.notes)
        if case.values is not None:
            return [{"enum": list(case.values)}], notes
        excluded = [
            (located, value) for located, leaf in case.leaves for value in leaf.get(EXCLUDED, ())
        ]
        shapes: list[Shape] = []
        for name in TYPES:
            if name in case.types:
                shapes += self._typed(name, case, excluded, notes)
        return shapes, notes

    def _typed(
        self,
        name: str,
        case: Case,
        excluded: list[tuple[Located, Any]],
        notes: set[Residual],
    ) -> list[Shape]:
        if name == "null":
            return [] if any(value is None for _, value in excluded) else [{"type": "null"}]
        if name == "boolean":
            gone = [value for _, value in excluded if isinstance(value, bool)]
            left = [value for value in (True, False) if value not in gone]
            return [{"type": "boolean"}] if len(left) == 2 else [{"enum": [v]} for v in left]
        if name == "number":
            return _numbers(case, [v for _, v in excluded if _is_number(v)], notes)
        kind: Any = {"string": str, "array": list, "object": dict}[name]
        own = set()
        for located, value in excluded:
            if isinstance(value, kind):
                own.add(Residual(located.pointer.replace("/const!", "/const"), "not"))
        if name == "string":
            found = self._strings(case.leaves, own)
        elif name == "array":
            found = self._arrays(case.leaves, own)
        else:
            found = self._objects(case.leaves, own)
        if found:
            notes |= own
        return found

    # ------------------------------------------------------------ strings

    def _strings(self, leaves: tuple[Leaf, ...], notes: set[Residual]) -> list[Shape]:
        shape: Shape = {"type": "string"}
        least = max((leaf.get("minLength", 0) for _, leaf in leaves), default=0)
        most = min((leaf.get("maxLength", math.inf) for _, leaf in leaves), default=math.inf)
        if least > most:
            return self._none(leaves, "minLength")
        if least:
            shape["minLength"] = int(least)
        if most < math.inf:
            shape["maxLength"] = int(most)
        more: list[Shape] = []
        for located, leaf in leaves:
            if "pattern" in leaf:
                if not self._takes(leaf["pattern"]):
                    notes.add(Residual(f"{located.pointer}/pattern", "pattern"))
                elif "pattern" not in shape:
                    shape["pattern"] = leaf["pattern"]
                elif shape["pattern"] != leaf["pattern"]:
                    more.append({"type": "string", "pattern": leaf["pattern"]})
            if leaf.get("format") in FORMATS:
                if "format" not in shape:
                    shape["format"] = leaf["format"]
                elif shape["format"] != leaf["format"]:
                    more.append({"type": "string", "format": leaf["format"]})
        if more:
            shape["allOf"] = more
        return [shape]

    # ------------------------------------------------------------ arrays

    def _arrays(self, leaves: tuple[Leaf, ...], notes: set[Residual]) -> list[Shape]:
        least = max((leaf.get("minItems", 0) for _, leaf in leaves), default=0)
        most = min((leaf.get("maxItems", math.inf) for _, leaf in leaves), default=math.inf)
        length = max((len(leaf.get("prefixItems", ())) for _, leaf in leaves), default=0)
        places: list[list[Atom]] = [[] for _ in range(length)]
        rest: list[Atom] = []
        contained: list[tuple[Located, dict[str, Any]]] = []
        for located, leaf in leaves:
            prefix = leaf.get("prefixItems", ())
            for index in range(length):
                if index < len(prefix):
                    atom = self._child(located, f"/prefixItems/{index}", prefix[index])
                    places[index].append(atom)
                elif "items" in leaf:
                    places[index].append(self._child(located, "/items", leaf["items"]))
            if "items" in leaf:
                rest.append(self._child(located, "/items", leaf["items"]))
            if "contains" in leaf:
                contained.append((located, leaf))
        for located, leaf in leaves:
            if leaf.get("unevaluatedItems", True) is not True:
                self._unevaluated_items(located, leaf, places, rest, notes)
        for located, leaf in contained:
            wanted, at_most = leaf.get("minContains", 1), leaf.get("maxContains", math.inf)
            if leaf["contains"] is True or leaf["contains"] == {}:
                least, most = max(least, wanted), min(most, at_most)
                continue
            atom = self._child(located, "/contains", leaf["contains"])
            if wanted:
                least = max(least, wanted)
                if self._empty((atom,)):
                    return self._none(leaves, "contains")
            if wanted or at_most < math.inf:
                notes.add(Residual(f"{located.pointer}/contains", "contains"))
        for index, atoms in enumerate(places):
            if index < most and self._empty(tuple(atoms)):
                most = index
        if rest and most > length and self._empty(tuple(rest)):
            most = length
        if least > most:
            return self._none(leaves, "minItems")
        for located, leaf in leaves:
            if leaf.get("uniqueItems") is True and most > 1:
                notes.add(Residual(f"{located.pointer}/uniqueItems", "uniqueItems"))
        shape: Shape = {"type": "array"}
        if places[: int(min(most, length))]:
            shape["prefixItems"] = [tuple(atoms) for atoms in places[: int(min(most, length))]]
        if rest and most > length:
            shape["items"] = tuple(rest)
        if least:
            shape["minItems"] = int(least)
        if most < math.inf:
            shape["maxItems"] = int(most)
        return [shape]

    def _unevaluated_items(
        self,
        located: Located,
        leaf: dict[str, Any],
        places: list[list[Atom]],
        rest: list[Atom],
        notes: set[Residual],
    ) -> None:
        count, sure = evaluated_items(self._checked, located)
        atom = self._child(located, "/unevaluatedItems", leaf["unevaluatedItems"])
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
        return [] if spec is None else [one.shape() for one in self._split(spec, leaves, notes)]

    def _split(
        self, spec: _Object, leaves: tuple[Leaf, ...], notes: set[Residual]
    ) -> list[_Object]:
        """Into objects whose number of properties llguidance can bound."""
        optional = [name for name in spec.optional if not self._empty(spec.properties[name])]
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
            if least - needed >= 2:  # a key that comes twice would be counted twice
                notes.update(_notes(leaves, "minProperties"))
            return [spec]
        if most == needed:
            return [spec.only(optional, 0, math.inf)]
        if least == needed + len(optional) and not spec.more:
            return [replace(spec, required=(*spec.required, *optional), least=0, most=math.inf)]
        if len(optional) > MAX_SPLIT:
            notes.update(_notes(leaves, "minProperties") + _notes(leaves, "maxProperties"))
            return [replace(spec, least=0, most=math.inf)]
        found = []
        gone: list[str] = []
        for name in optional:  # the first of them that is there
            one = spec.without(gone)
            one = replace(one, required=(*spec.required, name))
            found += self._split(one, leaves, notes)
            gone.append(name)
            if len(found) > MAX_SPLIT:
                notes.update(_notes(leaves, "minProperties") + _notes(leaves, "maxProperties"))
                return [replace(spec, least=0, most=math.inf)]
        if not least or spec.more:
            found += self._split(spec.without(gone), leaves, notes)
        return found

    def _none(self, leaves: tuple[Leaf, ...], keyword: str) -> list[Any]:
        for located, leaf in leaves:
            if keyword in leaf:
                self.reason = f"{located.pointer}/{keyword}"
                return []
        self.reason = leaves[0][0].pointer if leaves else ""
        return []


@dataclass(frozen=True)
class _Object:
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
        kept = {n: FALSE if n in names else c for n, c in self.properties.items()}
        return replace(self, properties=kept)

    def only(self, gone: list[str], least: float, most: float) -> _Object:
        return replace(
            self.without(gone), patterns={}, additional=FALSE, more=False, least=least, most=most
        )

    def shape(self) -> Shape:
        shape: Shape = {"type": "object"}
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
        patterns: dict[str, list[Atom]] = {}
        required: dict[str, None] = {}
        for _, leaf in leaves:
            names |= dict.fromkeys(leaf.get("properties", {}))
            patterns |= {pattern: [] for pattern in leaf.get("patternProperties", {})}
            required |= dict.fromkeys(leaf.get("required", ()))
        for _located, leaf in leaves:
            listed = _listed_keys(leaf.get("propertyNames"))
            names |= dict.fromkeys(listed or ())
        names |= required
        ends = [_Keys(shapes, located, leaf, notes) for located, leaf in leaves]
        for keys in ends:
            names |= dict.fromkeys(sorted(keys.known_names))
            patterns |= {pattern: [] for pattern in keys.known_patterns}
        properties = {}
        for name in names:
            atoms = [atom for keys in ends for atom in keys.of_name(name)]
            properties[name] = tuple(dict.fromkeys(atoms))
        additional = tuple(dict.fromkeys(a for keys in ends for a in keys.others()))
        for pattern in patterns:
            for keys in ends:
                patterns[pattern] += keys.of_pattern(pattern)
        found = {pattern: tuple(dict.fromkeys(atoms)) for pattern, atoms in patterns.items()}
        for keys in ends:
            wanted = keys.name_pattern()
            if wanted is None:
                continue
            if found or not shapes._takes(wanted):
                notes.add(Residual(f"{keys.pointer}/propertyNames", "propertyNames"))
            else:
                found, additional = {wanted: additional}, FALSE
        for pattern in list(found):
            if not shapes._takes(pattern):
                # Keys that match may be had from `additionalProperties` only if that is weaker.
                notes.update(_notes(leaves, "patternProperties"))
                del found[pattern]
                additional = ()
        if len(found) > 1 and not shapes._apart(tuple(found)):
            notes.update(_notes(leaves, "patternProperties"))
            found = {"|".join(f"(?:{pattern})" for pattern in found): _any(found)}
        for name in required:
            if shapes._empty(properties[name]):
                atoms = properties[name]
                shapes.reason = atoms[0].located.pointer if atoms else ""
                return None
        more = not shapes._empty(additional) or any(not shapes._empty(c) for c in found.values())
        return _Object(
            properties,
            tuple(required),
            found,
            additional,
            more,
            max((leaf.get("minProperties", 0) for _, leaf in leaves), default=0),
            min((leaf.get("maxProperties", math.inf) for _, leaf in leaves), default=math.inf),
        )


class _Keys:
    """What one schema says of the values of keys."""

    def __init__(
        self, shapes: Shapes, located: Located, leaf: dict[str, Any], notes: set[Residual]
    ) -> None:
        self._shapes = shapes
        self._located = located
        self._leaf = leaf
        self._notes = notes
        self.pointer = located.pointer
        self._patterns: dict[str, Any] = leaf.get("patternProperties", {})
        self._unevaluated = leaf.get("unevaluatedProperties", True)
        self._names: set[str] | None = set()
        self._known: list[str] = []
        if self._unevaluated is not True:
            self._names, self._known, sure = evaluated_keys(shapes._checked, located)
            if not sure:
                self._note("unevaluatedProperties")

    @property
    def known_names(self) -> set[str]:
        return self._names or set()

    @property
    def known_patterns(self) -> list[str]:
        return self._known

    def _note(self, keyword: str) -> None:
        self._notes.add(Residual(f"{self.pointer}/{keyword}", keyword))

    def _atom(self, keyword: str, *path: str) -> Atom:
        value = self._leaf[keyword]
        for part in path:
            value = value[part]
        return self._shapes._child(self._located, "/".join(("", keyword, *path)), value)

    def of_name(self, name: str) -> list[Atom]:
        atoms = []
        if name in self._leaf.get("properties", {}):
            atoms.append(self._atom("properties", name))
        atoms += [self._atom("patternProperties", p) for p in self._patterns if searcher(p)(name)]
        if not atoms and "additionalProperties" in self._leaf:
            atoms.append(self._atom("additionalProperties"))
        if "propertyNames" in self._leaf:
            names = self._atom("propertyNames").located
            if not self._shapes._satisfies(names, name):
                atoms.append(_NEVER)
        if self._unevaluated is not True and self._names is not None:
            if name not in self._names and not any(searcher(p)(name) for p in self._known):
                atoms.append(self._atom("unevaluatedProperties"))
        return atoms

    def others(self) -> list[Atom]:
        """Of keys that no schema of the case names and no pattern matches."""
        atoms = []
        if "additionalProperties" in self._leaf:
            atoms.append(self._atom("additionalProperties"))
        if self._unevaluated is not True and self._names is not None:
            atoms.append(self._atom("unevaluatedProperties"))
        names = self._leaf.get("propertyNames")
        if _no_others(names):
            atoms.append(_NEVER)
        return atoms

    def of_pattern(self, pattern: str) -> list[Atom]:
        atoms = []
        if pattern in self._patterns:
            atoms.append(self._atom("patternProperties", pattern))
        elif "additionalProperties" in self._leaf:
            if self._patterns:
                self._note("additionalProperties")
            else:
                atoms.append(self._atom("additionalProperties"))
        if self._unevaluated is not True and self._names is not None:
            if pattern not in self._known:
                self._note("unevaluatedProperties")
        names = self._leaf.get("propertyNames")
        if _no_others(names):
            atoms.append(_NEVER)
        return atoms

    def name_pattern(self) -> str | None:
        """A pattern of the keys that `propertyNames` allows; None if it says nothing more than
        `of_name` and `others` hold. What no pattern can say is noted."""
        names = self._leaf.get("propertyNames", True)
        if isinstance(names, bool) or _no_others(names):
            return None
        said = {key: value for key, value in names.items() if key in _OF_NAMES}
        if set(said) != {key for key in names if key not in _SILENT} or not said:
            if set(names) - _SILENT:
                self._note("propertyNames")
            return None
        if set(said) == {"pattern"}:
            return str(said["pattern"])
        if "pattern" not in said:
            least, most = said.get("minLength", 0), said.get("maxLength", "")
            return rf"^[\s\S]{{{least},{most}}}$"
        self._note("propertyNames")
        return str(said["pattern"])


_OF_NAMES = frozenset(("pattern", "minLength", "maxLength"))
_SILENT = frozenset(["type", "title", "description", "$comment", "examples", "default"])


def _listed_keys(names: Any) -> list[str] | None:
    """The keys, where `propertyNames` lists them."""
    if not isinstance(names, dict):
        return None
    listed = [names["const"]] if "const" in names else names.get("enum")
    if listed is None:
        return None
    return [name for name in listed if isinstance(name, str)]


def _no_others(names: Any) -> bool:
    """Whether `propertyNames` allows no keys, or those only that it lists."""
    if not isinstance(names, dict):
        return names is False
    types = names.get("type", "string")
    if types != "string" and "string" not in types:
        return True
    return _listed_keys(names) is not None


_NEVER = Atom(Located(False, None, None, "#!never"))  # type: ignore[arg-type]
FALSE: Conjunction = (_NEVER,)


def _any(patterns: dict[str, Conjunction]) -> Conjunction:
    """What the value of a key satisfies that matches some of the patterns: one of their schemas,
    if not several. Negated schemas are left out: that is weaker."""
    options, pointer = [], ""
    resolver, dialect = None, NEWEST
    for conjunction in patterns.values():
        options.append(
            {"allOf": [a.located.schema for a in conjunction if not a.negated] or [True]}
        )
        for atom in conjunction:
            pointer += f"|{atom.located.pointer}"
            resolver = resolver or atom.located.resolver
    if resolver is None:  # true and false only
        return () if {"allOf": [True]} in options else FALSE
    return (Atom(Located({"anyOf": options}, resolver, dialect, f"#!any{pointer}")),)


def _notes(leaves: tuple[Leaf, ...], keyword: str) -> list[Residual]:
    return [
        Residual(f"{located.pointer}/{keyword}", keyword)
        for located, leaf in leaves
        if keyword in leaf
    ]


# ---------------------------------------------------------------- numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(case: Case, excluded: list[Any], notes: set[Residual]) -> list[Shape]:
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
                notes.update(_notes(case.leaves, "multipleOf"))
    ranges = [(low, low_open, high, high_open)]
    for value in sorted(set(excluded))[:MAX_EXCLUDED]:
        low, low_open, high, high_open = ranges[-1]
        if low < value or (low == value and not low_open):
            if value < high or (value == high and not high_open):
                ranges[-1:] = [(low, low_open, value, True), (value, True, high, high_open)]
    shapes = []
    for low, low_open, high, high_open in ranges:
        if low > high or (low == high and (low_open or high_open)):
            continue
        if not case.integer and _misread(low, low_open, high, high_open):
            notes.update(_notes(case.leaves, "exclusiveMinimum"))
            notes.update(_notes(case.leaves, "exclusiveMaximum"))
            if excluded:
                notes.update(_notes(case.leaves, EXCLUDED))
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
