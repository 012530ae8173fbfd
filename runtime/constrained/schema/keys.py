"""What the schemas of a case say of an object's keys and their values."""

from __future__ import annotations

from typing import Any, Protocol

from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.schema.check import CheckedSchema, Located
from rootlace.runtime.constrained.schema.conjunction import Atom, Conjunction
from rootlace.runtime.constrained.schema.evaluated import evaluated_keys
from rootlace.runtime.constrained.schema.formats import FORMATS, pattern_of_format
from rootlace.runtime.constrained.schema.pattern import NotTranslated, regex_of_pattern
from rootlace.runtime.constrained.schema.residual import Residual
from rootlace.runtime.constrained.schema.search import searcher
from rootlace.runtime.constrained.schema.trees import NOTHING, with_length


class Lookup(Protocol):
    """What is asked of `Shapes`."""

    checked: CheckedSchema

    def child(self, parent: Located, path: str, schema: Any, /) -> Atom: ...

    def satisfies(self, located: Located, value: Any, /) -> bool: ...


class Keys:
    """What one schema says of the values of keys."""

    def __init__(
        self, shapes: Lookup, located: Located, leaf: dict[str, Any], notes: set[Residual]
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
            self._names, self._known, sure = evaluated_keys(shapes.checked, located)
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
        return self._shapes.child(self._located, "/".join(("", keyword, *path)), value)

    def of_name(self, name: str) -> list[Atom]:
        atoms = []
        if name in self._leaf.get("properties", {}):
            atoms.append(self._atom("properties", name))
        atoms += [self._atom("patternProperties", p) for p in self._patterns if searcher(p)(name)]
        if not atoms and "additionalProperties" in self._leaf:
            atoms.append(self._atom("additionalProperties"))
        if "propertyNames" in self._leaf:
            names = self._atom("propertyNames").located
            if not self._shapes.satisfies(names, name):
                atoms.append(NEVER)
        if self._names is None or self._unevaluated is True or name in self._names:
            return atoms
        if not any(searcher(pattern)(name) for pattern in self._known):
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
            atoms.append(NEVER)
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
        open_ = self._unevaluated is True or self._names is None
        if not open_ and pattern not in self._known:
            self._note("unevaluatedProperties")
        names = self._leaf.get("propertyNames")
        if _no_others(names):
            atoms.append(NEVER)
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


NEVER = Atom(Located(False, None, None, "#!never"))  # type: ignore[arg-type]
FALSE: Conjunction = (NEVER,)
