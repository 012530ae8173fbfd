"""Schemas that apply together, as cases without `anyOf`, `not`, `if` and similar keywords.

A conjunction is a list of schemas, each plain or negated, that one value must satisfy. `Cases`
rewrites a conjunction as a union of cases. A case has only the keywords of the types themselves.
The union allows what the conjunction allows, and more only if a note names a lost keyword.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from rootlace.runtime.structured.json_schema.load import (
    EXCLUDED,
    OURS,
    OWN,
    UNMET,
    CheckedSchema,
    Located,
    Residual,
    evaluated_keys,
    pointer_part,
)
from rootlace.runtime.structured.json_schema.pattern import searcher

TYPES = ("null", "boolean", "number", "string", "array", "object")
ALL_TYPES = frozenset(TYPES)
MAX_CASES = 96
MAX_OPTIONS = 4096
"""Most options of a choice that is the only one, so that it multiplies with no other choice."""
MAX_ONE_OF = 12
"""Most options of a `oneOf` for which each option negates the others."""
MAX_COMPARED = 64
"""Most options of a `oneOf` that are compared with each other for exclusion."""


class Atom(msgspec.Struct, frozen=True):
    located: Located
    negated: bool = False


Conjunction = tuple[Atom, ...]
_Rank = tuple[int, ...]
"""Rank of a schema among schemas that apply together: the indices of keywords and list items on the
way to the schema. Properties are written in the order of ranks."""


class Case(msgspec.Struct, frozen=True):
    """Case of a conjunction.

    With `values` the case is exactly these values, which `source` lists. Otherwise the case is the
    values of `types` (only whole numbers if `integer`) that satisfy `leaves`: schemas, each with
    its keywords about one type. `notes`: keywords that the case does not hold.
    """

    types: frozenset[str] = ALL_TYPES
    integer: bool = False
    leaves: tuple[tuple[Located, dict[str, Any]], ...] = ()
    values: tuple[Any, ...] | None = None
    source: Residual | None = None
    notes: frozenset[Residual] = frozenset()


@dataclass
class _Option:
    atoms: tuple[Atom, ...]
    notes: tuple[Residual, ...] = ()


class _Partial(msgspec.Struct):
    pending: list[tuple[Atom, _Rank]]
    done: set[Atom] = msgspec.field(default_factory=set)
    choices: list[tuple[list[_Option], _Rank]] = msgspec.field(default_factory=list)
    types: frozenset[str] = ALL_TYPES
    integer: bool = False
    leaves: list[tuple[Located, dict[str, Any]]] = msgspec.field(default_factory=list)
    ranks: list[_Rank] = msgspec.field(default_factory=list)
    valued: bool = False
    notes: set[Residual] = msgspec.field(default_factory=set)

    def fork(
        self, option: _Option, rank: _Rank, rest: list[tuple[list[_Option], _Rank]]
    ) -> _Partial:
        return replace(
            self,
            pending=_ranked(option.atoms, rank),
            done=set(self.done),
            choices=list(rest),
            leaves=list(self.leaves),
            ranks=list(self.ranks),
            notes=self.notes | set(option.notes),
        )

    def in_order(self) -> tuple[tuple[Located, dict[str, Any]], ...]:
        """Leaves in the order of the user's schema."""
        ranked = sorted(range(len(self.leaves)), key=self.ranks.__getitem__)
        return tuple(self.leaves[index] for index in ranked)


class _Dead(Exception):
    """Proof that nothing satisfies a case; `pointer` is the place of the cause."""

    def __init__(self, pointer: str) -> None:
        super().__init__(pointer)
        self.pointer = pointer


class Cases:
    """Rewriting of the conjunctions of one schema as cases.

    `satisfies(located, value, holds)` is the full check of a value. `disjoint(conjunction)` returns
    whether two options of a `oneOf` exclude each other.
    """

    def __init__(self, checked: CheckedSchema, satisfies: Any, disjoint: Any) -> None:
        self._checked = checked
        self._satisfies = satisfies
        self._disjoint = disjoint
        self.dead: dict[Conjunction, str] = {}
        """Map from conjunction without cases to the place of the cause."""

    def of(self, conjunction: Conjunction) -> list[Case]:
        cases: list[Case] = []
        queue = [_Partial(_ranked(conjunction, ()))]
        pointer = ""
        started, limit = 1, MAX_CASES
        while queue:
            partial = queue.pop(0)
            try:
                self._settle(partial)
                if partial.valued:
                    self._settle_values(partial, conjunction, cases)
                    continue
            except _Dead as dead:
                pointer = pointer or dead.pointer
                continue
            if started == 1 and len(partial.choices) == 1:
                limit += min(len(partial.choices[0][0]), MAX_OPTIONS)
            while partial.choices and started + len(partial.choices[0][0]) > limit:
                lost, _ = partial.choices.pop(0)  # weaker: any of the options, or none
                for option in lost:
                    partial.notes.update(option.notes)
                partial.notes.add(_lost(lost, conjunction))
            if place := _contradiction(partial.leaves):
                pointer = pointer or place
                continue
            if partial.choices:
                (options, rank), *rest = partial.choices
                started += len(options) - 1
                queue[:0] = [partial.fork(option, rank, rest) for option in options]
                continue
            cases.append(
                Case(
                    partial.types,
                    partial.integer,
                    partial.in_order(),
                    notes=frozenset(partial.notes),
                )
            )
        if not cases:
            self.dead[conjunction] = pointer or (
                conjunction[0].located.pointer if conjunction else "#"
            )
        return cases

    def child(self, parent: Located, path: str, schema: Any) -> Atom:
        return Atom(self._checked.child(parent, path, schema))

    # ------------------------------------------------------------ one atom

    def _settle(self, partial: _Partial) -> None:
        """Apply the pending schemas, as far as they leave no choice."""
        while partial.pending:
            atom, rank = partial.pending.pop(0)
            if atom in partial.done:
                continue
            partial.done.add(atom)
            if Atom(atom.located, not atom.negated) in partial.done:
                raise _Dead(atom.located.pointer)
            if isinstance(atom.located.schema, bool):
                if atom.located.schema is atom.negated:
                    raise _Dead(atom.located.pointer)
                continue
            choices = (
                [(self._negated(atom.located), rank)]
                if atom.negated
                else self._positive(partial, atom.located, rank)
            )
            for options, below in choices:
                if not options:
                    raise _Dead(atom.located.pointer)
                if len(options) == 1:
                    partial.pending += _ranked(options[0].atoms, below)
                    partial.notes.update(options[0].notes)
                else:
                    partial.choices.append((options, below))
        if not partial.types:
            raise _Dead("#")

    def _settle_values(
        self, partial: _Partial, conjunction: Conjunction, cases: list[Case]
    ) -> None:
        """Add the case of the listed values that satisfy the whole conjunction. The case is exact,
        so it needs no choices."""
        listed = [
            (leaf["!values"], one.pointer) for one, leaf in partial.leaves if "!values" in leaf
        ]
        smallest, pointer = min(listed, key=lambda values: len(values[0]))
        wanted = [(atom.located, not atom.negated) for atom in conjunction]
        wanted += [(located, True) for located, _ in partial.leaves]
        if len(smallest) > MAX_COMPARED:
            # Membership is certain here; looking up every value again would take quadratic time.
            wanted = [(_without_values(one, smallest), holds) for one, holds in wanted]
        found = [
            value
            for value in smallest
            if all(self._satisfies(located, value, holds) for located, holds in wanted)
        ]
        keyword = "const" if len(smallest) == 1 else "enum"
        if not found:
            raise _Dead(f"{pointer}/{keyword}")
        source = Residual(f"{pointer}/{keyword}", keyword)
        cases.append(Case(values=tuple(found), source=source))

    def _positive(
        self, partial: _Partial, located: Located, rank: _Rank
    ) -> list[tuple[list[_Option], _Rank]]:
        """Take in the keywords of a schema; return the remaining choices."""
        schema = located.keywords
        leaf: dict[str, Any] = {}
        choices: list[tuple[list[_Option], _Rank]] = []
        found: list[tuple[Atom, _Rank]] = []
        for place, (key, value) in enumerate(schema.items()):
            below = (*rank, place)
            if key == "type":
                self._intersect_types(partial, located, value)
            elif key == "$ref":
                found.append((Atom(self._checked.target(located)), below))
            elif key == "$dynamicRef":
                targets = self._checked.dynamic_targets(located)
                if len(targets) == 1:
                    found.append((Atom(targets[0]), below))
                else:
                    note = Residual(f"{located.pointer}/{key}", key)
                    options = [_Option((Atom(target),), (note,)) for target in targets]
                    choices.append((options, below))
            elif key == "$recursiveRef":
                partial.notes.add(Residual(f"{located.pointer}/{key}", key))
            elif key == "const":
                leaf["!values"] = [value]
                partial.valued = True
            elif key == "enum":
                leaf["!values"] = list(value)
                partial.valued = True
            elif key == "pattern" and schema.get("type") == "string" and _LITERALS.match(value):
                # Often a discriminator; its values are known to exclude each other.
                leaf["!values"] = value.strip("^()$").split("|")
                partial.valued = True
            elif key == "allOf":
                parts = [self.child(located, f"/allOf/{i}", part) for i, part in enumerate(value)]
                found += _ranked(parts, below)
            elif key == "not":
                child = self.child(located, "/not", value)
                found.append((Atom(child.located, True), below))
            elif key in ("anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas"):
                choices += [(options, below) for options in self._choices(located, key, schema)]
            elif key not in ("then", "else"):
                leaf[key] = value
        if leaf:
            first = "properties" if "properties" in leaf else next(iter(leaf))
            partial.leaves.append((located, leaf))
            partial.ranks.append((*rank, list(schema).index(first) if first in schema else 0))
        partial.pending[:0] = found
        return choices

    def _intersect_types(self, partial: _Partial, located: Located, value: Any) -> None:
        names = {value} if isinstance(value, str) else set(value)
        allowed = frozenset("number" if name == "integer" else name for name in names)
        if "integer" in names and "number" not in names:
            partial.integer = True
        partial.types &= allowed
        if not partial.types:
            raise _Dead(f"{located.pointer}/type")

    def _choices(self, located: Located, key: str, schema: dict[str, Any]) -> list[list[_Option]]:
        value = schema[key]
        if key == "anyOf":
            atoms = [self.child(located, f"/anyOf/{i}", below) for i, below in enumerate(value)]
            return [[_Option((atom,)) for atom in atoms]]
        if key == "oneOf":
            return [self._one_of(located, value)]
        if key == "if":
            condition = self.child(located, "/if", value)
            met, unmet = [condition], [Atom(condition.located, True)]
            if "then" in schema:
                met.append(self.child(located, "/then", schema["then"]))
            if "else" in schema:
                unmet.append(self.child(located, "/else", schema["else"]))
            if len(met) == len(unmet) == 1:
                return []
            return [[_Option(tuple(met)), _Option(tuple(unmet))]]
        found = []
        for name, needed in value.items():
            base = f"/{key}/{pointer_part(name)}"
            absent = self._made(located, f"{base}{OWN}absent", {"properties": {name: False}})
            others = needed if key == "dependentRequired" else ()
            names = [name, *(other for other in others if other != name)]
            there = {"type": "object", "required": names}
            present = [self._made(located, f"{base}{OWN}there", there)]
            if key == "dependentSchemas":
                present.append(self.child(located, base, needed))
            found.append([_Option((absent,)), _Option(tuple(present))])
        return found

    def _one_of(self, located: Located, value: list[Any]) -> list[_Option]:
        atoms = [self.child(located, f"/oneOf/{i}", below) for i, below in enumerate(value)]
        note = Residual(f"{located.pointer}/oneOf", "oneOf")
        if len(atoms) > MAX_COMPARED:
            return [_Option((atom,), (note,)) for atom in atoms]
        options = []
        for atom in atoms:
            overlapping = [
                other for other in atoms if other is not atom and not self._disjoint((atom, other))
            ]
            if len(atoms) > MAX_ONE_OF:
                options.append(_Option((atom,), (note,) if overlapping else ()))
            else:
                negated = tuple(Atom(other.located, True) for other in overlapping)
                options.append(_Option((atom, *negated)))
        return options

    # ------------------------------------------------------------ negation

    def _negated(self, located: Located) -> list[_Option]:
        """Return the options of a negated schema: each option violates one keyword."""
        return [
            option
            for key, value in located.keywords.items()
            for option in self._negated_keyword(located, located.keywords, key, value)
        ]

    def _negated_keyword(
        self, located: Located, schema: dict[str, Any], key: str, value: Any
    ) -> Iterable[_Option]:
        pointer = f"{located.pointer}/{key}"
        shape: dict[str, Any]

        def made(given: dict[str, Any], lost: bool = False, part: Any = "") -> _Option:
            atom = self._made(located, f"/{key}{OWN}{part}", given)
            return _Option((atom,), (Residual(pointer, key),) if lost else ())

        def below(path: str, other: Any, negated: bool = True) -> Atom:
            return Atom(self.child(located, path, other).located, negated)

        if key == "type":
            names = {value} if isinstance(value, str) else set(value)
            others = [t for t in TYPES if t not in names]
            whole = "integer" in names and "number" not in names
            if whole:
                yield made({"type": "number"}, lost=True, part="fraction")
                others = [t for t in others if t != "number"]
            if others:
                yield made({"type": others})
        elif key in ("const", "enum"):
            yield made({EXCLUDED: [value] if key == "const" else value})
        elif key == "required":
            for name in value:
                yield made({"type": "object", "properties": {name: False}}, part=name)
        elif key == "properties":
            for name, other in value.items():
                if other is not True and other != {}:
                    shape = {
                        "type": "object",
                        "required": [name],
                        "properties": {name: _not(other)},
                    }
                    yield made(shape, part=name)
        elif key == "prefixItems":
            for index, other in enumerate(value):
                if other is not True and other != {}:
                    shape = {
                        "type": "array",
                        "minItems": index + 1,
                        "prefixItems": [True] * index + [_not(other)],
                    }
                    yield made(shape, part=index)
        elif key in _OPPOSITE:
            type_, opposite, shift = _OPPOSITE[key]
            if value + shift >= 0 or shift == 0:
                yield made({"type": type_, opposite: value + shift})
        elif key == "contains":
            if schema.get("minContains", 1) == 1 and "maxContains" not in schema:
                yield made({"type": "array", "items": _not(value)})
            elif schema.get("minContains", 1) > 0 or "maxContains" in schema:
                yield made({"type": "array"}, lost=True)
        elif key in _LOST:
            type_, least = _LOST[key]
            says = value is True if key == "uniqueItems" else value is not True and value != {}
            if says:
                yield made({"type": type_, **least, UNMET: (key, value)}, lost=True)
        elif key == "$ref":
            yield _Option((Atom(self._checked.target(located), True),))
        elif key in ("$dynamicRef", "$recursiveRef"):
            yield _Option((), (Residual(pointer, key),))
        elif key == "allOf":
            for index, other in enumerate(value):
                yield _Option((below(f"/allOf/{index}", other),))
        elif key == "anyOf":
            yield _Option(tuple(below(f"/anyOf/{i}", other) for i, other in enumerate(value)))
        elif key == "oneOf":
            yield _Option(tuple(below(f"/oneOf/{i}", other) for i, other in enumerate(value)))
            positive = [below(f"/oneOf/{i}", other, False) for i, other in enumerate(value)]
            for index, first in enumerate(positive):
                for second in positive[index + 1 :]:
                    yield _Option((first, second))
        elif key == "not":
            yield _Option((below("/not", value, False),))
        elif key == "if":
            for branch, negated in (("then", False), ("else", True)):
                if branch in schema:
                    yield _Option(
                        (below("/if", value, negated), below(f"/{branch}", schema[branch]))
                    )
        elif key == "dependentRequired":
            for name, needed in value.items():
                for other in needed:
                    shape = {"type": "object", "required": [name], "properties": {other: False}}
                    yield made(shape, part=f"{pointer_part(name)}/{pointer_part(other)}")
        elif key == "dependentSchemas":
            for name, other in value.items():
                part = pointer_part(name)
                there = {"type": "object", "required": [name]}
                atom = self._made(located, f"/{key}{OWN}{part}", there)
                yield _Option((atom, below(f"/{key}/{part}", other)))

    def _made(self, parent: Located, path: str, schema: dict[str, Any]) -> Atom:
        """Return an atom of a generated schema, located below `parent`."""
        return Atom(Located(schema, parent.resolver, OURS, parent.pointer + path))


def _ranked(atoms: Iterable[Atom], rank: _Rank) -> list[tuple[Atom, _Rank]]:
    return [(atom, (*rank, index)) for index, atom in enumerate(atoms)]


def _without_values(located: Located, values: list[Any]) -> Located:
    schema = located.schema
    if not isinstance(schema, dict) or schema.get("enum") != values:
        return located
    rest = {key: value for key, value in schema.items() if key != "enum"}
    return Located(rest, located.resolver, located.dialect, located.pointer)


def _not(schema: Any) -> Any:
    return not schema if isinstance(schema, bool) else {"not": schema}


_LITERALS = re.compile(r"\^(?:\w+|\(\w+(?:\|\w+)*\))\$\Z", re.ASCII)

_OPPOSITE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_LOST: dict[str, tuple[str, dict[str, int]]] = {
    "pattern": ("string", {}),
    "multipleOf": ("number", {}),
    "uniqueItems": ("array", {"minItems": 2}),
    "items": ("array", {"minItems": 1}),
    "additionalProperties": ("object", {"minProperties": 1}),
    "patternProperties": ("object", {"minProperties": 1}),
    "propertyNames": ("object", {"minProperties": 1}),
    "unevaluatedProperties": ("object", {"minProperties": 1}),
    "unevaluatedItems": ("array", {"minItems": 1}),
}


def _lost(options: list[_Option], conjunction: Conjunction) -> Residual:
    for option in options:
        for atom in option.atoms:
            pointer = atom.located.pointer
            for key in ("anyOf", "oneOf", "if", "not", "dependentSchemas", "dependentRequired"):
                if f"/{key}" in pointer:
                    return Residual(pointer[: pointer.rindex(f"/{key}")] + f"/{key}", key)
            return Residual(pointer, pointer.rpartition("/")[2])
    return Residual(conjunction[0].located.pointer, "anyOf")


_ALONE = frozenset(("pattern", "multipleOf", "uniqueItems", "propertyNames"))
"""Keywords that mean the same beside any other keywords."""


def _contradiction(leaves: Sequence[tuple[Located, dict[str, Any]]]) -> str:
    """Return the place of a keyword that one leaf requires and another negates; "" if none is
    found."""
    for located, leaf in leaves:
        keyword, value = leaf.get(UNMET, ("", None))
        if keyword not in _ALONE:
            continue
        for other, wanted in leaves:
            same = located.resolver is other.resolver or not isinstance(value, dict)
            if same and keyword in wanted and _implies(keyword, wanted[keyword], value):
                return located.pointer
    return ""


def _implies(keyword: str, stated: Any, value: Any) -> bool:
    """Return whether a keyword with the value `stated` implies the same keyword with `value`."""
    if keyword == "multipleOf" and isinstance(stated, int) and isinstance(value, int):
        return stated % value == 0
    return bool(stated == value)


# Keys ---------------------------------------------------------------------------------------------
#
# Conditions of a case's schemas on an object's keys and their values.


class Keys:
    """Conditions of one schema on the values of an object's keys."""

    def __init__(
        self,
        checked: CheckedSchema,
        satisfies: Callable[[Located, Any], bool],
        located: Located,
        leaf: dict[str, Any],
        notes: set[Residual],
    ) -> None:
        """Collect the conditions. `satisfies` as in `Cases`; lost keywords are added to `notes`."""
        self._checked = checked
        self._satisfies = satisfies
        self._located = located
        self._leaf = leaf
        self._notes = notes
        self._patterns: dict[str, Any] = leaf.get("patternProperties", {})
        self._unevaluated = leaf.get("unevaluatedProperties", True)
        self.known_names: set[str] | None = set()
        self.known_patterns: list[str] = []
        if self._unevaluated is not True:
            self.known_names, self.known_patterns, sure = evaluated_keys(checked, located)
            if not sure:
                self._note("unevaluatedProperties")

    def _note(self, keyword: str) -> None:
        self._notes.add(Residual(f"{self._located.pointer}/{keyword}", keyword))

    def _atom(self, keyword: str, *path: str) -> Atom:
        value = self._leaf[keyword]
        for part in path:
            value = value[part]
        pointer = "/".join(("", keyword, *map(pointer_part, path)))
        return Atom(self._checked.child(self._located, pointer, value))

    def of_name(self, name: str) -> list[Atom]:
        atoms = list(map(Atom, self._checked.members(self._located, name)))
        if "propertyNames" in self._leaf:
            names = self._atom("propertyNames").located
            if not self._satisfies(names, name):
                atoms.append(NEVER)
        if self.known_names is None or self._unevaluated is True or name in self.known_names:
            return atoms
        if not any(searcher(pattern)(name) for pattern in self.known_patterns):
            atoms.append(self._atom("unevaluatedProperties"))
        return atoms

    def others(self) -> list[Atom]:
        """Return the conditions on keys that no schema of the case names and no pattern matches."""
        atoms: list[Atom] = []
        if "additionalProperties" in self._leaf:
            atoms.append(self._atom("additionalProperties"))
        if self._unevaluated is not True and self.known_names is not None:
            atoms.append(self._atom("unevaluatedProperties"))
        return atoms

    def of_pattern(self, pattern: str) -> list[Atom]:
        atoms: list[Atom] = []
        if pattern in self._patterns:
            atoms.append(self._atom("patternProperties", pattern))
        elif "additionalProperties" in self._leaf:
            if self._patterns:
                self._note("additionalProperties")
            else:
                atoms.append(self._atom("additionalProperties"))
        open_ = self._unevaluated is True or self.known_names is None
        if not open_ and pattern not in self.known_patterns:
            self._note("unevaluatedProperties")
        return atoms


NEVER = Atom(Located(False, None, None, f"#{OWN}never"))  # type: ignore[arg-type]
FALSE: Conjunction = (NEVER,)
