"""Schemas that hold together, brought into a disjunction of plain conjunctions.

`Expander.expand` follows `$ref`, `allOf`, `anyOf` and `oneOf` in place (those that speak of the
same instance) until only keywords remain that look at the instance itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from referencing import Registry

from rootlace.runtime.constrained.schema import formats

Schema = dict[str, Any] | bool

ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "$comment", "$schema", "$id",
        "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
        "contentSchema", "$defs", "definitions",
    )
)  # fmt: skip
ASSERTIONS = frozenset(
    (
        "type", "enum", "const", "format", "pattern", "minLength", "maxLength", "minimum",
        "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items",
        "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
        "maxContains", "unevaluatedItems", "properties", "patternProperties",
        "additionalProperties", "unevaluatedProperties", "propertyNames", "required",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    )
)  # fmt: skip
IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ELSEWHERE = frozenset(("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef"))
_SEARCHING = frozenset(("pattern", "patternProperties", "$ref"))
_MAX_SEARCHED = 20  # characters: what a pattern of exponential cost may be tried on
_MAX_NODES = 50_000
_MAX_STEPS = 20_000
_MAX_ALTERNATIVES = 256


class NotFinite(Exception):
    """The schema is not one that this package writes as a finite automaton; the text says why."""


@dataclass(frozen=True)
class Part:
    """The assertions of a schema; `identity` tells it from others, and `within` are the identities
    of the schemas that hold it in place (`unevaluatedProperties` there can see it)."""

    schema: dict[str, Any]
    identity: int
    within: frozenset[int]


@dataclass(frozen=True)
class Conjunction:
    """Parts that all have to hold; `refs` are the references followed on the way (from above too),
    `loose` the identities of the schemas in which an `anyOf` was resolved by choosing."""

    parts: tuple[Part, ...] = ()
    refs: frozenset[str] = frozenset()
    loose: frozenset[int] = frozenset()

    def values(self, keyword: str) -> Iterator[Any]:
        """What `keyword` says, wherever it occurs."""
        return (part.schema[keyword] for part in self.parts if keyword in part.schema)

    def types(self) -> frozenset[str]:
        """The types that are left; "integer" only where "number" is not."""
        left = set(TYPES)
        for stated in self.values("type"):
            names = {stated} if isinstance(stated, str) else set(stated)
            if not names <= set(TYPES):
                raise NotFinite("a type that is none")
            left &= names | ({"integer"} if "number" in names else set())
        return frozenset(left - {"integer"} if "number" in left else left)


@dataclass
class _Pending:
    """Schemas still to be looked at, and what was found before."""

    queue: list[tuple[Schema, frozenset[int]]]
    parts: list[Part] = field(default_factory=list)
    choices: list[tuple[str, list[Schema], frozenset[int]]] = field(default_factory=list)
    refs: frozenset[str] = frozenset()
    followed: set[tuple[str, frozenset[int]]] = field(default_factory=set)
    loose: frozenset[int] = frozenset()

    def with_schema(self, schema: Schema, within: frozenset[int], loosens: bool) -> _Pending:
        return _Pending(
            [(schema, within)],
            list(self.parts),
            list(self.choices),
            self.refs,
            set(self.followed),
            self.loose | within if loosens else self.loose,
        )


class Expander:
    """Reads one root schema. Raises NotFinite for what is not modelled or goes too far."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # Whoever checks our output may know more or fewer formats than we do.
        formatted = _mention([root], frozenset(("format",)))
        checkers = (formats.checker(), Draft202012Validator.FORMAT_CHECKER, None)
        # An explicit registry: nothing is ever fetched.
        self._validators = [
            Draft202012Validator(root, registry=Registry(), format_checker=checker)
            for checker in (checkers if formatted else (None,))
        ]
        self._steps = 0
        _refuse_elsewhere(root)
        self._patterns = _mention([root], _SEARCHING - {"$ref"})

    def step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise NotFinite("too many steps")

    def valid(self, value: Any, schemas: list[Schema]) -> bool:
        """Whether `value` satisfies all of `schemas`, whichever formats are checked."""
        return all(self._verdicts(value, schemas))

    def _verdicts(self, value: Any, schemas: list[Schema]) -> Iterator[bool]:
        """What validators with and without a check of formats say."""
        self.step()
        if self._patterns and _longest(value) > _MAX_SEARCHED and _mention(schemas, _SEARCHING):
            raise NotFinite("a pattern and a long value")
        for validator in self._validators:
            try:
                yield all(validator.evolve(schema=schema).is_valid(value) for schema in schemas)
            except Exception as error:  # a malformed schema may raise anything
                raise NotFinite(f"the validator fails: {error}") from None

    def expand(self, schemas: list[Schema], refs: frozenset[str]) -> list[Conjunction]:
        """The alternatives whose union is what satisfies all of `schemas`. `refs` are the
        references that led here: to meet one of them again is recursion."""
        start = _Pending([(schema, frozenset()) for schema in schemas])
        start.refs = refs
        found: list[Conjunction] = []
        self._expand(start, refs, found)
        return found

    def enumerated(self, schemas: list[Schema]) -> list[Any] | None:
        """The values that `schemas` allow where one of them (or one that it refers to or holds in
        `allOf`) lists them; None where none does."""
        parts: list[dict[str, Any]] = []
        listed: list[Any] | None = None
        seen: set[int] = set()
        queue = list(schemas)
        while queue:
            self.step()
            schema = queue.pop()
            if schema is False:
                return []
            if schema is True or id(schema) in seen:
                continue
            seen.add(id(schema))
            part = {k: v for k, v in schema.items() if k not in ANNOTATIONS}
            if listed is None and "const" in schema:
                listed = [part.pop("const")]
            elif listed is None and isinstance(schema.get("enum"), list):
                listed = part.pop("enum")
            if isinstance(schema.get("$ref"), str):
                queue.append(self.resolve(part.pop("$ref")))
            if isinstance(schema.get("allOf"), list):
                queue.extend(part.pop("allOf"))
            parts.append(part)
        if listed is None:
            return None
        if any(key.startswith("unevaluated") for part in parts for key in part):
            return [value for value in listed if self.valid(value, schemas)]
        # What lists the values need not be asked again: it would take quadratic time.
        rest: list[Schema] = [part for part in parts if part]
        return [value for value in listed if self.valid(value, rest)]

    def resolve(self, ref: str) -> Schema:
        """The schema that a reference into this document points at."""
        if not ref.startswith("#") or (ref != "#" and not ref.startswith("#/")):
            raise NotFinite(f"$ref {ref!r} leaves the document")
        found: Any = self._root
        for token in ref.split("/")[1:]:
            name = unquote(token).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise NotFinite(f"$ref {ref!r} points at nothing")
        if not isinstance(found, (dict, bool)):
            raise NotFinite(f"$ref {ref!r} points at no schema")
        return found

    def disjoint(self, a: Conjunction, b: Conjunction, depth: int = 0) -> bool:
        """Whether it is certain that nothing satisfies both."""
        self.step()
        if depth > 4:
            return False
        ours, theirs = a.types(), b.types()
        shared = ours & theirs
        if "integer" in ours | theirs and "number" in ours | theirs:
            shared |= {"integer"}
        if not shared:
            return True
        for one, other in ((a, b), (b, a)):
            listed = self.enumerated([part.schema for part in one.parts])
            if listed is not None:
                rest: list[Schema] = [part.schema for part in other.parts]
                return not any(any(self._verdicts(value, rest)) for value in listed)
        return shared == {"object"} and self._objects_disjoint(a, b, depth)

    def _objects_disjoint(self, a: Conjunction, b: Conjunction, depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            needed, allowed = _required(one), _allowed(other)
            if allowed is not None and any(name not in allowed for name in needed):
                return True
        for name in _required(a) & _required(b):
            sides = []
            for side in (a, b):
                held = [
                    properties[name] for properties in side.values("properties")
                    if isinstance(properties, dict) and name in properties
                ]  # fmt: skip
                try:
                    sides.append(self.expand(held, side.refs))
                except NotFinite:
                    break
            if len(sides) == 2 and all(
                self.disjoint(p, q, depth + 1) for p in sides[0] for q in sides[1]
            ):
                return True
        return False

    def _expand(self, at: _Pending, above: frozenset[str], found: list[Conjunction]) -> None:
        self.step()
        while at.queue:
            schema, within = at.queue.pop()
            if schema is True:
                continue
            if schema is False:
                return
            if not isinstance(schema, dict):
                raise NotFinite("a schema that is neither an object nor a boolean")
            self._take(schema, within, at, above)
        if not at.choices:
            found.append(Conjunction(tuple(at.parts), at.refs, at.loose))
            if len(found) > _MAX_ALTERNATIVES:
                raise NotFinite("too many alternatives")
            return
        kind, options, within = at.choices.pop(0)
        groups: list[range] = []
        for option in options:
            start = len(found)
            self._expand(at.with_schema(option, within, kind == "anyOf"), above, found)
            groups.append(range(start, len(found)))
        if kind == "oneOf" and len(options) > 1:
            for i, group in enumerate(groups):
                for other in groups[i + 1 :]:
                    if not all(self.disjoint(found[p], found[q]) for p in group for q in other):
                        raise NotFinite("oneOf whose options may overlap")

    def _take(
        self, schema: dict[str, Any], within: frozenset[int], at: _Pending, above: frozenset[str]
    ) -> None:
        """Split one schema into a part and what it holds in place."""
        self.step()
        unknown = schema.keys() - ANNOTATIONS - ASSERTIONS - IN_PLACE
        if unknown:
            raise NotFinite(f"keywords {sorted(map(str, unknown))}")
        inside = within | {id(schema)}
        own = {keyword: value for keyword, value in schema.items() if keyword in ASSERTIONS}
        at.parts.append(Part(own, id(schema), within))
        if "$ref" in schema:
            ref = schema["$ref"]
            if not isinstance(ref, str):
                raise NotFinite("$ref that is no string")
            if ref in above:
                raise NotFinite(f"recursion through {ref!r}")
            if (ref, inside) not in at.followed:
                at.followed.add((ref, inside))
                at.refs |= {ref}
                at.queue.append((self.resolve(ref), inside))
        for keyword in ("allOf", "anyOf", "oneOf"):
            held = schema.get(keyword, [])
            if not isinstance(held, list):
                raise NotFinite(f"{keyword} that is no array")
            if keyword == "allOf":
                at.queue.extend((inner, inside) for inner in reversed(held))
            elif keyword in schema:
                at.choices.append((keyword, held, inside))


def _required(conjunction: Conjunction) -> frozenset[str]:
    return frozenset(name for names in conjunction.values("required") for name in names)


def _allowed(conjunction: Conjunction) -> frozenset[str] | None:
    """The names that closed parts leave; None where no part is closed."""
    allowed: frozenset[str] | None = None
    for part in conjunction.parts:
        if part.schema.get("additionalProperties") is False and not part.schema.get(
            "patternProperties"
        ):
            names = frozenset(part.schema.get("properties", ()))
            allowed = names if allowed is None else allowed & names
    return allowed


def _longest(value: Any) -> int:
    """The length of the longest string in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max((max(len(k), _longest(v)) for k, v in value.items()), default=0)
    return max(map(_longest, value), default=0) if isinstance(value, list) else 0


def _mention(schemas: list[Schema], keywords: frozenset[str]) -> bool:
    """Whether one of the keywords is somewhere in the schemas (not: in what they refer to)."""
    queue: list[Any] = list(schemas)
    while queue:
        node = queue.pop()
        if isinstance(node, dict):
            if not keywords.isdisjoint(node):
                return True
            queue.extend(node.values())
        elif isinstance(node, list):
            queue.extend(node)
    return False


def _refuse_elsewhere(root: Schema) -> None:
    """Raise for identifiers below the root, dynamic references and formats that are not ours.

    Also where these only look like it (within `default` or `examples`): nothing is lost but speed.
    """
    queue: list[Any] = [root]
    count = 0
    while queue:
        node = queue.pop()
        count += 1
        if count > _MAX_NODES:
            raise NotFinite("too large")
        if isinstance(node, list):
            queue.extend(node)
        elif isinstance(node, dict):
            if any(isinstance(node.get(keyword), str) for keyword in _ELSEWHERE):
                raise NotFinite("anchors or dynamic references")
            if node is not root and isinstance(node.get("$id"), str):
                raise NotFinite("$id below the root")
            name = node.get("format")
            numeric = node.get("type") in ("integer", "number", "boolean")
            if isinstance(name, str) and name not in formats.FORMATS and not numeric:
                raise NotFinite(f"format {name!r}")
            queue.extend(node.values())
