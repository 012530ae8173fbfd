"""A JSON schema, ready to be enforced: its normal form, the schema of its mask, the check.

Sections: the mask (what llguidance runs, and what is left to check); the prepared schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rootlace.runtime.structured.json_schema.cases import Conjunction
from rootlace.runtime.structured.json_schema.json_text import gap_of
from rootlace.runtime.structured.json_schema.load import CheckedSchema, Residual, invalid, written
from rootlace.runtime.structured.json_schema.normal_form import Normal, let_go, normal_form
from rootlace.runtime.structured.json_schema.pattern import searcher
from rootlace.runtime.structured.json_schema.spellings import (
    OPTIONS,
    needs_controls,
    tells_keys_apart,
)
from rootlace.runtime.structured.json_schema.to_llguidance import weaken
from rootlace.runtime.structured.json_schema.to_regex import whole_regex
from rootlace.runtime.structured.json_schema.validate import Rules, Verifier
from rootlace.runtime.structured.regex.syntax import Regex
from rootlace.wire.errors import InvalidConstraint


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


# Prepare ------------------------------------------------------------------------------------------


class PreparedSchema:
    """A schema that is well-formed and not found to be unsatisfiable."""

    def __init__(
        self, schema: dict[str, Any] | bool, documents: Mapping[str, Any] | None = None
    ) -> None:
        """Raises InvalidConstraint, naming the JSON pointer, where the schema is malformed, refers
        to what is not there or is found to be unsatisfiable. `documents` are schemas by URI."""
        self._checked = CheckedSchema(schema, documents or {})
        self._check_patterns(of_keys=True)
        self._rules = Rules(self._checked)
        self.normal = normal_form(self._checked, self._rules.satisfies)

    def regex(self, whitespace: str) -> Regex | None:
        """Its JSON texts as a regex tree, where they are an automaton of modest size."""
        if not self.normal.exact:
            return None
        return whole_regex(self.normal, gap_of(whitespace == "flexible"))

    @cached_property
    def _mask(self) -> Mask:
        found = mask_of(self.normal)
        if found.residuals:
            self._check_patterns(of_keys=False)
            self._rules.watch(found.residuals)
        return found

    @property
    def mask_schema(self) -> dict[str, Any]:
        """It allows every text that the schema allows (in the order of its properties), and those
        more that `residuals` names; it is self-contained (`$ref`s are local) and known to be taken
        by llguidance."""
        return self._mask.schema

    @property
    def residuals(self) -> tuple[Residual, ...]:
        return self._mask.residuals

    @property
    def verifier_factory(self) -> Callable[[], Verifier] | None:
        """Makes a check of one text as it comes; None where the mask holds everything."""
        rules = self._rules  # not all of this, which may be a hundred thousand objects
        return (lambda: Verifier(rules)) if self._mask.residuals else None

    def let_go(self) -> None:
        """Nothing is asked any more, but what `verifier_factory` made."""
        self.normal.let_go()
        if "_mask" in vars(self):
            let_go(self._mask.schema.get("$defs", {}))

    def refuse_residuals(self, why: str) -> None:
        """Raises InvalidConstraint where there are any; `why` says why they must not be there."""
        for first in self.residuals[:1]:
            place = written(first.pointer)
            keyword = first.keyword if place == first.pointer else place.rpartition("/")[2]
            raise invalid(place, f"no mask can hold {keyword!r} {why}")

    def _check_patterns(self, of_keys: bool) -> None:
        """Refuse what a check could not search for."""
        for pointer, pattern, is_of_keys in self._checked.patterns():
            if is_of_keys is of_keys:
                try:
                    searcher(pattern)
                except InvalidConstraint as error:
                    raise invalid(pointer, f"{pattern!r}: {error}") from None
