"""The normal form of a schema, taken before anything is weakened.

Every schema becomes a union of cases without `not`, `if`, `oneOf` and the like (`cases`). A case is
a union of shapes of one type each (`type_shapes`). The parts of a shape are conjunctions again:
these become definitions of the new schema, so recursion stays recursion. `to_regex` and
`prepare.mask_of` read the keywords that are left:

    {"$ref": "#/$defs/s7"}, true, false                a part
    {"anyOf": [of the following, …]}                   a definition, or one of the following alone
    {"enum": […]}   {"type": "null"}   {"type": "boolean"}   {"type": ["null", "string"]}
    {"type": "string", minLength, maxLength, pattern, format, allOf: [{pattern}, {format}]}
    {"type": "number" or "integer", minimum, exclusiveMinimum, …, multipleOf, allOf: [{multipleOf}]}
    {"type": "array", prefixItems, items, minItems, maxItems}
    {"type": "object", properties, required, patternProperties, additionalProperties,
     minProperties, maxProperties}

Strings are of patterns that may be found anywhere in them, or of formats that all agree on.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rootlace.runtime.structured.json_schema.cases import TYPES, Atom, Cases, Conjunction
from rootlace.runtime.structured.json_schema.load import CheckedSchema, Residual, invalid, written
from rootlace.runtime.structured.json_schema.type_shapes import Shape, Shapes

Satisfies = Callable[..., bool]

MAX_DEFINITIONS = 30_000
MAX_PROBE = 24
"""How many required properties deep contradictions are looked for."""


@dataclass
class Normal:
    """`root` is a part, `definitions` are what it refers to. `notes` says, of a definition, which
    keywords it does not hold: those have to be checked.

    `shown` are the definitions that llguidance is given in other words, `lost` what those do not
    hold beyond that; `places` says where in the user's schema a definition comes from.
    """

    root: Any = True
    definitions: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, set[Residual]] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, set[Residual]] = field(default_factory=dict)
    places: dict[str, Conjunction] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether it is the user's schema, and nothing is left to check."""
        return not any(self.notes.values())

    def let_go(self) -> None:
        let_go(self.definitions, self.notes, self.shown, self.lost, self.places)


def normal_form(checked: CheckedSchema, satisfies: Satisfies) -> Normal:
    """`satisfies(schema, value, holds)` is the full check. Raises InvalidConstraint where nothing
    at all satisfies the schema."""
    made = _Normalizer(checked, satisfies)
    try:
        return made.result()
    finally:
        made.let_go()


def let_go(*memos: dict[Any, Any]) -> None:
    """Of what is not needed any more, piece by piece: all at once, what is known of thousands of
    schemas would keep the interpreter from everybody else for tens of milliseconds."""
    for memo in memos:
        while memo:
            memo.popitem()


class _Normalizer:
    def __init__(self, checked: CheckedSchema, satisfies: Satisfies) -> None:
        me = weakref.proxy(self)  # a method would refer in a circle, to all that is made here

        def empty(conjunction: Conjunction) -> bool:
            return bool(me._empty(conjunction))

        self._cases = Cases(checked, satisfies, empty)

        def shapes_of(conjunction: Conjunction) -> tuple[list[Shape], set[Residual]]:
            return me._shapes_of(conjunction)

        self._shapes = Shapes(checked, satisfies, empty, shapes_of)
        self._known: dict[Conjunction, tuple[list[Shape], set[Residual]]] = {}
        self._reasons: dict[Conjunction, str] = {}
        self._open: set[Conjunction] = set()
        self._root: Conjunction = (Atom(checked.root),)
        self._names: dict[Conjunction, str] = {}
        self._queue: list[Conjunction] = []

    def result(self) -> Normal:
        shapes, _ = self._shapes_of(self._root)
        if not shapes:
            place = written(self._reasons.get(self._root) or "#")
            raise invalid(place, "nothing satisfies the schema")
        found = Normal(self._part(self._root))
        while self._queue:
            conjunction = self._queue.pop(0)
            name = self._names[conjunction]
            shapes, notes = self._shapes_of(conjunction)
            found.definitions[name] = self._rendered(shape.said for shape in shapes)
            if any(shape.shown for shape in shapes):
                found.shown[name] = self._rendered(
                    schema for shape in shapes for schema in shape.for_mask()
                )
            found.notes[name] = notes
            found.lost[name] = {note for shape in shapes for note in shape.lost}
            found.places[name] = conjunction
        return found

    def let_go(self) -> None:
        let_go(self._known, self._reasons, self._names, self._cases.dead)

    # ------------------------------------------------------------ conjunctions

    def _shapes_of(self, conjunction: Conjunction) -> tuple[list[Shape], set[Residual]]:
        known = self._known.get(conjunction)
        if known is not None:
            return known
        self._open.add(conjunction)
        shapes: list[Shape] = []
        notes: set[Residual] = set()
        reason = ""
        try:
            for case in self._cases.of(conjunction):
                self._shapes.reason = ""
                found, lost = self._shapes.of(case)
                shapes += found
                notes |= lost
                reason = reason or self._shapes.reason
        finally:
            self._open.discard(conjunction)
        if not shapes:
            self._reasons[conjunction] = self._cases.dead.get(conjunction) or reason or "#"
        self._known[conjunction] = shapes, notes
        return shapes, notes

    def _empty(self, conjunction: Conjunction) -> bool:
        """Whether it is found that nothing satisfies it."""
        conjunction = _reduced(conjunction)
        if not conjunction:
            return False
        if any(atom.located.schema is atom.negated for atom in conjunction):
            return True
        if conjunction in self._open or len(self._open) > MAX_PROBE:
            return False
        shapes, _ = self._shapes_of(conjunction)
        return not shapes

    # ------------------------------------------------------------ rendering

    def _part(self, conjunction: Conjunction) -> Any:
        """The schema that stands for a conjunction: a reference, or a plain one."""
        conjunction = _reduced(conjunction)
        if not conjunction:
            return {}
        if self._empty(conjunction):
            return False
        name = self._names.get(conjunction)
        if name is None:
            if len(self._names) >= MAX_DEFINITIONS:
                raise invalid("#", f"more than {MAX_DEFINITIONS} schemas apply together")
            name = self._names[conjunction] = f"s{len(self._names)}"
            self._queue.append(conjunction)
        return {"$ref": f"#/$defs/{name}"}

    def _rendered(self, shapes: Iterable[dict[str, Any]]) -> dict[str, Any]:
        plain: dict[str, None] = {}
        values: dict[str, Any] = {}
        others: dict[str, dict[str, Any]] = {}
        for shape in shapes:
            if list(shape) == ["type"]:
                plain[shape["type"]] = None
            elif list(shape) == ["enum"]:
                values |= {json.dumps(value, sort_keys=True): value for value in shape["enum"]}
            else:
                other = self._with_parts(shape)
                others.setdefault(json.dumps(other), other)
        if plain.keys() >= set(TYPES):
            return {}
        options: list[dict[str, Any]] = []
        if plain:
            options.append({"type": list(plain) if len(plain) > 1 else next(iter(plain))})
        if values:
            options.append({"enum": list(values.values())})
        options += others.values()
        if not options:
            return {"enum": []}
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _with_parts(self, shape: dict[str, Any]) -> dict[str, Any]:
        found = dict(shape)
        for key in ("items", "additionalProperties"):
            if key in found:
                found[key] = self._part(found[key])
        if "prefixItems" in found:
            found["prefixItems"] = [self._part(atoms) for atoms in found["prefixItems"]]
        for key in ("properties", "patternProperties"):
            if key in found:
                found[key] = {name: self._part(atoms) for name, atoms in found[key].items()}
        return found


def _reduced(conjunction: Conjunction) -> Conjunction:
    """The conjunction without schemas that allow everything, each schema once."""
    return tuple(
        dict.fromkeys(
            atom
            for atom in conjunction
            if not (
                atom.located.schema is not atom.negated and isinstance(atom.located.schema, bool)
            )
            and not (atom.located.schema == {} and not atom.negated)
        )
    )
