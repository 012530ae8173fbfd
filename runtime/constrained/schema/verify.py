"""A text checked against a schema as it comes: each value as soon as it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jsonschema import ValidationError
from jsonschema.exceptions import best_match

from rootlace.runtime.constrained.schema.check import CheckedSchema, Located
from rootlace.runtime.constrained.schema.dialect import keywords
from rootlace.runtime.constrained.schema.formats import lenient_checker
from rootlace.runtime.constrained.schema.keywords import bounded
from rootlace.runtime.constrained.schema.residual import Residual
from rootlace.runtime.constrained.schema.scan import (
    START,
    Event,
    Kind,
    Scan,
    step,
    with_key,
)
from rootlace.runtime.constrained.schema.search import searcher
from rootlace.wire.errors import InvalidConstraint

MAX_DEPTH = 64
"""How deep a checked value may be nested: jsonschema recurses along it."""

Schemas = tuple[Located, ...]
"""The schemas that apply to a value whatever else holds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a text was refused.

    `length` is how many of the bytes fed led to it (no text that goes on with them is allowed),
    `start` where in the text the value begins that is wrong. `number` says that it is a number
    that may not end where it stands.
    """

    length: int
    start: int
    keyword: str
    pointer: str
    message: str
    number: bool = False

    def __str__(self) -> str:
        return f"{self.pointer}: {self.message}"


@dataclass(frozen=True, slots=True)
class _Open:
    """A value that is being read: the schemas it must satisfy; of a container, its parent, the
    keys (or the items that must be unique, in a form that compares as JSON does) so far."""

    start: int
    schemas: Schemas
    parent: _Open | None
    seen: tuple[Any, ...] = ()
    unique: str = ""  # pointer of the uniqueItems that applies


@dataclass(frozen=True, slots=True)
class _State:
    length: int
    scan: Scan
    open: _Open | None
    scalar: _Open | None
    complete: bool  # the root is there and satisfies the schema


class Rules:
    """What applies where, for all the texts of one schema. Thread-safe: memos only."""

    def __init__(self, checked: CheckedSchema) -> None:
        self._checked = checked
        # Whoever checks the text may check formats or not: it has to be right for both.
        self._validators = [
            bounded(checked.dialect.validator)(
                checked.schema, registry=checked.registry, format_checker=formats_checked
            )
            for formats_checked in (
                (None, lenient_checker()) if checked.mentions("format") else (None,)
            )
        ]
        self._watched: set[Located] | None = None
        self._children: dict[tuple[Schemas, str | int], Schemas] = {}
        # Where a `$dynamicRef` leads depends on the way to it: then only the whole is checked.
        self.root = () if checked.is_dynamic() else self.expand([checked.root])

    def watch(self, residuals: Iterable[Residual]) -> None:
        """From now on only what these are part of needs to be checked before the end."""
        places = [residual.pointer for residual in residuals]
        self._watched = self._checked.containing(places)

    def is_watched(self, located: Located) -> bool:
        return self._watched is None or located in self._watched

    def expand(self, located: Iterable[Located]) -> Schemas:
        """With everything that they apply in place: `$ref`, `allOf`. Schemas that say nothing
        are left out."""
        found: dict[Located, None] = {}
        queue = list(located)
        while queue:
            one = queue.pop(0)
            if one in found or one.schema is True or one.schema == {}:
                continue
            found[one] = None
            if isinstance(one.schema, dict):
                if isinstance(one.schema.get("$ref"), str):
                    queue.append(self._checked.target(one))
                    if one.dialect.number <= 7:
                        continue
                for index, below in enumerate(one.schema.get("allOf", ())):
                    queue.append(self._checked.child(one, f"/allOf/{index}", below))
        return tuple(found)

    def of_member(self, parents: Schemas, key: str | int) -> Schemas:
        """The schemas of a property (its key) or of an item (its index)."""
        memo = (parents, key)
        found = self._children.get(memo)
        if found is None:
            members = [m for parent in parents for m in self._members(parent, key)]
            found = self.expand(members)
            if len(self._children) < 4096:  # keys may be anything
                self._children[memo] = found
        return found

    def _members(self, parent: Located, key: str | int) -> Iterable[Located]:
        if not isinstance(parent.schema, dict):
            return
        schema = keywords(parent.schema, parent.dialect)
        if isinstance(key, int):
            prefix = schema.get("prefixItems", ())
            if key < len(prefix):
                yield self._checked.child(parent, f"/prefixItems/{key}", prefix[key])
            elif "items" in schema:
                yield self._checked.child(parent, "/items", schema["items"])
            return
        covered = False
        if key in schema.get("properties", {}):
            covered = True
            yield self._checked.child(parent, f"/properties/{key}", schema["properties"][key])
        for pattern, below in schema.get("patternProperties", {}).items():
            if searcher(pattern)(key):
                covered = True
                yield self._checked.child(parent, f"/patternProperties/{pattern}", below)
        if not covered and "additionalProperties" in schema:
            below = schema["additionalProperties"]
            yield self._checked.child(parent, "/additionalProperties", below)

    def error(self, located: Located, value: Any) -> tuple[str, str, str] | None:
        """Why `value` does not satisfy a schema: keyword, pointer, message."""
        return next(filter(None, self._errors(located, value)), None)

    def satisfies(self, located: Located, value: Any, holds: bool = True) -> bool:
        """Whether it does (or, without `holds`, does not), for those who check formats as for
        those who do not."""
        errors = self._errors(located, value)
        return all((error is None) is holds for error in errors)

    def _errors(self, located: Located, value: Any) -> Iterator[tuple[str, str, str] | None]:
        """What is wrong for those who do not check formats, and for those who do."""
        for validator in self._validators:
            try:
                errors = validator.descend(value, located.schema, resolver=located.resolver)
                worst = best_match(errors)
            except RecursionError:
                yield "", located.pointer, "the value is nested too deeply to be checked"
            except (OverflowError, InvalidConstraint) as failure:
                yield "", located.pointer, f"the value cannot be checked: {failure}"
            else:
                yield None if worst is None else _described(worst, located)

    def whole_error(self, value: Any) -> tuple[str, str, str] | None:
        return self.error(self._checked.root, value)

    def key_error(self, parents: Schemas, key: str) -> tuple[str, str, str] | None:
        """Why no object of these schemas has the key."""
        for parent in parents:
            if isinstance(parent.schema, dict) and "propertyNames" in parent.schema:
                below = parent.schema["propertyNames"]
                names = self._checked.child(parent, "/propertyNames", below)
                error = self.error(names, key)
                if error is not None:
                    return error
        return None


def _described(error: ValidationError, located: Located) -> tuple[str, str, str]:
    path = "/".join(str(part) for part in error.absolute_schema_path)
    keyword = str(error.validator or "false")
    return keyword, f"{located.pointer}/{path}".rstrip("/"), f"{keyword}: {error.message[:200]}"


class Verifier:
    """One text. Not thread-safe."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._text = bytearray()
        self._states = [_State(0, START, None, None, False)]

    @property
    def steps(self) -> int:
        """How often `feed` took something in."""
        return len(self._states) - 1

    def feed(self, data: bytes) -> Violation | None:
        """Take in the next bytes. On a violation nothing has changed."""
        before = len(self._text)
        state = self._states[-1]
        self._text += data
        try:
            for index, byte in enumerate(data):
                state = self._step(state, byte, before + index)
        except _Refused as refused:
            del self._text[before:]
            return replace(refused.violation, length=index + 1)
        self._states.append(replace(state, length=len(self._text)))
        return None

    def undo(self, count: int) -> None:
        """Forget the last `count` feeds."""
        if count:
            del self._states[len(self._states) - count :]
            del self._text[self._states[-1].length :]

    def violation(self) -> Violation | None:
        """Why the text may not end here; None if it may."""
        state = self._states[-1]
        if state.complete:
            return None
        if state.scan.scalar is Kind.NUMBER and state.scan.frame is None:
            try:
                self._end(state, Kind.NUMBER, state.scan.start, len(self._text))
            except _Refused as refused:
                return refused.violation
            return None
        return Violation(0, 0, "", "#", "the text is not complete")

    def accepts(self) -> bool:
        """Whether the text is complete and satisfies the schema."""
        return self.violation() is None

    def number_length(self) -> int:
        """How long the number is that is being read; 0 where none is."""
        scan = self._states[-1].scan
        return len(self._text) - scan.start if scan.scalar is Kind.NUMBER else 0

    def open_starts(self) -> list[int]:
        """Where the values begin that are being read, the innermost first."""
        state = self._states[-1]
        starts = [state.scalar.start] if state.scalar else []
        frame = state.open
        while frame is not None:
            starts.append(frame.start)
            frame = frame.parent
        return starts

    # ------------------------------------------------------------ one byte

    def _step(self, state: _State, byte: int, offset: int) -> _State:
        try:
            scan, events = step(state.scan, byte, offset)
        except ValueError as error:
            raise _Refused(offset, "", "#", str(error)) from None
        following = replace(state, scan=scan)
        for event, kind, start in events:
            if event is Event.BEGIN:
                following = self._begin(following, kind, start)
            elif event is Event.KEY:
                following = self._key(following, start, offset + 1)
            else:
                end = offset if kind is Kind.NUMBER else offset + 1
                following = self._end(following, kind, start, end)
        return following

    def _begin(self, state: _State, kind: Kind, start: int) -> _State:
        parent = state.open
        frame = state.scan.frame
        container = kind in (Kind.OBJECT, Kind.ARRAY)
        if container and frame is not None:
            if frame.depth > MAX_DEPTH:
                raise _Refused(start, "", "#", f"nested more than {MAX_DEPTH} deep")
            frame = frame.parent
        if parent is None or frame is None:
            schemas = self._rules.root
        else:
            member = frame.key if frame.kind is Kind.OBJECT else frame.count - 1
            schemas = self._rules.of_member(parent.schemas, member)
        for located in schemas:
            if located.schema is False:
                raise _Refused(start, "false", located.pointer, "no value is allowed here")
        opened = _Open(
            start, schemas, parent, unique=_unique(schemas) if kind is Kind.ARRAY else ""
        )
        if container:
            return replace(state, open=opened)
        return replace(state, scalar=opened)

    def _key(self, state: _State, start: int, end: int) -> _State:
        key = self._parsed(start, end)
        opened = state.open
        assert opened is not None and isinstance(key, str)
        if key in opened.seen:
            raise _Refused(start, "", "#", f"the key {key!r} is there twice")
        error = self._rules.key_error(opened.schemas, key)
        if error is not None:
            raise _Refused(start, *error)
        opened = replace(opened, seen=(*opened.seen, key))
        return replace(state, scan=with_key(state.scan, key), open=opened)

    def _end(self, state: _State, kind: Kind, start: int, end: int) -> _State:
        value = self._parsed(start, end)
        if kind in (Kind.OBJECT, Kind.ARRAY):
            opened, parent = state.open, state.open.parent if state.open else None
            following = replace(state, open=parent)
        else:
            opened, parent = state.scalar, state.open
            following = replace(state, scalar=None)
        assert opened is not None
        if parent is None:
            error = self._rules.whole_error(value)
            if error is not None:
                raise _Refused(start, *error, number=kind is Kind.NUMBER)
            return replace(following, complete=True)
        for located in opened.schemas:
            error = self._rules.error(located, value) if self._rules.is_watched(located) else None
            if error is not None:
                raise _Refused(start, *error, number=kind is Kind.NUMBER)
        if parent.unique:
            item = _comparable(value)
            if item in parent.seen:
                reason = "uniqueItems: the item is there twice"
                number = kind is Kind.NUMBER
                raise _Refused(start, "uniqueItems", parent.unique, reason, number)
            grown = replace(parent, seen=(*parent.seen, item))
            return replace(following, open=grown)
        return following

    def _parsed(self, start: int, end: int) -> Any:
        try:
            return json.loads(bytes(self._text[start:end]))
        except (ValueError, RecursionError) as error:
            raise _Refused(start, "", "#", f"not JSON: {error}") from None


class _Refused(Exception):
    def __init__(
        self, start: int, keyword: str, pointer: str, message: str, number: bool = False
    ) -> None:
        super().__init__(message)
        self.violation = Violation(0, start, keyword, pointer, message, number)


def _unique(schemas: Schemas) -> str:
    for located in schemas:
        if isinstance(located.schema, dict) and located.schema.get("uniqueItems") is True:
            return f"{located.pointer}/uniqueItems"
    return ""


def _comparable(value: Any) -> Any:
    """Equal exactly where the JSON values are (1 is 1.0, but not true)."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("array", tuple(map(_comparable, value)))
    if isinstance(value, dict):
        return ("object", frozenset((key, _comparable(member)) for key, member in value.items()))
    return value
