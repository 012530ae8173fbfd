"""From a checked schema to one that a mask can hold, and what of it is left to check.

Every schema becomes a union of cases without `not`, `if`, `oneOf` and the like (`conjunction`), a
case a union of shapes of one type each (`shapes`), whose parts are conjunctions again: those
become the definitions of the new schema, so recursion stays recursion.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rootlace.runtime.constrained.schema.check import CheckedSchema, Located, invalid
from rootlace.runtime.constrained.schema.conjunction import TYPES, Atom, Cases, Conjunction
from rootlace.runtime.constrained.schema.residual import Residual
from rootlace.runtime.constrained.schema.shapes import Shape, Shapes
from rootlace.runtime.constrained.schema.spelling import (
    OPTIONS,
    needs_controls,
    tells_keys_apart,
)
from rootlace.runtime.constrained.schema.weaken import Weakened, accepted, weaken

Satisfies = Callable[..., bool]

MAX_DEFINITIONS = 30_000
MAX_PROBE = 24
"""How deep it is looked for contradictions through required properties."""


@dataclass(frozen=True)
class Relaxed:
    schema: dict[str, Any]
    residuals: tuple[Residual, ...]


def relax(checked: CheckedSchema, satisfies: Satisfies) -> Relaxed:
    """`satisfies(schema, value, holds)` is the full check. Raises InvalidConstraint where nothing
    at all satisfies the schema."""
    return _Relaxation(checked, satisfies).result()


class _Relaxation:
    def __init__(self, checked: CheckedSchema, satisfies: Satisfies) -> None:
        self._cases = Cases(checked, satisfies, self._empty)
        self._shapes = Shapes(
            self._empty,
            self._child,
            satisfies,
            takes_pattern,
            patterns_apart,
            lambda shape: _nothing_satisfies(json.dumps(shape)),
            checked,
        )
        self._known: dict[Conjunction, tuple[list[Shape], set[Residual]]] = {}
        self._reasons: dict[Conjunction, str] = {}
        self._open: set[Conjunction] = set()
        self._root: Conjunction = (Atom(checked.root),)
        self._names: dict[Conjunction, str] = {}
        self._queue: list[Conjunction] = []
        self._notes: dict[str, set[Residual]] = {}

    def result(self) -> Relaxed:
        shapes, _ = self._shapes_of(self._root)
        if not shapes:
            place = written(self._reasons.get(self._root) or "#", self._root[0].located.schema)
            raise invalid(place, "nothing satisfies the schema")
        reference = self._part(self._root)
        definitions: dict[str, Any] = {}
        while self._queue:
            conjunction = self._queue.pop(0)
            name = self._names[conjunction]
            shapes, notes = self._shapes_of(conjunction)
            self._notes[name] = set(notes)
            definitions[name] = self._rendered(shapes)
        weakened = weaken(reference, definitions)
        return self._collected(weakened)

    def _collected(self, weakened: Weakened) -> Relaxed:
        notes: set[Residual] = set()
        places = {name: conjunction for conjunction, name in self._names.items()}
        for name in weakened.definitions:
            notes |= self._notes[name]
        for name, keyword in weakened.lost:
            notes.add(Residual(_place(places[name], keyword), keyword))
        schema = dict(weakened.root)
        if weakened.definitions:
            schema["$defs"] = weakened.definitions
        told = [name for name, shape in weakened.definitions.items() if tells_keys_apart(shape)]
        if told and needs_controls(schema):
            # Keys may be spelt in two ways then, and the mask does not know one in the other.
            notes |= {Residual(_place(places[name], "properties"), "properties") for name in told}
        elif told:
            schema["x-guidance"] = dict(OPTIONS)
        return Relaxed(schema, tuple(sorted(notes, key=lambda note: note.pointer)))

    # ------------------------------------------------------------ conjunctions

    def _child(self, parent: Located, path: str, schema: Any) -> Atom:
        return self._cases.child(parent, path, schema)

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
        """Whether it shows that nothing satisfies it."""
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

    def _rendered(self, shapes: list[Shape]) -> dict[str, Any]:
        plain = [shape["type"] for shape in shapes if list(shape) == ["type"]]
        values = [value for shape in shapes if list(shape) == ["enum"] for value in shape["enum"]]
        others = [self._shape(shape) for shape in shapes if list(shape) not in (["type"], ["enum"])]
        options: list[dict[str, Any]] = []
        if set(plain) >= set(TYPES):
            return {}
        if plain:
            types = list(dict.fromkeys(plain))
            options.append({"type": types[0] if len(types) == 1 else types})
        if values:
            unique = {json.dumps(value, sort_keys=True): value for value in values}
            options.append({"enum": list(unique.values())})
        seen = set()
        for other in others:
            text = json.dumps(other)
            if text not in seen:
                seen.add(text)
                options.append(other)
        if not options:
            return {"enum": []}
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _shape(self, shape: Shape) -> dict[str, Any]:
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
    """Without what says nothing, each once."""
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


def written(pointer: str, schema: Any) -> str:
    """A pointer without what we put there ourselves ("not/type!/type"): to the keyword that the
    user wrote, as far as it leads through `schema`."""
    first, *parts = pointer.split("/")
    found, node = [first], schema
    for part in parts:
        inner = _member(node, part)
        if inner is None and "!" in part and _member(node, part.partition("!")[0]) is not None:
            return "/".join([*found, part.partition("!")[0]])
        if inner is None:  # another document's
            return pointer
        found.append(part)
        (node,) = inner
    return pointer


def _member(node: Any, part: str) -> tuple[Any] | None:
    if isinstance(node, list):
        return (node[int(part)],) if part.isdecimal() and int(part) < len(node) else None
    name = part.replace("~1", "/").replace("~0", "~")
    return (node[name],) if isinstance(node, dict) and name in node else None


def _place(conjunction: Conjunction, keyword: str) -> str:
    for atom in conjunction:
        if isinstance(atom.located.schema, dict) and keyword in atom.located.schema:
            return f"{atom.located.pointer}/{keyword}"
    return conjunction[0].located.pointer if conjunction else "#"


@lru_cache(maxsize=4096)
def takes_pattern(pattern: str) -> bool:
    """Whether llguidance takes it."""
    return accepted({"type": "string", "pattern": pattern}) == ""


@lru_cache(maxsize=4096)
def _nothing_satisfies(schema: str) -> bool:
    """Whether llguidance is sure of that."""
    return accepted(json.loads(schema)).startswith("Unsatisfiable")


@lru_cache(maxsize=1024)
def patterns_apart(patterns: tuple[str, ...]) -> bool:
    """Whether llguidance is sure that no text matches two of them."""
    found = {"type": "object", "patternProperties": {key: {} for key in patterns}}
    return accepted(found) == ""
