"""Normal form of a schema, taken before anything is weakened.

Every schema becomes a union of cases without `not`, `if`, `oneOf` and the like (`cases`). A case is
a union of shapes of one type each (`type_shapes`). The parts of a shape are conjunctions again:
these become definitions of the new schema, so recursion stays recursion. `writers` and `mask_of`
read the remaining keywords:

    {"$ref": "#/$defs/s7"}, true, false                a part
    {"anyOf": [of the following, …]}                   a definition, or one of the following alone
    {"enum": […]}   {"type": "null"}   {"type": "boolean"}   {"type": ["null", "string"]}
    {"type": "string", minLength, maxLength, pattern, format, allOf: [{pattern}, {format}]}
    {"type": "number" or "integer", minimum, exclusiveMinimum, …, multipleOf, allOf: [{multipleOf}]}
    {"type": "array", prefixItems, items, minItems, maxItems}
    {"type": "object", properties, required, patternProperties, additionalProperties,
     minProperties, maxProperties}

A string has patterns that may be found anywhere in it, or formats with one meaning everywhere.
"""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from rootlace.runtime.structured.json_schema.cases import TYPES, Atom, Cases, Conjunction
from rootlace.runtime.structured.json_schema.json_text import gap_of
from rootlace.runtime.structured.json_schema.load import CheckedSchema, Residual, invalid, written
from rootlace.runtime.structured.json_schema.pattern import searcher
from rootlace.runtime.structured.json_schema.to_llguidance import string_matcher, weaken
from rootlace.runtime.structured.json_schema.type_shapes import Shape, Shapes
from rootlace.runtime.structured.json_schema.validate import Rules, Verifier
from rootlace.runtime.structured.json_schema.writers import whole_regex, within
from rootlace.runtime.structured.regex.syntax import Regex, TooLarge
from rootlace.wire.errors import InvalidConstraint

Satisfies = Callable[..., bool]

MAX_DEFINITIONS = 30_000
MAX_PROBE = 24
"""Most required properties that the search for contradictions descends through."""


@dataclass
class Normal:
    """Normal form: `root` is a part, which refers to `definitions`.

    `notes`: keywords that a definition does not hold, which must be checked. `shown`: other
    definitions for llguidance; `lost`: the keywords that these lack beyond `notes`. `places` maps a
    definition to its origin in the user's schema.
    """

    root: Any = True
    definitions: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, set[Residual]] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, set[Residual]] = field(default_factory=dict)
    places: dict[str, Conjunction] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Return whether the normal form equals the user's schema, so that nothing is left to
        check."""
        return not any(self.notes.values())

    def let_go(self) -> None:
        let_go(self.definitions, self.notes, self.shown, self.lost, self.places)


def normal_form(checked: CheckedSchema, satisfies: Satisfies) -> Normal:
    """Take the normal form. `satisfies(schema, value, holds)` is the full check. Raises
    InvalidConstraint if nothing satisfies the schema."""
    endless: set[Conjunction] = set()
    while True:
        made = _Normalizer(checked, satisfies, endless)
        try:
            found = made.result()
        finally:
            made.let_go()
        names = _endless(found.definitions)
        if not names:
            return found
        endless |= {found.places[name] for name in names}


def let_go(*memos: dict[Any, Any]) -> None:
    """Free the memory of thousands of schemas piece by piece. At once, this would hold the
    interpreter for tens of milliseconds."""
    for memo in memos:
        while memo:
            memo.popitem()


def _endless(definitions: dict[str, Any]) -> set[str]:
    """Return the names of definitions that no finite value satisfies, such as a list of at least
    one item of its own kind."""
    endless = set(definitions)

    def name_of(part: Any) -> str:
        reference = part.get("$ref", "") if isinstance(part, dict) else ""
        return str(reference).removeprefix("#/$defs/")

    def ends(part: Any) -> bool:
        return part is not False and name_of(part) not in endless

    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, definition in definitions.items():
        for part in within(definition):
            if referred := name_of(part):
                users[referred].append(name)
    left = list(definitions)
    while left:
        name = left.pop()
        shapes = definitions[name].get("anyOf", (definitions[name],))
        if name in endless and any(_may_end(shape, ends) for shape in shapes):
            endless.discard(name)
            left += users[name]
    return endless


def _may_end(shape: dict[str, Any], ends: Callable[[Any], bool]) -> bool:
    """Return whether a shape has finite values; `ends(part)` tells whether a part is known to."""
    if shape.get("type") == "array":
        least, first = shape.get("minItems", 0), shape.get("prefixItems", ())
        return all(map(ends, first[:least])) and (
            least <= len(first) or ends(shape.get("items", True))
        )
    if shape.get("type") == "object":
        named = shape.get("properties", {})
        others = *shape.get("patternProperties", {}).values(), shape.get("additionalProperties", {})
        return all(ends(named.get(name, True)) for name in shape.get("required", ())) and (
            any(map(ends, others))
            or sum(map(ends, named.values())) >= shape.get("minProperties", 0)
        )
    return True


class _Normalizer:
    """Maker of a normal form. `endless`: conjunctions that no finite value satisfies."""

    def __init__(
        self, checked: CheckedSchema, satisfies: Satisfies, endless: Iterable[Conjunction]
    ) -> None:
        me = weakref.proxy(self)  # a method would be a reference cycle with all objects made here

        def empty(conjunction: Conjunction) -> str:
            return str(me._empty(conjunction))

        self._cases = Cases(checked, satisfies, empty)

        def shapes_of(conjunction: Conjunction) -> tuple[list[Shape], set[Residual]]:
            return me._shapes_of(conjunction)

        self._shapes = Shapes(checked, satisfies, empty, shapes_of)
        self._known: dict[Conjunction, tuple[list[Shape], set[Residual]]] = {
            conjunction: ([], set()) for conjunction in endless
        }
        self._endless = frozenset(endless)
        self._reasons: dict[Conjunction, str] = {}
        self._open: set[Conjunction] = set()
        self._root: Conjunction = (Atom(checked.root),)
        self._names: dict[Conjunction, str] = {}
        self._queue: list[Conjunction] = []

    def result(self) -> Normal:
        shapes, _ = self._shapes_of(self._root)
        if not shapes:
            place = written(self._reasons.get(self._root) or "#")
            reason = ": a value would hold itself without end" if self._endless else ""
            raise invalid(place, f"nothing satisfies the schema{reason}")
        found = Normal(self._part(self._root))
        while self._queue:
            conjunction = self._queue.pop(0)
            name = self._names[conjunction]
            shapes, notes = self._shapes_of(conjunction)
            found.definitions[name] = self._rendered(shape.schema for shape in shapes)
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
            self._reasons[conjunction] = self._cases.dead.get(conjunction) or reason
        self._known[conjunction] = shapes, notes
        return shapes, notes

    def _empty(self, conjunction: Conjunction) -> str:
        """Return the place because of which a conjunction has no values; "" if none is known."""
        conjunction = _reduced(conjunction)
        for atom in conjunction:
            if atom.located.schema is atom.negated:
                return atom.located.pointer
        if not conjunction or conjunction in self._open or len(self._open) > MAX_PROBE:
            return ""
        shapes, _ = self._shapes_of(conjunction)
        return "" if shapes else self._reasons.get(conjunction) or conjunction[0].located.pointer

    # ------------------------------------------------------------ rendering

    def _part(self, conjunction: Conjunction) -> Any:
        """Return the schema for a conjunction: a reference, or a plain schema."""
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
    """Return the conjunction without schemas that allow everything, each schema once."""
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


# Prepared schemas ---------------------------------------------------------------------------------
#
# A JSON schema, ready to be enforced: its normal form, the schema of its mask, the check.
#
# Sections: the mask (what llguidance runs, and what is left to check); the prepared schema.


# Key spelling -------------------------------------------------------------------------------------
#
# Spellings of strings in a mask, such that each key has one spelling.
#
# llguidance separates named keys from other keys by their JSON text. A key with an unnecessary
# escape (`"\u0061"` for `"a"`) would count as another key, with another schema. So where this
# matters, no character is written as `\u` and four digits. Control characters without a short
# escape (all but `\n \r \b \t \f`) then occur only in strings that the schema lists.


OPTIONS = {"json_allowed_escapes": 'nrbtf\\"'}
"""llguidance's option for escapes in strings."""
_MAY_NEED_CONTROLS = re.compile(r"[\x00-\x1f]|\\[xucv0]|\[\^")


def tells_keys_apart(schema: Any) -> bool:
    """Return whether an object of the schema has keys with different schemas."""
    for part in within(schema):
        if not isinstance(part, dict):
            continue
        names, patterns = part.get("properties", {}), part.get("patternProperties", {})
        is_open = part.get("additionalProperties", True) is not False
        if (names or patterns) and is_open:
            return True
        if patterns and any(min(name, default=" ") < " " for name in names):
            return True
    return False


def has_open_keys(mask: dict[str, Any]) -> bool:
    """Return whether an object may have keys that the mask schema does not name. llguidance does
    not distinguish such keys, so one key could come twice."""
    return any(map(_is_open, within(mask)))


def has_numbers(mask: dict[str, Any]) -> bool:
    """Return whether a value of the mask schema may be a number that the schema does not list."""
    parts = (part.get("type", "") for part in within(mask) if isinstance(part, dict))
    return any("number" in types or "integer" in types for types in parts)


def keywords_within(mask: dict[str, Any]) -> set[str]:
    """Return all keywords in use in a mask schema."""
    return {keyword for schema in within(mask) if isinstance(schema, dict) for keyword in schema}


def _is_open(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    if "$ref" in schema or "anyOf" in schema or "enum" in schema:
        return False
    types = schema.get("type", ("array", "object"))
    closed = schema.get("additionalProperties", True) is False and "patternProperties" not in schema
    if "object" in types and not closed:
        return True
    most = schema.get("maxItems", math.inf)
    return "array" in types and "items" not in schema and most > len(schema.get("prefixItems", ()))


def needs_controls(schema: Any) -> bool:
    """Return whether a pattern of the schema matches control characters only."""
    found: list[str] = []
    for part in within(schema):
        if isinstance(part, dict):
            found += [part["pattern"]] if "pattern" in part else []
            found += part.get("patternProperties", ())
    return any(_MAY_NEED_CONTROLS.search(pattern) and _is_lost(pattern) for pattern in found)


@lru_cache(maxsize=1024)
def _is_lost(pattern: str) -> bool:
    """Return whether each string that matches needs a `\\u` escape."""
    return string_matcher(pattern, **OPTIONS).try_consume_tokens([ord('"')]) != 1


# Mask ---------------------------------------------------------------------------------------------


MAX_PROPERTIES = 12_000
"""Most properties of one object. llguidance nests properties, without a limit of its own."""
Mask = tuple[dict[str, Any], tuple[Residual, ...]]
"""Schema that llguidance accepts, and the user's keywords that the schema lacks."""


def mask_of(normal: Normal) -> Mask:
    """Return the mask of a normal form. Raises InvalidConstraint if llguidance cannot hold the
    whole."""
    sizes = {name: _most_properties(part) for name, part in normal.definitions.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    try:
        if largest and sizes[largest] > MAX_PROPERTIES:
            raise TooLarge(f"more than {MAX_PROPERTIES} properties")
        root, definitions, lost = weaken(normal.root, {**normal.definitions, **normal.shown})
    except TooLarge as error:
        size = f"{sizes[largest]} properties here, {len(sizes)} schemas in all"
        raise invalid(
            written(normal.places[largest][0].located.pointer),
            f"the schema is too large for a mask ({size}): {error}",
        ) from None
    notes: set[Residual] = set()
    for name in definitions:
        notes |= normal.notes[name] | normal.lost[name]
    for name, keyword in lost:
        notes.add(Residual(_place(normal.places[name], keyword), keyword))
    schema = dict(root)
    if definitions:
        schema["$defs"] = definitions
    names = [name for name, shape in definitions.items() if tells_keys_apart(shape)]
    if names and needs_controls(schema):
        # Keys then have two spellings, which the mask takes for two keys.
        for name in names:
            notes.add(Residual(_place(normal.places[name], "properties"), "properties"))
    elif names:
        schema["x-guidance"] = dict(OPTIONS)
    return schema, tuple(sorted(notes, key=lambda note: note.pointer))


def _most_properties(definition: Any) -> int:
    options = definition.get("anyOf", [definition]) if isinstance(definition, dict) else []
    return max((len(option.get("properties", ())) for option in options), default=0)


def _place(conjunction: Conjunction, keyword: str) -> str:
    for atom in conjunction:
        if isinstance(atom.located.schema, dict) and keyword in atom.located.schema:
            return f"{atom.located.pointer}/{keyword}"
    return conjunction[0].located.pointer if conjunction else "#"


# Prepare ------------------------------------------------------------------------------------------


class PreparedSchema:
    """Well-formed schema that is not known to be unsatisfiable."""

    def __init__(
        self, schema: dict[str, Any] | bool, documents: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare a schema. `documents`: schemas by URI. Raises InvalidConstraint with the JSON
        pointer if the schema is malformed, unsatisfiable, or has a reference to nothing."""
        self._checked = CheckedSchema(schema, documents or {})
        self._check_patterns(of_keys=True)
        self._rules = Rules(self._checked)
        self.normal = normal_form(self._checked, self._rules.satisfies)

    def regex(self, whitespace: str) -> Regex | None:
        """Return the JSON texts of the schema as a regex tree; None if their automaton would be too
        large."""
        if not self.normal.exact:
            return None
        gap = gap_of(whitespace == "flexible")
        return whole_regex(self.normal.root, self.normal.definitions, gap)

    @cached_property
    def _mask(self) -> Mask:
        schema, residuals = mask_of(self.normal)
        if residuals:
            self._check_patterns(of_keys=False)
            self._rules.watch(residuals)
        return schema, residuals

    @property
    def mask_schema(self) -> dict[str, Any]:
        """Schema that allows every text of the user's schema, in the order of its properties.

        The schema allows more only through the keywords in `residuals`. It has no outside
        references, and llguidance accepts it.
        """
        return self._mask[0]

    @property
    def residuals(self) -> tuple[Residual, ...]:
        return self._mask[1]

    @property
    def verifier_factory(self) -> Callable[[], Verifier] | None:
        """Return a maker of checks, one for each growing text; None if the mask holds
        everything."""
        rules = self._rules  # not `self`, which may have a hundred thousand objects
        return (lambda: Verifier(rules)) if self.residuals else None

    def let_go(self) -> None:
        """Free memory. Only results of `verifier_factory` can be used afterwards."""
        self.normal.let_go()
        if "_mask" in vars(self):
            let_go(self.mask_schema.get("$defs", {}))

    def refuse_residuals(self, why: str) -> None:
        """Raise InvalidConstraint if there are residuals; `why`: the reason against them."""
        for first in self.residuals[:1]:
            place = written(first.pointer)
            keyword = first.keyword if place == first.pointer else place.rpartition("/")[2]
            raise invalid(place, f"no mask can hold {keyword!r} {why}")

    def _check_patterns(self, of_keys: bool) -> None:
        """Refuse patterns that a check cannot search for."""
        for pointer, pattern, is_of_keys in self._checked.patterns():
            if is_of_keys is of_keys:
                try:
                    searcher(pattern)
                except InvalidConstraint as error:
                    raise invalid(pointer, f"{pattern!r}: {error}") from None
