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
from rootlace.runtime.constrained.schema.evaluated import evaluated_items
from rootlace.runtime.constrained.schema.formats import FORMATS, pattern_of_format
from rootlace.runtime.constrained.schema.keys import FALSE, NEVER, Keys, listed_keys
from rootlace.runtime.constrained.schema.number_shapes import is_number, numbers
from rootlace.runtime.constrained.schema.residual import Residual, notes_of

LLGUIDANCE_FORMATS = frozenset(["duration", "email", "ipv4", "ipv6", "uuid", "uri"])
"""Formats that llguidance holds as exactly as our patterns, and more of their values; of the others
it takes too much (leap seconds, 29 February in any year) or knows nothing."""
MAX_SPLIT = 16
"""Of so many optional properties the cases are told apart, where their number is bounded."""

_LEAST = {"string": "minLength", "array": "minItems", "object": "minProperties"}

Shape = dict[str, Any]
Leaf = tuple[Located, dict[str, Any]]


class Shapes:
    """Builds shapes, for one schema. `empty(conjunction)` says that nothing satisfies it;
    `child(parent, path, schema)` is an atom; `satisfies` as in `Cases`; `takes(pattern)` says
    whether a mask can hold it, `apart(patterns)` whether no key matches two of them,
    `impossible(shape)` whether no string has this shape."""

    def __init__(
        self,
        empty: Callable[[Conjunction], bool],
        child: Callable[[Located, str, Any], Atom],
        satisfies: Callable[[Located, Any], bool],
        takes: Callable[[str], bool],
        apart: Callable[[tuple[str, ...]], bool],
        impossible: Callable[[Shape], bool],
        checked: CheckedSchema,
    ) -> None:
        self.empty = empty
        self.child = child
        self.satisfies = satisfies
        self.takes = takes
        self.apart = apart
        self.impossible = impossible
        self.checked = checked
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
            return numbers(case, [v for _, v in excluded if is_number(v)], notes)
        kind: Any = {"string": str, "array": list, "object": dict}[name]
        own: set[Residual] = set()
        leaves = case.leaves
        for located, value in excluded:
            if isinstance(value, kind) and not value:
                leaves += ((located, {_LEAST[name]: 1}),)
            elif isinstance(value, kind):
                own.add(Residual(located.pointer.removesuffix("!"), "not"))
        if name == "string":
            found = self._strings(leaves, own)
        elif name == "array":
            found = self._arrays(leaves, own)
        else:
            found = self._objects(leaves, own)
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
            wanted: list[tuple[str, str]] = []
            if "pattern" in leaf:
                if self.takes(leaf["pattern"]):
                    wanted.append(("pattern", leaf["pattern"]))
                elif self.impossible({"type": "string", "pattern": leaf["pattern"]}):
                    return self._none(((located, leaf),), "pattern")
                else:
                    notes.add(Residual(f"{located.pointer}/pattern", "pattern"))
            name = leaf.get("format")
            if name in LLGUIDANCE_FORMATS:
                wanted.append(("format", name))
            elif name in FORMATS:
                wanted.append(("pattern", pattern_of_format(name)))
            for keyword, value in wanted:
                if shape.setdefault(keyword, value) != value:
                    more.append({"type": "string", keyword: value})
        if more:
            shape["allOf"] = more
        if set(shape) & {"pattern", "format"} and len(shape) > 2 and self.impossible(shape):
            return self._none(leaves, "pattern", "format")
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
                    atom = self.child(located, f"/prefixItems/{index}", prefix[index])
                    places[index].append(atom)
                elif "items" in leaf:
                    places[index].append(self.child(located, "/items", leaf["items"]))
            if "items" in leaf:
                rest.append(self.child(located, "/items", leaf["items"]))
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
        return [] if spec is None else [one.shape() for one in self._split(spec, leaves, notes)]

    def _split(
        self, spec: _Object, leaves: tuple[Leaf, ...], notes: set[Residual]
    ) -> list[_Object]:
        """Into objects whose number of properties llguidance can bound."""
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
            if least - needed >= 2:  # a key that comes twice would be counted twice
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

    def no_names(self, leaves: tuple[Leaf, ...]) -> bool:
        """Whether no key satisfies all `propertyNames`."""
        names = [
            self.child(located, "/propertyNames", leaf["propertyNames"])
            for located, leaf in leaves
            if "propertyNames" in leaf
        ]
        if not names:
            return False
        first = names[0].located
        text = Located({"type": "string"}, first.resolver, NEWEST, f"{first.pointer}!text")
        return self.empty((Atom(text), *names))

    def _none(self, leaves: tuple[Leaf, ...], *keywords: str) -> list[Any]:
        for keyword in keywords:
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
            names |= dict.fromkeys(listed_keys(leaf.get("propertyNames")) or ())
            patterns |= {pattern: [] for pattern in leaf.get("patternProperties", {})}
            required |= dict.fromkeys(leaf.get("required", ()))
        names |= required
        ends = [Keys(shapes, located, leaf, notes) for located, leaf in leaves]
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
        found: dict[str, Conjunction] = {
            pattern: tuple(dict.fromkeys(those)) for pattern, those in patterns.items()
        }
        for keys in ends:
            wanted = keys.name_pattern()
            if wanted is None:
                continue
            if found or not shapes.takes(wanted):
                notes.add(Residual(f"{keys.pointer}/propertyNames", "propertyNames"))
            else:
                found, additional = {wanted: additional}, FALSE
        if shapes.no_names(leaves):
            properties = dict.fromkeys(properties, FALSE)
            found, additional = {}, FALSE
        for pattern in list(found):
            if not shapes.takes(pattern):
                # Keys that match may be had from `additionalProperties` only if that is weaker.
                notes.update(notes_of(leaves, "patternProperties"))
                del found[pattern]
                additional = ()
        if len(found) > 1 and not shapes.apart(tuple(found)):
            notes.update(notes_of(leaves, "patternProperties"))
            found = {"|".join(f"(?:{pattern})" for pattern in found): _any(found)}
        for name in required:
            if shapes.empty(properties[name]):
                applied = properties[name]
                if NEVER in applied:
                    shapes._none(leaves, "propertyNames")
                else:
                    shapes.reason = applied[0].located.pointer if applied else ""
                return None
        more = not shapes.empty(additional) or any(not shapes.empty(c) for c in found.values())
        return _Object(
            properties,
            tuple(required),
            found,
            additional,
            more,
            max((leaf.get("minProperties", 0) for _, leaf in leaves), default=0),
            min((leaf.get("maxProperties", math.inf) for _, leaf in leaves), default=math.inf),
        )


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
