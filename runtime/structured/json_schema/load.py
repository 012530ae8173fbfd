"""Check a schema for well-formedness, and resolve its references."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jsonschema
import jsonschema_rs
import jsonschema_specifications
import msgspec
from jsonschema.exceptions import best_match
from msgspec.structs import replace
from referencing import Registry, Resource, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from rootlace.runtime.structured.json_schema.pattern import searcher
from rootlace.types.constraint_kinds import names_any, older_keywords
from rootlace.wire.errors import InvalidConstraint

# Dialect ------------------------------------------------------------------------------------------
#
# Drafts of JSON Schema: the draft of a schema, and its keywords in the newest shape.


ONE = frozenset(
    [
        "additionalProperties", "additionalItems", "contains", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
    ]
)  # fmt: skip
"""Keywords that hold one schema."""
LIST = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
"""Keywords that hold a list of schemas."""
MAP = frozenset(
    [
        "$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties",
        "properties",
    ]
)  # fmt: skip
"""Keywords that hold schemas by name."""
IN_PLACE = frozenset(
    ["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"]
)
"""Keywords whose subschemas apply to the same value as the schema."""
EXCLUDED = "!excluded"
"""Generated keyword for a negated `const` or `enum`: the values that are not allowed."""
UNMET = "!unmet"
"""Generated keyword for a negated keyword that no mask holds: the keyword and its value."""
OWN = "\0"
"""Mark of pointers to generated schemas, behind the pointer to their origin."""
_READ_WITH_OTHERS = {
    "exclusiveMinimum": 4, "exclusiveMaximum": 4, "then": 7, "else": 7,
    "minContains": 2019, "maxContains": 2019,
}  # fmt: skip
"""Keywords without a function in jsonschema, and the first draft that gives each a meaning."""


def is_tuple(schema: dict[str, Any]) -> bool:
    """Return whether `items` of a schema is a list, as in drafts before 2020-12."""
    return isinstance(schema.get("items"), list)


def _any_draft() -> Specification[Any]:
    """Return the specification that reads identifiers as 2020-12 and draft 4 do: `id` counts if it
    names a place."""

    def anchors(specification: Specification[Any], contents: Any) -> list[Any]:
        older = isinstance(contents, dict) and isinstance(contents.get("id"), str)
        return [*DRAFT202012.anchors_in(contents), *(DRAFT4.anchors_in(contents) if older else ())]

    def below(contents: Any) -> list[Any]:
        return [one for _, one in subschemas(contents)] if isinstance(contents, dict) else []

    made: Any = Specification  # its fields have other names than its arguments
    return made(
        name="undated",
        id_of=DRAFT202012.id_of,
        subresources_of=below,
        maybe_in_subresource=DRAFT201909.maybe_in_subresource,
        anchors_in=anchors,
    )


class Dialect(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Draft of JSON Schema. `validator` is jsonschema's class for it."""

    number: int  # 4, 6, 7, 2019, 2020
    validator: Any
    specification: Specification[Any]
    extra: tuple[str, ...] = ()

    @cached_property
    def keywords(self) -> frozenset[str]:
        """Keywords that assert something in this draft."""
        others = (key for key, since in _READ_WITH_OTHERS.items() if self.number >= since)
        return frozenset([*self.validator.VALIDATORS, *others, *self.extra])


NEWEST = Dialect(2020, jsonschema.Draft202012Validator, DRAFT202012)
OURS = replace(NEWEST, extra=(EXCLUDED, UNMET))
"""Dialect of schemas that this package writes."""
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_DIALECTS = {
    dialect.validator.META_SCHEMA["$schema"].rstrip("#"): dialect
    for dialect in (
        Dialect(4, jsonschema.Draft4Validator, DRAFT4),
        Dialect(6, jsonschema.Draft6Validator, DRAFT6),
        Dialect(7, jsonschema.Draft7Validator, DRAFT7),
        Dialect(2019, jsonschema.Draft201909Validator, DRAFT201909),
        NEWEST,
    )
}


DRAFT_7 = _DIALECTS["http://json-schema.org/draft-07/schema"]


def _either(keyword: str, older: Any, is_older: Callable[[dict[str, Any]], bool]) -> Any:
    """Return jsonschema's function for a keyword, or an older draft's function for older forms."""
    newer = NEWEST.validator.VALIDATORS.get(keyword)

    def check(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Any:
        chosen = older.VALIDATORS.get(keyword) if is_older(schema) else newer
        return chosen(validator, value, instance, schema) if chosen is not None else ()

    return check


def _of_bound(exclusive: str, bound: str) -> dict[str, Any]:
    def is_older(schema: dict[str, Any]) -> bool:
        return isinstance(schema.get(exclusive), bool)

    older = jsonschema.Draft4Validator
    return {keyword: _either(keyword, older, is_older) for keyword in (exclusive, bound)}


def _is_of_any_type(_checker: Any, _instance: Any) -> bool:
    return True


UNDATED = replace(
    NEWEST,
    validator=jsonschema.validators.extend(
        NEWEST.validator,
        {
            "items": _either("items", DRAFT_7.validator, is_tuple),
            "additionalItems": _either("additionalItems", DRAFT_7.validator, is_tuple),
            "dependencies": DRAFT_7.validator.VALIDATORS["dependencies"],
            "$recursiveRef": jsonschema.Draft201909Validator.VALIDATORS["$recursiveRef"],
            **{k: v for pair in _EXCLUSIVE.items() for k, v in _of_bound(*pair).items()},
        },
        type_checker=NEWEST.validator.TYPE_CHECKER.redefine("any", _is_of_any_type),
    ),
    specification=_any_draft(),
)
"""Dialect of a schema that names no draft and has keywords of older drafts. These keywords are read
as in their drafts, all other keywords as in the newest."""


def undated_as_today(flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a schema of the dialect `UNDATED` into keywords of draft 7 and keywords of 2020-12.
    Booleans for exclusive bounds and the type "any" are in neither part."""
    rest = {k: v for k, v in flat.items() if k not in _EXCLUSIVE or not isinstance(v, bool)}
    types: Any = rest.get("type")
    if names_any(types):
        rest["type"] = [] if types == "any" else [one for one in types if one != "any"]
        if not rest["type"]:
            del rest["type"]
    names = ("dependencies", "additionalItems")
    older: dict[str, Any] = {name: rest.pop(name) for name in names if name in rest}
    if is_tuple(flat):
        older["items"] = rest.pop("items")
    return older, rest


def dialect_of(schema: Any, default: Dialect = NEWEST) -> Dialect:
    """Return the draft that `$schema` names; `default` if it names no known draft."""
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        return _DIALECTS.get(schema["$schema"].rstrip("#"), default)
    return default


def keywords(schema: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return the assertions of a schema in the shape of 2020-12, without keywords that assert
    nothing in the schema's own draft."""
    if dialect.number <= 7 and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    found = {key: value for key, value in schema.items() if key in dialect.keywords}
    if isinstance(found.get("items"), list):  # refused where the draft has no such thing
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)
    for key, needed in found.pop("dependencies", {}).items():
        into = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        found.setdefault(into, {})[key] = needed
    for exclusive, bound in _EXCLUSIVE.items():
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if names_any(found.get("type")):
        del found["type"]
    return found


def subschemas(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the schemas directly below one: (path below it, as in a pointer; the schema)."""
    found: list[tuple[str, Any]] = []
    for key, value in schema.items():
        if key in ONE and isinstance(value, dict | bool):
            found.append((f"/{key}", value))
        elif key in LIST and isinstance(value, list):
            found += [(f"/{key}/{index}", item) for index, item in enumerate(value)]
        elif key in MAP and isinstance(value, dict):
            found += [
                (f"/{key}/{pointer_part(name)}", item)
                for name, item in value.items()
                if isinstance(item, dict | bool)
            ]
    return found


def pointer_part(name: str) -> str:
    """Return a name as a part of a JSON pointer, without the mark `OWN`."""
    return without_own(name.replace("~", "~0").replace("/", "~1"))


def without_own(pointer: str) -> str:
    """Return a user's pointer with the mark `OWN` escaped."""
    return pointer.replace(OWN, "~2")


# Check --------------------------------------------------------------------------------------------


MAX_DEPTH = 128
"""Bound of a schema's nesting in JSON; the checks of values recurse along the schema."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_UNSUPPORTED = {"http://json-schema.org/draft-03/schema"}
_ANYTHING = {
    "$schema", "$comment", "const", "default", "deprecated", "description", "examples", "readOnly",
    "title", "writeOnly",
}  # fmt: skip
"""Keywords that may have any value (a malformed note excludes no value), and `$schema`, which is
checked separately."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


@dataclass(eq=False)
class Located:
    """Schema at its place, which resolves its references, with a name for messages. `pointer` is
    unique among the schemas that one root reaches, and identifies the schema."""

    schema: Any
    resolver: Any
    dialect: Dialect
    pointer: str

    @cached_property
    def keywords(self) -> dict[str, Any]:
        """Return the assertions of the schema in keywords of draft 2020-12; empty for a boolean."""
        return keywords(self.schema, self.dialect) if isinstance(self.schema, dict) else {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Located) and self.pointer == other.pointer

    def __hash__(self) -> int:
        return hash(self.pointer)


class CheckedSchema:
    """Well-formed schema with all schemas that it refers to, immutable except for a memo of
    references. Raises InvalidConstraint with the pointer of the fault."""

    def __init__(self, schema: dict[str, Any] | bool, documents: Mapping[str, Any]) -> None:
        self.schema = schema
        self.dialect = dialect_of(schema)
        if any(True for _ in older_keywords(schema)):
            self.dialect = dialect_of(schema, UNDATED)
        if isinstance(schema, dict) and str(schema.get("$schema", "")).rstrip("#") in _UNSUPPORTED:
            raise invalid("#/$schema", f"{schema['$schema']} is not supported")
        self._names: dict[int, str] = {}
        self._schemas: list[Any] = []
        self._dialects: dict[int, Dialect] = {}
        self._closures: dict[bool, list[Located]] = {}
        self._targets: dict[tuple[str, str], Located] = {}
        self._name_all(schema, "#")
        _check_shape(schema, self.dialect)
        self.registry: Registry[Any] = jsonschema_specifications.REGISTRY
        for uri, document in documents.items():
            self._name_all(document, f"{uri}#")
            added = Resource.from_contents(document, default_specification=DRAFT202012)
            self.registry = self.registry.with_resource(uri, added)
        resource = self.dialect.specification.create_resource(schema)
        uri = resource.id() or ""
        self.registry = self.registry.with_resource(uri, resource)
        self.root = Located(schema, self.registry.resolver(uri), self.dialect, "#")
        self._check_references()

    def child(self, parent: Located, path: str, schema: Any) -> Located:
        """Return the schema at `path` ("/items") right below another."""
        pointer = self._pointer(schema, parent.pointer + path)
        if not isinstance(schema, dict):
            return Located(schema, parent.resolver, parent.dialect, pointer)
        # The draft is that of its place, also within a generated schema.
        dialect = dialect_of(schema, parent.dialect)
        dialect = self._dialects.setdefault(id(schema), dialect)
        resource = dialect.specification.create_resource(schema)
        return Located(schema, parent.resolver.in_subresource(resource), dialect, pointer)

    def members(self, located: Located, key: str | int) -> list[Located]:
        """Return the schemas right below `located` that apply to a property (its key) or an item
        (its index)."""
        found, schema = [], located.keywords
        if isinstance(key, int):
            prefix = schema.get("prefixItems", ())
            if key < len(prefix):
                return [self.child(located, f"/prefixItems/{key}", prefix[key])]
            return [self.child(located, "/items", schema["items"])] if "items" in schema else []
        if key in schema.get("properties", {}):
            found.append(
                self.child(located, f"/properties/{pointer_part(key)}", schema["properties"][key])
            )
        for pattern, below in schema.get("patternProperties", {}).items():
            if searcher(pattern)(key):
                path = f"/patternProperties/{pointer_part(pattern)}"
                found.append(self.child(located, path, below))
        if not found and "additionalProperties" in schema:
            below = schema["additionalProperties"]
            found.append(self.child(located, "/additionalProperties", below))
        return found

    def target(self, source: Located, keyword: str = "$ref") -> Located:
        """Return the target of `$ref`, or of another `keyword` of that kind. Raises
        InvalidConstraint."""
        ref = source.schema[keyword]
        key = (source.pointer, keyword)
        found = self._targets.get(key)
        if found is not None:
            return found
        place = f"{source.pointer}/{keyword}"
        try:
            resolved = source.resolver.lookup(ref)
        except (Unresolvable, ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise invalid(place, f"nothing is known of {ref!r}; nothing is fetched") from None
        if not isinstance(resolved.contents, dict | bool):
            raise invalid(place, f"{ref!r} leads to something that is no schema")
        inside = ref.startswith("#/") and source.pointer.startswith("#")
        pointer = without_own(ref) if inside else f"{place}({without_own(ref)})"
        pointer = self._pointer(resolved.contents, pointer)
        dialect = dialect_of(resolved.contents, source.dialect)
        found = Located(resolved.contents, resolved.resolver, dialect, pointer)
        self._targets[key] = found
        return found

    def dynamic_targets(self, source: Located) -> list[Located]:
        """Return all schemas that `$dynamicRef` may lead to. The first is the target if no schema
        on the way overrides the anchor."""
        first = self.target(source, "$dynamicRef")
        anchor = source.schema["$dynamicRef"].rpartition("#")[2]
        if not isinstance(first.schema, dict) or first.schema.get("$dynamicAnchor") != anchor:
            return [first]
        found = [first]
        for located in self._closure(unused=True):
            named = isinstance(located.schema, dict) and located.schema.get("$dynamicAnchor")
            if named == anchor and located not in found:
                found.append(located)
        return found

    def neighbours(self, located: Located, unused: bool = False) -> Iterator[tuple[str, Located]]:
        """Yield the schemas that a schema refers to or contains, each with the keyword. `unused`:
        definitions, too."""
        if not isinstance(located.schema, dict):
            return
        for keyword in _REFERENCES:
            refers = isinstance(located.schema.get(keyword), str)
            if refers and keyword in located.dialect.keywords:
                yield keyword, self.target(located, keyword)
        if "$ref" in located.schema and located.dialect.number <= 7:
            return
        for path, schema in subschemas(located.schema):
            keyword = path.split("/")[1]
            if unused or keyword in located.dialect.keywords:
                yield keyword, self.child(located, path, schema)

    # ------------------------------------------------------------ checks

    def _check_references(self) -> None:
        """Raise InvalidConstraint for a reference to nothing, or for a cycle of mere references."""
        edges: dict[Located, list[Located]] = {}
        for located in self._closure():
            edges[located] = [
                other
                for keyword, other in self.neighbours(located)
                if keyword == "$ref"
                or keyword in IN_PLACE
                or (keyword == "$dynamicRef" and len(self.dynamic_targets(located)) == 1)
            ]
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            raise invalid(
                error.args[1][0].pointer,
                "the schema refers to itself without taking in a part of the value",
            ) from None

    def is_dynamic(self) -> bool:
        """Return whether the target of some reference depends on the way to the reference."""
        return any(
            keyword == "$recursiveRef"
            or (keyword == "$dynamicRef" and len(self.dynamic_targets(one)) > 1)
            for one in self._closure()
            for keyword, _ in self.neighbours(one)
        )

    def mentions(self, keyword: str) -> bool:
        """Return whether any schema uses `keyword`."""
        return any(isinstance(o.schema, dict) and keyword in o.schema for o in self._closure())

    def containing(self, places: Iterable[str]) -> set[Located]:
        """Return the schemas that contain one of `places`, or refer to such a schema."""
        above: dict[Located, list[Located]] = {}
        for located in self._closure():
            for _, other in self.neighbours(located):
                above.setdefault(other, []).append(located)
        inside = set()
        for place in places:
            while "/" in place:
                place = place.rpartition("/")[0]
                inside.add(place)
        start = [located for located in self._closure() if located.pointer in inside]
        return set(reached(start, lambda one: above.get(one, ())))

    def patterns(self) -> Iterator[tuple[str, str, bool]]:
        """Yield (pointer, pattern, whether the pattern is for keys) of every pattern in use."""
        for located in self._closure():
            if isinstance(located.schema, dict):
                if isinstance(located.schema.get("pattern"), str):
                    yield f"{located.pointer}/pattern", located.schema["pattern"], False
                for pattern in located.schema.get("patternProperties", ()):
                    yield f"{located.pointer}/patternProperties", pattern, True

    def _closure(self, unused: bool = False) -> list[Located]:
        """Return the root, and every schema that the root contains or refers to."""
        if unused not in self._closures:
            self._closures[unused] = reached(
                [self.root], lambda one: [other for _, other in self.neighbours(one, unused)]
            )
        return self._closures[unused]

    def _name_all(self, document: Any, name: str) -> None:
        """Remember the pointer of every dict of a document. Raises InvalidConstraint if nested too
        deep."""
        queue = [(document, name, 0)]
        while queue:
            value, pointer, depth = queue.pop()
            if depth > MAX_DEPTH:
                raise invalid(pointer[:200], f"nested more than {MAX_DEPTH} deep")
            if isinstance(value, dict):
                self._names.setdefault(id(value), pointer)
                queue += [(v, f"{pointer}/{pointer_part(k)}", depth + 1) for k, v in value.items()]
            elif isinstance(value, list):
                queue += [(v, f"{pointer}/{i}", depth + 1) for i, v in enumerate(value)]

    def _pointer(self, schema: Any, otherwise: str) -> str:
        """Return the one name of a dict, by whatever path it was reached."""
        if not isinstance(schema, dict):
            return otherwise
        name = self._names.get(id(schema))
        if name is None:
            name = self._names[id(schema)] = otherwise
            self._schemas.append(schema)  # so that its id stays its own
        return name


def reached(
    start: Iterable[Located], following: Callable[[Located], Iterable[Located]]
) -> list[Located]:
    """Return `start` and all schemas reachable by `following`, each once, `start` first."""
    found = dict.fromkeys(start)
    queue = list(found)
    while queue:
        for other in following(queue.pop()):
            if other not in found:
                found[other] = None
                queue.append(other)
    return list(found)


def invalid(pointer: str, reason: str) -> InvalidConstraint:
    return InvalidConstraint(f"json_schema: {pointer}: {reason}")


# ---------------------------------------------------------------- shape


def _check_shape(schema: Any, dialect: Dialect) -> None:
    """Check against the metaschema, one schema at a time, also schemas at places unknown to the
    metaschema."""
    queue = [(schema, dialect, "#")]
    while queue:
        node, dialect, pointer = queue.pop()
        if isinstance(node, bool):
            if dialect.number == 4 and pointer == "#":
                raise invalid(pointer, "draft-04 has no boolean schemas")
            continue
        if not isinstance(node, dict):
            raise invalid(pointer, f"{type(node).__name__} is not a schema (an object or boolean)")
        if not isinstance(node.get("$schema", ""), str):
            raise invalid(f"{pointer}/$schema", "it must be a string")
        dialect = dialect_of(node, dialect)
        for key in _BOUNDS & node.keys():
            if isinstance(node[key], int | float) and not abs(node[key]) <= sys.float_info.max:
                raise invalid(f"{pointer}/{key}", "a number beyond the range of floats")
        flat = _without_subschemas(node)
        if dialect is UNDATED:
            if "prefixItems" in flat and is_tuple(flat):
                raise invalid(f"{pointer}/items", "a list beside prefixItems is of no draft")
            older, flat = undated_as_today(flat)
            _check_flat(older, DRAFT_7, pointer)
        _check_flat(flat, dialect, pointer)
        queue += [(below, dialect, pointer + path) for path, below in subschemas(node)]


def _without_subschemas(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with `{}` for its subschemas, and without keywords that constrain nothing."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if key in MAP and isinstance(value, dict):
            value = {name: {} if isinstance(v, dict | bool) else v for name, v in value.items()}
        elif key in LIST and isinstance(value, list):
            value = [{} if isinstance(v, dict | bool) else v for v in value]
        elif key in ONE and isinstance(value, dict):
            value = {}
        elif key == "enum" and isinstance(value, list) and value:
            value = value[:1]  # draft-04 wants each once
        if key not in _ANYTHING:
            flat[key] = value
    return flat


def _check_flat(flat: dict[str, Any], dialect: Dialect, pointer: str) -> None:
    with suppress(ValueError):  # not Unicode, for example: the other library reports it
        if _metaschema(dialect).is_valid(flat):
            return
    metaschema = dialect.validator(dialect.validator.META_SCHEMA, format_checker=None)
    errors = sorted(metaschema.iter_errors(flat), key=lambda error: list(map(str, error.path)))
    for error in errors[:1]:
        # The fault of the likeliest alternative says more than that none fits.
        error = best_match([error]) or error
        error = error.context[0] if error.context else error
        path = "".join(f"/{pointer_part(str(part))}" for part in error.absolute_path)
        while errors:  # errors and their parts refer to each other
            one = errors.pop()
            one.parent = None
            errors += one.context
        raise invalid(pointer + path, error.message[:300])


@cache
def _metaschema(dialect: Dialect) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(dialect.validator.META_SCHEMA, validate_formats=False)


# Evaluated ----------------------------------------------------------------------------------------
#
# Members of a value that a schema may evaluate, over all its alternatives (2020-12, sections 11.2
# and 11.3).


_ALTERNATIVES = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$dynamicRef")
_APPLIED = frozenset(["$ref", "allOf", *_ALTERNATIVES])


def _in_place(checked: CheckedSchema, root: Located) -> tuple[list[Located], bool]:
    """Return the schemas that may apply to the value of `root`, `root` first, and whether all of
    them apply."""

    def applied(located: Located) -> list[Located]:
        below = [one for key, one in checked.neighbours(located) if key in _APPLIED]
        if "$dynamicRef" in located.keywords:
            below += checked.dynamic_targets(located)
        return below

    found = reached([root], applied)
    return found, not any(key in one.keywords for one in found for key in _ALTERNATIVES)


def evaluated_keys(
    checked: CheckedSchema, root: Located
) -> tuple[set[str] | None, list[str], bool]:
    """Return names and patterns of the keys that may be evaluated, and whether the keys always are.
    Names are None if any key may be evaluated."""
    names: set[str] = set()
    patterns: list[str] = []
    schemas, sure = _in_place(checked, root)
    for located in schemas:
        schema = located.keywords
        if "$recursiveRef" in schema or "additionalProperties" in schema:
            return None, [], sure
        if located != root and schema.get("unevaluatedProperties", False) is not False:
            return None, [], False
        names |= set(schema.get("properties", ()))
        patterns += schema.get("patternProperties", ())
    return names, patterns, sure


def evaluated_items(checked: CheckedSchema, root: Located) -> tuple[int | None, bool]:
    """Return how many leading items may be evaluated (None: all), and whether these items always
    are."""
    count = 0
    schemas, sure = _in_place(checked, root)
    for located in schemas:
        schema = located.keywords
        if "items" in schema:
            return None, sure
        if "contains" in schema or "$recursiveRef" in schema:
            return None, False
        if located != root and schema.get("unevaluatedItems", False) is not False:
            return None, False
        count = max(count, len(schema.get("prefixItems", ())))
    return count, sure


# Residual -----------------------------------------------------------------------------------------
#
# The keywords of a schema that no mask holds.


class Residual(msgspec.Struct, frozen=True):
    """Keyword that has to be checked: `pointer` is its place in the schema ("#/items/not")."""

    pointer: str
    keyword: str


def notes_of(leaves: Iterable[tuple[Located, dict[str, Any]]], keyword: str) -> list[Residual]:
    """Return the places of a keyword among schemas, each with its relevant keywords."""
    return [
        Residual(f"{located.pointer}/{keyword}", keyword)
        for located, leaf in leaves
        if keyword in leaf
    ]


def written(pointer: str) -> str:
    """Return the part of a pointer that leads through the user's schema."""
    return pointer.partition(OWN)[0]
