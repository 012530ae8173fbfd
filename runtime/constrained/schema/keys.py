"""What the schemas of a case say of an object's keys and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.automaton.trees import NOTHING, with_length
from rootlace.runtime.constrained.schema.check import CheckedSchema, Located
from rootlace.runtime.constrained.schema.conjunction import Atom, Conjunction
from rootlace.runtime.constrained.schema.dialect import OWN, pointer_part
from rootlace.runtime.constrained.schema.evaluated import evaluated_keys
from rootlace.runtime.constrained.schema.formats import FORMATS, pattern_of_format
from rootlace.runtime.constrained.schema.pattern import NotTranslated, regex_of_pattern
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
        self.pointer = located.pointer
        self._patterns: dict[str, Any] = leaf.get("patternProperties", {})
        self._unevaluated = leaf.get("unevaluatedProperties", True)
        self._unnamed = [NEVER] if _no_others(leaf.get("propertyNames")) else []
        self.known_names: set[str] | None = set()
        self.known_patterns: list[str] = []
        if self._unevaluated is not True:
            self.known_names, self.known_patterns, sure = evaluated_keys(checked, located)
            if not sure:
                self._note("unevaluatedProperties")

    def _note(self, keyword: str) -> None:
        self._notes.add(Residual(f"{self.pointer}/{keyword}", keyword))

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
        atoms = list(self._unnamed)
        if "additionalProperties" in self._leaf:
            atoms.append(self._atom("additionalProperties"))
        if self._unevaluated is not True and self.known_names is not None:
            atoms.append(self._atom("unevaluatedProperties"))
        return atoms

    def of_pattern(self, pattern: str) -> list[Atom]:
        atoms = list(self._unnamed)
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

    def name_pattern(self) -> str | None:
        """A pattern of the keys that `propertyNames` allows; None if it says nothing more than
        `of_name` and `others` hold. What no pattern can say is noted."""
        names = self._leaf.get("propertyNames", True)
        if isinstance(names, bool) or _no_others(names):
            return None
        said = {key: value for key, value in names.items() if key not in _SILENT}
        if said.get("format", "") not in FORMATS:  # a note to the reader
            said.pop("format", None)
        if not said:
            return None
        found = _pattern_of(said)
        if found is not None:
            return found
        self._note("propertyNames")
        return _content(said)  # that much of it


def _content(said: dict[str, Any]) -> str | None:
    """The pattern or the format among these keywords, as a pattern."""
    if "$ref" in said:  # what stands beside it may mean nothing
        return None
    if "format" in said:
        return pattern_of_format(said["format"])
    return str(said["pattern"]) if "pattern" in said else None


def _pattern_of(said: dict[str, Any]) -> str | None:
    """The strings that satisfy these keywords, as one pattern; None if there may be none."""
    if not set(said) <= _OF_NAMES or {"pattern", "format"} <= set(said):
        return None
    content = _content(said)
    least, most = int(said.get("minLength", 0)), said.get("maxLength")
    if content is None:
        return rf"^[\s\S]{{{least},{'' if most is None else int(most)}}}$"
    if not least and most is None:
        return content
    try:
        fitted = with_length(regex_of_pattern(content), least, None if most is None else int(most))
    except NotTranslated:
        return None
    return None if fitted is None or fitted == NOTHING else f"^(?:{pattern_of(fitted)})$"


_OF_NAMES = frozenset(("pattern", "format", "minLength", "maxLength"))
_SILENT = frozenset(["type", "title", "description", "$comment", "examples", "default"])


def listed_keys(names: Any) -> list[str] | None:
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
    return listed_keys(names) is not None


NEVER = Atom(Located(False, None, None, f"#{OWN}never"))  # type: ignore[arg-type]
FALSE: Conjunction = (NEVER,)
