"""What a conjunction says about the members of an object or array."""

from __future__ import annotations

from typing import Any

from rootlace.runtime.constrained.schema.expansion import Conjunction, NotFinite, Part, Schema


class Members:
    """The members that `found` allows, and the schemas each of them has to satisfy."""

    def __init__(self, found: Conjunction) -> None:
        self._found = found

    def names(self) -> list[str]:
        """The properties there may be, in the order of the schema. Raises NotFinite for an object
        that is open."""
        allowed: set[str] | None = None
        for part in self._found.parts:
            closed = self._closed_to(part)
            if closed is not None:
                allowed = closed if allowed is None else allowed & closed
        if allowed is None:
            raise NotFinite("an open object")
        for keyword in ("dependentRequired", "dependentSchemas", "patternProperties"):
            if any(self._found.values(keyword)):
                raise NotFinite(keyword)
        order = dict.fromkeys(name for part in self._found.parts for name in _properties(part))
        return [name for name in order if name in allowed]

    def required(self) -> set[str]:
        needed: set[str] = set()
        for names in self._found.values("required"):
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise NotFinite("required that is no list of names")
            needed.update(names)
        return needed

    def schemas_of(self, name: str) -> list[Schema]:
        """All that the property has to satisfy."""
        held: list[Schema] = []
        for part in self._found.parts:
            properties = _properties(part)
            if name in properties:
                held.append(properties[name])
            elif "additionalProperties" in part.schema:
                held.append(part.schema["additionalProperties"])
        return held

    def prefix(self, most: int | None) -> tuple[list[list[Schema]], int | None]:
        """The schemas of the elements that have a place of their own, and the greatest length."""
        longest = max((len(_prefix(part)) for part in self._found.parts), default=0)
        for part in self._found.parts:
            limit = self._evaluated_items(part)
            if limit is not None:
                most = limit if most is None else min(most, limit)
        if most is not None:
            longest = min(longest, most)
        places: list[list[Schema]] = []
        for i in range(longest):
            held: list[Schema] = []
            for part in self._found.parts:
                own = _prefix(part)
                if i < len(own):
                    held.append(own[i])
                elif "items" in part.schema:
                    held.append(part.schema["items"])
            places.append(held)
        return places, most

    def rest(self) -> list[Schema]:
        """What the elements after those have to satisfy; empty: anything."""
        return list(self._found.values("items"))

    def _closed_to(self, part: Part) -> set[str] | None:
        """The names to which a part alone restricts the object."""
        if part.schema.get("additionalProperties") is False:
            return set(_properties(part))
        rule = part.schema.get("unevaluatedProperties", True)
        if rule is True:
            return None
        inner = self._scope(part, rule, "unevaluatedProperties")
        if any("additionalProperties" in other.schema for other in inner):
            raise NotFinite("unevaluatedProperties beside additionalProperties")
        return {name for other in inner for name in _properties(other)}

    def _evaluated_items(self, part: Part) -> int | None:
        """How many elements `unevaluatedItems` of a part leaves; None: any number."""
        rule = part.schema.get("unevaluatedItems", True)
        if rule is True:
            return None
        inner = self._scope(part, rule, "unevaluatedItems")
        if any("items" in other.schema for other in inner):
            return None
        return max(len(_prefix(other)) for other in inner)

    def _scope(self, part: Part, rule: Any, keyword: str) -> list[Part]:
        """The parts whose members count as evaluated for `keyword` in `part`."""
        if rule is not False:
            raise NotFinite(f"{keyword} that is a schema")
        inner = [other for other in self._found.parts if other is part or _holds(part, other)]
        if any(other.schema.get(keyword, False) is not False for other in inner):
            raise NotFinite(f"{keyword} within {keyword}")
        if part.identity in self._found.loose:
            # With anyOf, members may count as evaluated by an option other than the chosen one.
            raise NotFinite(f"{keyword} beside anyOf")
        return inner


def _holds(outer: Part, inner: Part) -> bool:
    return outer.identity in inner.within


def _properties(part: Part) -> dict[str, Schema]:
    found = part.schema.get("properties", {})
    if not isinstance(found, dict):
        raise NotFinite("properties that are no object")
    return found


def _prefix(part: Part) -> list[Schema]:
    found = part.schema.get("prefixItems", [])
    if not isinstance(found, list):
        raise NotFinite("prefixItems that are no array")
    return found
