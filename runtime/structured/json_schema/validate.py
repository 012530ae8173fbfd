"""Check a growing text against a schema: each value as soon as the value is complete."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from jsonschema import ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from msgspec.structs import replace
from referencing.jsonschema import lookup_recursive_ref

from rootlace.runtime.structured.json_schema.json_text import EXPONENT_DIGITS, MAX_DIGITS, type_of
from rootlace.runtime.structured.json_schema.load import (
    CheckedSchema,
    Located,
    Residual,
    subschemas,
)
from rootlace.runtime.structured.json_schema.pattern import checker, searcher
from rootlace.wire.errors import InvalidConstraint

# Keywords -----------------------------------------------------------------------------------------
#
# jsonschema's validators with patterns that are searched for in linear time.


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and not searcher(pattern)(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    for pattern, subschema in patterns.items():
        for key, member in value.items():
            if searcher(pattern)(key):
                yield from validator.descend(member, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, additional: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    for key in _additional_keys(value, schema):
        if additional is False:
            yield ValidationError(f"Additional properties are not allowed ({key!r} was unexpected)")
        else:
            yield from validator.descend(value[key], additional, path=key)


def _additional_keys(value: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return the keys of `value` that neither `properties` nor `patternProperties` covers."""
    patterns = schema.get("patternProperties", {})
    return [
        key
        for key in value
        if key not in schema.get("properties", {})
        and not any(searcher(pattern)(key) for pattern in patterns)
    ]


def _unevaluated_properties(
    validator: Any, unevaluated: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    evaluated = _evaluated_keys(validator, value, schema)
    for key, member in value.items():
        if key in evaluated:
            continue
        for _ in validator.descend(member, unevaluated, path=key, schema_path=key):
            yield ValidationError(f"Unevaluated property {key!r} is not valid")
            break


def _evaluated_keys(validator: Any, value: dict[str, Any], schema: Any) -> set[str]:
    """Return the keys of `value` that keywords of `schema`, or of schemas applied in place,
    evaluated (2020-12, section 11.3)."""
    if isinstance(schema, bool):
        return set()
    if "additionalProperties" in schema:
        return set(value)
    keys = value.keys() - _additional_keys(value, schema)
    if "unevaluatedProperties" in schema:
        below = schema["unevaluatedProperties"]
        keys |= {key for key, member in value.items() if _valid(validator, member, below)}
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        if keyword in schema and keyword in validator.VALIDATORS:
            # Private, but the validator's position is available nowhere else.
            resolver = validator._resolver
            resolved = (
                lookup_recursive_ref(resolver)
                if keyword == "$recursiveRef"
                else resolver.lookup(schema[keyword])
            )
            there = validator.evolve(schema=resolved.contents, _resolver=resolved.resolver)
            keys |= _evaluated_keys(there, value, resolved.contents)
    applied = list(schema.get("allOf", ()))
    for keyword in ("anyOf", "oneOf"):
        applied += [below for below in schema.get(keyword, ()) if _valid(validator, value, below)]
    applied += [below for key, below in schema.get("dependentSchemas", {}).items() if key in value]
    if "if" in schema:
        met = _valid(validator, value, schema["if"])
        branches = ("if", "then") if met else ("else",)
        applied += [schema[branch] for branch in branches if branch in schema]
    for below in applied:
        # `evolve` moves to the schema's own base URI.
        keys |= _evaluated_keys(validator.evolve(schema=below), value, below)
    return keys


def _valid(validator: Any, value: Any, schema: Any) -> bool:
    return next(validator.descend(value, schema), None) is None


_BOUNDED = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated_properties,
}


@lru_cache(maxsize=16)
def bounded(validator_class: Any) -> Any:
    """Return a subclass of jsonschema's `validator_class` without checks that are exponential in
    the value."""
    if validator_class.VALIDATORS.get("pattern") is _pattern:
        return validator_class
    found = extend(
        validator_class,
        {name: check for name, check in _BOUNDED.items() if name in validator_class.VALIDATORS},
    )
    found.evolve = _evolve
    return found


def _evolve(self: Any, **changes: Any) -> Any:
    """Evolve as jsonschema does; if `$schema` names another draft, bound its class, too."""
    schema = changes.get("schema", self.schema)
    return bounded(validator_for(schema, default=type(self)))(
        schema,
        registry=self._registry,
        format_checker=self.format_checker,
        _resolver=changes.get("_resolver", self._resolver),
    )


# Verify -------------------------------------------------------------------------------------------


MAX_DEPTH = 64
"""Bound of a checked value's nesting: jsonschema recurses along the value."""

NUMBER_BYTES = frozenset(b"0123456789+-.eE")
_WHITESPACE = frozenset(b" \t\n\r")
_ENDS_PLAIN = re.compile(rb'["\\]')
"""End of a string, or begin of an escape."""
_LITERALS = (b"true", b"false", b"null")

Schemas = tuple[Located, ...]
"""Schemas that apply to a value in any case."""


class Violation(msgspec.Struct, frozen=True):
    """Reason for a refusal.

    `length`: count of the fed bytes that led to the refusal; no text that continues with them is
    allowed. `start`: offset of the invalid value. `number`: the value is a number that may not end
    at this place.
    """

    length: int
    start: int
    keyword: str
    pointer: str
    message: str
    number: bool = False

    def __str__(self) -> str:
        return f"{self.pointer}: {self.message}"


class _Scalar(Enum):
    STRING = auto()
    KEY = auto()
    NUMBER = auto()
    LITERAL = auto()


class _Open(NamedTuple):
    """Container that is being read: its first byte, the schemas it must satisfy, the key or index
    of the current member (None: a key comes next), its keys so far or the items that must be unique
    (in a form that compares as JSON does), and the pointer of that `uniqueItems`."""

    start: int
    schemas: Schemas
    parent: _Open | None
    depth: int
    member: str | int | None
    seen: tuple[Any, ...] = ()
    unique: str = ""


class _State(NamedTuple):
    """State of reading a text.

    `scalar` is the kind of the string, number or literal that is being read, if any, from offset
    `start`, with the `schemas` to satisfy. `complete`: the root is complete and satisfies the
    schema.
    """

    open: _Open | None = None
    scalar: _Scalar | None = None
    start: int = 0
    schemas: Schemas = ()
    escape: bool = False
    complete: bool = False


_FAR = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}


def digits_needed(schema: Any) -> tuple[int, int]:
    """Return the most consecutive digits of a number, and of its exponent: `MAX_DIGITS` and
    `EXPONENT_DIGITS`, or more if a number in the schema needs more."""
    most, exponent = MAX_DIGITS, EXPONENT_DIGITS
    for key, value in _numbers(schema):
        whole, _, fraction = format(Decimal(repr(value)), "f").lstrip("-").partition(".")
        # Numbers of fewer digits are within a bound that is far away; between two bounds that are
        # excluded a number may have one digit more than both.
        far = isinstance(value, float) and _FAR.get(key, 0) * value > 0
        more = 1 if key.startswith("exclusive") else 0
        most = max(most, len(fraction) + more, 0 if far else len(whole) + more)
        power = "" if key in _FAR else repr(value).partition("e")[2].lstrip("+-")
        exponent = max(exponent, len(power))
    return most, exponent


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield a schema's (or a list's) finite numbers that bound its values, with their keywords."""
    queue = [schema]
    while queue:
        one = queue.pop()
        if isinstance(one, list):
            queue += one
        if not isinstance(one, dict):
            continue
        queue += [below for _, below in subschemas(one)]
        values = [(key, one[key]) for key in (*_FAR, "multipleOf", "const", "enum") if key in one]
        while values:
            key, value = values.pop()
            if isinstance(value, dict | list):
                inner = value.values() if isinstance(value, dict) else value
                values += [(key, part) for part in inner]
            elif type_of(value) == "number" and (isinstance(value, int) or math.isfinite(value)):
                yield key, value


class UniqueKeys:
    """Rules for texts whose mask lacks only distinct keys and bounded numbers: see `Rules`."""

    checks = False
    root: Schemas = ()

    def __init__(self, digits: tuple[int, int]) -> None:
        self.digits = digits

    def of_member(self, parents: Schemas, key: str | int) -> Schemas:
        return ()

    def key_error(self, parents: Schemas, key: str) -> tuple[str, str, str] | None:
        return None


class Rules:
    """Schemas that apply at each place, for all texts of a schema. Thread-safe: memos only."""

    checks = True
    """Whether values are checked, and not only keys."""

    def __init__(self, checked: CheckedSchema) -> None:
        self._checked = checked
        self.digits = digits_needed(checked.schema)
        # Readers may check formats or not, so the text has to satisfy both.
        self._validators = [
            bounded(checked.dialect.validator)(
                checked.schema, registry=checked.registry, format_checker=formats_checked
            )
            for formats_checked in ((None, checker()) if checked.mentions("format") else (None,))
        ]
        self._watched: set[Located] | None = None
        self._children: dict[tuple[Schemas, str | int], Schemas] = {}
        self.whole = checked.root
        # The target of a `$dynamicRef` depends on the path: then only the whole is checked.
        self.root = () if checked.is_dynamic() else self.expand([checked.root])

    def watch(self, residuals: Iterable[Residual]) -> None:
        """Check only values that contain these `residuals` before the end of the text."""
        places = [residual.pointer for residual in residuals]
        self._watched = self._checked.containing(places)

    def is_watched(self, located: Located) -> bool:
        return self._watched is None or located in self._watched

    def expand(self, located: Iterable[Located]) -> Schemas:
        """Add all schemas that these apply in place by `$ref` and `allOf`, without schemas that
        assert nothing."""
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
        """Return the schemas of a property (its key) or of an item (its index)."""
        memo = (parents, key)
        found = self._children.get(memo)
        if found is None:
            found = self.expand(m for parent in parents for m in self._checked.members(parent, key))
            if len(self._children) < 4096:  # keys may be anything
                self._children[memo] = found
        return found

    def error(self, located: Located, value: Any) -> tuple[str, str, str] | None:
        """Return keyword, pointer and message of why `value` does not satisfy a schema."""
        return next(filter(None, self._errors(located, value)), None)

    def satisfies(self, located: Located, value: Any, holds: bool = True) -> bool:
        """Return whether `value` satisfies a schema (without `holds`: violates), both with and
        without a check of formats."""
        errors = self._errors(located, value)
        return all((error is None) is holds for error in errors)

    def _errors(self, located: Located, value: Any) -> Iterator[tuple[str, str, str] | None]:
        """Yield the error without a check of formats, and the error with one."""
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

    def key_error(self, parents: Schemas, key: str) -> tuple[str, str, str] | None:
        """Return why objects of these schemas cannot have the key, None if they can."""
        for parent in parents:
            if "propertyNames" in parent.keywords:
                below = parent.keywords["propertyNames"]
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
    """Verifier of one text. Not thread-safe.

    The verifier reads the text byte by byte to find where values begin and end, and parses each
    complete value. It relies on a mask that holds the text to JSON: a fault between values, such as
    a missing comma, is found only at the container's end.
    """

    def __init__(self, rules: Rules | UniqueKeys) -> None:
        self._rules = rules
        self._text = bytearray()
        self._states = [_State()]
        """States before the first feed, and behind each feed."""
        self._ends = [0]
        """Length of the text at each state."""
        self.has_ahead = False
        """Whether `ahead` may return something."""

    def feed(self, data: bytes) -> Violation | None:
        """Take in the next bytes. A violation changes nothing."""
        before, state = len(self._text), self._states[-1]
        self._text += data
        at = 0
        try:
            while at < len(data):
                if state.scalar is _Scalar.STRING or state.scalar is _Scalar.KEY:
                    if state.escape:
                        state = state._replace(escape=False)
                    elif (found := _ENDS_PLAIN.search(data, at)) is None:
                        break
                    else:
                        at = found.start()
                        if data[at] == ord("\\"):
                            state = state._replace(escape=True)
                        elif state.scalar is _Scalar.KEY:
                            state = self._key(state, before + at + 1)
                        else:
                            state = self._end(state, before + at + 1)
                else:
                    state = self._step(state, data[at], before + at)
                at += 1
        except _Refused as refused:
            del self._text[before:]
            return replace(refused.violation, length=at + 1)
        self._states.append(state)
        self._ends.append(len(self._text))
        opened, scalar = state.open, state.scalar
        is_later_key = scalar is _Scalar.KEY and opened is not None and bool(opened.seen)
        self.has_ahead = is_later_key or scalar is _Scalar.NUMBER
        return None

    def is_plain(self, data: bytes) -> bool:
        """Return whether `data` continues the current string, without its end and without an
        escape."""
        state = self._states[-1]
        is_string = state.scalar is _Scalar.STRING or state.scalar is _Scalar.KEY
        return is_string and not state.escape and b'"' not in data and b"\\" not in data

    def undo(self, count: int) -> None:
        """Forget the last `count` feeds."""
        if count:
            del self._states[-count:], self._ends[-count:]
            del self._text[self._ends[-1] :]
            self.has_ahead = True

    def violation(self) -> Violation | None:
        """Return why the text may not end here; None if it may."""
        state = self._states[-1]
        if state.complete:
            return None
        if state.scalar is _Scalar.NUMBER and state.open is None:
            try:
                self._end(state, len(self._text))
            except _Refused as refused:
                return refused.violation
            return None
        return Violation(0, 0, "", "#", "the text is not complete")

    def accepts(self) -> bool:
        """Return whether the text is complete and satisfies the schema."""
        return self.violation() is None

    def _digits_left(self, number: bytearray) -> int:
        run = len(number) - len(number.rstrip(b"0123456789"))
        is_exponent = b"e" in number or b"E" in number
        return self._rules.digits[is_exponent] - run

    def open_starts(self) -> list[int]:
        """Return the offsets of the values that are being read, the innermost first."""
        state = self._states[-1]
        starts = [state.start] if state.scalar not in (None, _Scalar.KEY) else []
        opened = state.open
        while opened is not None:
            starts.append(opened.start)
            opened = opened.parent
        return starts

    def ahead(self) -> tuple[list[bytes], int | None]:
        """Return the forbidden continuations: (endings, digits).

        `endings` would make the current key equal to an earlier key of the object, in JSON's
        spelling. `digits` is the number of further digits that the current number may have; None
        outside of numbers.
        """
        state = self._states[-1]
        if state.scalar is _Scalar.NUMBER:
            return [], self._digits_left(self._text[state.start :])
        if state.scalar is not _Scalar.KEY or state.open is None or not state.open.seen:
            return [], None
        begun = bytes(self._text[state.start :])
        keys = map(_spelt, state.open.seen)
        return [key[len(begun) :] for key in keys if key.startswith(begun)], None

    # ------------------------------------------------------------ one byte

    def _step(self, state: _State, byte: int, offset: int) -> _State:
        """Return the state after a byte outside of strings."""
        scalar = state.scalar
        if scalar is _Scalar.LITERAL:
            begun = bytes(self._text[state.start : offset + 1])
            if not any(literal.startswith(begun) for literal in _LITERALS):
                raise _Refused(state.start, "", "#", f"{begun!r} is not JSON")
            return self._end(state, offset + 1) if begun in _LITERALS else state
        if scalar is _Scalar.NUMBER:
            if byte in NUMBER_BYTES:
                if self._digits_left(self._text[state.start : offset + 1]) < 0:
                    raise _Refused(state.start, "", "#", "a number has too many digits in a row")
                return state
            state = self._end(state, offset)  # it ends before this byte
        if byte in _WHITESPACE:
            return state
        opened = state.open
        if state.complete or (opened is None and byte in b",:]}"):
            raise _Refused(offset, "", "#", f"byte {byte:#04x} at {offset} is not JSON here")
        if opened is None or byte not in b",:]}":
            return self._begin(state, byte, offset)
        if byte == ord(":"):
            return state
        if byte == ord(","):
            following = opened.member + 1 if isinstance(opened.member, int) else None
            return state._replace(open=opened._replace(member=following))
        closed = state._replace(open=opened.parent, start=opened.start, schemas=opened.schemas)
        return self._end(closed, offset + 1)

    def _begin(self, state: _State, byte: int, start: int) -> _State:
        parent = state.open
        if parent is None:
            schemas = self._rules.root
        elif parent.member is None:
            return state._replace(scalar=_Scalar.KEY, start=start)
        else:
            schemas = self._rules.of_member(parent.schemas, parent.member)
        depth = 1 if parent is None else parent.depth + 1
        is_array = byte == ord("[")
        if (is_array or byte == ord("{")) and depth > MAX_DEPTH and self._rules.checks:
            raise _Refused(start, "", "#", f"nested more than {MAX_DEPTH} deep")
        for located in schemas:
            if located.schema is False:
                raise _Refused(start, "false", located.pointer, "no value is allowed here")
        if is_array:
            opened = _Open(start, schemas, parent, depth, 0, unique=_unique(schemas))
        elif byte == ord("{"):
            opened = _Open(start, schemas, parent, depth, None)
        else:
            scalar = (
                _Scalar.STRING if byte == ord('"')
                else _Scalar.NUMBER if byte in NUMBER_BYTES - frozenset(b"eE")
                else _Scalar.LITERAL
            )  # fmt: skip
            return state._replace(scalar=scalar, start=start, schemas=schemas)
        return state._replace(open=opened)

    def _key(self, state: _State, end: int) -> _State:
        start, opened = state.start, state.open
        key = self._parsed(start, end)
        assert opened is not None
        if key in opened.seen:
            raise _Refused(start, "", "#", f"the key {key!r} is there twice")
        error = self._rules.key_error(opened.schemas, key)
        if error is not None:
            raise _Refused(start, *error)
        opened = opened._replace(member=key, seen=(*opened.seen, key))
        return state._replace(scalar=None, open=opened)

    def _end(self, state: _State, end: int) -> _State:
        """End the value that begins at `state.start`, within the open container, before `end`."""
        start, parent = state.start, state.open
        following = state._replace(scalar=None)
        if not isinstance(self._rules, Rules):
            return following._replace(complete=parent is None)
        value = self._parsed(start, end)
        number = state.scalar is _Scalar.NUMBER
        if parent is None:
            error = self._rules.error(self._rules.whole, value)
            if error is not None:
                raise _Refused(start, *error, number=number)
            return following._replace(complete=True)
        for located in state.schemas:
            error = self._rules.error(located, value) if self._rules.is_watched(located) else None
            if error is not None:
                raise _Refused(start, *error, number=number)
        if not parent.unique:
            return following
        item = _comparable(value)
        if item in parent.seen:
            reason = "uniqueItems: the item is there twice"
            raise _Refused(start, "uniqueItems", parent.unique, reason, number)
        return following._replace(open=parent._replace(seen=(*parent.seen, item)))

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


@lru_cache(maxsize=4096)
def _spelt(key: str) -> bytes:
    return json.dumps(key, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _unique(schemas: Schemas) -> str:
    for located in schemas:
        if located.keywords.get("uniqueItems") is True:
            return f"{located.pointer}/uniqueItems"
    return ""


def _comparable(value: Any) -> Any:
    """Return a form that is equal exactly if the JSON values are (1 is 1.0, but not true)."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("array", tuple(map(_comparable, value)))
    if isinstance(value, dict):
        return ("object", frozenset((key, _comparable(member)) for key, member in value.items()))
    return value
