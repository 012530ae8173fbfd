"""What the schemas of a case say of an object's keys and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootlace.runtime.constrained.schema.check import CheckedSchema, Located
from rootlace.runtime.constrained.schema.conjunction import Atom, Conjunction
from rootlace.runtime.constrained.schema.dialect import OWN, pointer_part
from rootlace.runtime.constrained.schema.evaluated import evaluated_keys
from rootlace.runtime.constrained.schema.residual import Residual
from rootlace.runtime.constrained.schema.search import searcher


class Keys:
    """What one schema says of the values of keys."""

    def __init__(
        self,
        checked: CheckedSchema,
        satisfies: Callable[[Located, Any], bool],
        located: Located,
        leaf: dict[str, Any],
        notes: set[Residual],
    ) -> None:
        """`satisfies` as in `Cases`; `notes` takes in what is not held."""
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
        """Of keys that no schema of the case names and no pattern matches."""
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
