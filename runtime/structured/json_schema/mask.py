"""From a normal form to the schema that llguidance runs, and what of it is left to check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rootlace.runtime.structured.json_schema.cases import Conjunction
from rootlace.runtime.structured.json_schema.load import Residual
from rootlace.runtime.structured.json_schema.normal_form import Normal
from rootlace.runtime.structured.json_schema.spellings import (
    OPTIONS,
    needs_controls,
    tells_keys_apart,
)
from rootlace.runtime.structured.json_schema.to_llguidance import weaken


@dataclass(frozen=True)
class Mask:
    """A schema that llguidance takes, and the keywords of the user's that it does not hold."""

    schema: dict[str, Any]
    residuals: tuple[Residual, ...]


def mask_of(normal: Normal) -> Mask:
    weakened = weaken(normal.root, {**normal.definitions, **normal.shown})
    notes: set[Residual] = set()
    for name in weakened.definitions:
        notes |= normal.notes[name] | normal.lost[name]
    for name, keyword in weakened.lost:
        notes.add(Residual(_place(normal.places[name], keyword), keyword))
    schema = dict(weakened.root)
    if weakened.definitions:
        schema["$defs"] = weakened.definitions
    told = [name for name, shape in weakened.definitions.items() if tells_keys_apart(shape)]
    if told and needs_controls(schema):
        # Keys may be spelt in two ways then, and the mask does not know one in the other.
        for name in told:
            notes.add(Residual(_place(normal.places[name], "properties"), "properties"))
    elif told:
        schema["x-guidance"] = dict(OPTIONS)
    return Mask(schema, tuple(sorted(notes, key=lambda note: note.pointer)))


def _place(conjunction: Conjunction, keyword: str) -> str:
    for atom in conjunction:
        if isinstance(atom.located.schema, dict) and keyword in atom.located.schema:
            return f"{atom.located.pointer}/{keyword}"
    return conjunction[0].located.pointer if conjunction else "#"
