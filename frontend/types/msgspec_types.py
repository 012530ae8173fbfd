"""JSON schemas of msgspec's types: dataclasses, TypedDicts, Structs, plain types and others.
Sections: text patterns, also for the schemas of pydantic's types; schemas."""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from rootlace.wire.errors import InvalidConstraint

# Text patterns ------------------------------------------------------------------------------------
#
# Regular expressions for the texts of values: what a reader accepts, with a bounded length.

# Keys of JSON objects (which are always strings) whose type is not str.
INT_KEY = r"^(0|-?[1-9][0-9]{0,17})$"
# As many digits as decimal's default precision: without a bound, nothing would end a number.
NUMBER_TEXT = r"^-?(0|[1-9][0-9]{0,27})(\.[0-9]{1,28})?$"
HEX = "[0-9a-f]"
UUID_KEY = rf"^{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}$"
# Only days that exist, leap years considered, which JSON Schema's formats do not promise.
_LEAP = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"([1-9][0-9]{{3}}-{_DAY}|{_LEAP})"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
OFFSET = "(Z|[-+]([01][0-9]|2[0-3]):[0-5][0-9])"
# Host names that all parsers accept: no numeric addresses and no Punycode, which have rules.
_LABEL = "[a-z0-9]+(-[a-z0-9]+)*"
HOST = rf"({_LABEL}\.)*[a-z]([a-z0-9]*|[a-z0-9]*-[a-z][a-z0-9]*)(:[1-9][0-9]{{0,3}})?"
USER = "([A-Za-z0-9._~-]+(:[A-Za-z0-9._~-]+)?@)?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = f"{HEX}{{1,4}}"
IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
IPV6 = f"({_GROUP}:){{7}}{_GROUP}"
# Host bits of a network are 0, so the prefix ends between two numbers.
NETWORK4 = "|".join(rf"{_OCTET}(\.{_OCTET}){{{n}}}(\.0){{{3 - n}}}/{8 * (n + 1)}" for n in range(4))
NETWORK6 = "|".join(f"({_GROUP}:){{{n}}}:/{16 * n}" for n in range(1, 8))
INTERFACE4 = f"{IPV4}/([12]?[0-9]|3[0-2])"
INTERFACE6 = f"{IPV6}/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
# msgspec reads days and smaller units; a year has no fixed length.
_N = "[0-9]{1,5}"
_CLOCK = rf"T({_N}H({_N}M)?({_N}S)?|{_N}M({_N}S)?|{_N}S)"
DURATION = rf"^P({_N}D({_CLOCK})?|{_CLOCK})$"
# Pydantic reads all units, and a timedelta has fewer than 10**9 days.
SHORT_DURATION = f"^([A-Z]+{_N})+[A-Z]$"


# Format that says in a word what a pattern says: for a model, which reads a date's pattern as 160
# tokens and understands it no better. Constraints keep the patterns, which are stricter.
_IN_A_WORD = {
    f"^{DATE}$": "date",
    f"^{DATE}T{TIME}{OFFSET}$": "date-time",
    f"^{TIME}{OFFSET}$": "time",
    DURATION: "duration",
}


def in_words(schema: Any) -> Any:
    """Return a schema as a model is told of it."""
    if isinstance(schema, list):
        return [in_words(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    word = _IN_A_WORD.get(str(schema.get("pattern")))
    if word is not None:
        schema = {**schema, "format": word}
        del schema["pattern"]
    return {key: in_words(value) for key, value in schema.items()}


def base64_pattern(low: int, high: int | None, text: bool = False) -> str:
    """Return a pattern of Base64 for `low` to `high` bytes. `text`: the highest bit of each byte is
    0. Raises InvalidConstraint if no length fits."""
    one = "[A-Za-z0-9+/]"
    group, two = f"{one}{{4}}", f"{one}{{2}}"
    first = "[A-Za-f]" if text else one
    if text:
        two = f"{first}[A-HQ-Xg-nw-z0-3]"
        group = f"{two}[ABEFIJMNQRUVYZcdghklopstwx014589]{one}"
    endings = []
    for rest, written in ((0, ""), (1, f"{first}[AQgw]=="), (2, f"{two}[AEIMQUYcgkosw048]=")):
        least = max(0, -((rest - low) // 3))
        most = None if high is None else (high - rest) // 3
        if most is None or most >= least:
            upper = "" if most is None else most
            endings.append(f"({group}){{{least},{upper}}}{written}")
    if not endings:
        raise InvalidConstraint(f"no bytes are at least {low} and at most {high} long")
    return f"^({'|'.join(endings)})$"


# Schemas ------------------------------------------------------------------------------------------

Schema = dict[str, Any]
Found = TypeVar("Found")


def once_per_type(make: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Cache `make` per type; a type with an unhashable annotation is not cached."""

    @functools.lru_cache(maxsize=512)
    def kept(kind: Any, name: str) -> Found:  # A | B == B | A, but the order may decide
        return make(kind)

    @functools.wraps(make)
    def found(kind: Any) -> Found:
        try:
            return kept(kind, name_of(kind))
        except TypeError:  # a TypeError of `make` itself is raised again
            return make(kind)

    return found


_KEY_PATTERNS: dict[type, str] = {
    inspect.IntType: INT_KEY,
    inspect.FloatType: NUMBER_TEXT,
    inspect.DecimalType: NUMBER_TEXT,
    inspect.UUIDType: UUID_KEY,
    inspect.DateType: f"^{DATE}$",
}


def name_of(kind: Any) -> str:
    """Return the type's name, for messages."""
    plain = isinstance(kind, type) and not typing.get_args(kind)
    return kind.__qualname__ if plain else repr(kind).replace("typing.", "")


def described(kind: Any) -> Schema:
    """Return the schema of a type. Raises errors of msgspec or of the type's own hooks."""
    msgspec.json.Decoder(kind)  # refuses what could be described but not read
    return _Builder().build(inspect.type_info(kind))


class _Builder:
    """Builder of a schema from msgspec's description of a type; classes become `$defs`."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._definitions: dict[str, Schema] = {}

    def build(self, root: inspect.Type) -> Schema:
        schema = self._of(root)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _of(self, kind: inspect.Type) -> Schema:
        for classes, build in _BUILDERS:
            if isinstance(kind, classes):
                return build(self, kind)
        raise InvalidConstraint(f"{_described(kind)} has no form in JSON that can be read back")

    def annotated(self, kind: inspect.Metadata) -> Schema:
        return {**self._of(kind.type), **(kind.extra_json_schema or {})}

    def union(self, kind: inspect.UnionType) -> Schema:
        return {"anyOf": [self._of(one) for one in kind.types]}

    def array(self, kind: Any) -> Schema:
        schema: Schema = {"type": "array"}
        if not isinstance(kind.item_type, inspect.AnyType):
            schema["items"] = self._of(kind.item_type)
        _bound(schema, kind, "Items")
        if isinstance(kind, inspect.SetType | inspect.FrozenSetType):
            schema["uniqueItems"] = True
        return schema

    def tuple(self, kind: inspect.TupleType) -> Schema:
        return self._row(kind.item_types, len(kind.item_types))

    def _row(self, items: Sequence[inspect.Type], required: int) -> Schema:
        schema: Schema = {"type": "array"}
        if items:  # JSON Schema has no empty `prefixItems`
            schema["prefixItems"] = [self._of(item) for item in items]
        return schema | {"items": False, "minItems": required, "maxItems": len(items)}

    def mapping(self, kind: Any) -> Schema:
        key, value = kind.key_type, self._of(kind.value_type)
        if isinstance(key, inspect.Metadata):
            key = key.type
        schema: Schema = {"type": "object"}
        if isinstance(key, inspect.EnumType | inspect.LiteralType):
            names = key.values if isinstance(key, inspect.LiteralType) else _members(key.cls)
            schema["properties"] = {str(name): value for name in names}
            schema["additionalProperties"] = False
        elif (pattern := _key_pattern(key)) is not None:
            schema["patternProperties"] = {pattern: value}
            schema["additionalProperties"] = False
        else:
            if not _is_any_text(key):
                schema["propertyNames"] = text = self._of(key)
                if text.get("type") != "string":
                    raise InvalidConstraint(f"a key of {_described(key)} cannot be constrained")
            if value:
                schema["additionalProperties"] = value
        _bound(schema, kind, "Properties")
        return schema

    def fields(self, kind: Any) -> Schema:
        """Return a reference to the definition of a class with fields, which may be recursive."""
        # By identity: one object describes a class, but each specialisation of a generic class.
        if id(kind) not in self._names:
            self._names[id(kind)] = name = self._new_name(kind.cls)
            self._definitions[name] = {}
            self._definitions[name] = self._define(kind)
        return {"$ref": f"#/$defs/{self._names[id(kind)]}"}

    def _new_name(self, cls: type) -> str:
        name = base = cls.__name__
        while name in self._definitions:
            name = f"{base}_{len(self._definitions)}"
        return name

    def _define(self, kind: Any) -> Schema:
        if isinstance(kind, inspect.NamedTupleType) or getattr(kind, "array_like", False):
            tag = getattr(kind, "tag", None)
            items = [] if tag is None else [inspect.LiteralType((tag,))]
            required = len(items) + sum(field.required for field in kind.fields)
            return self._row([*items, *(field.type for field in kind.fields)], required)
        properties: Schema = {}
        required_names = []
        if getattr(kind, "tag_field", None) is not None:
            properties[kind.tag_field] = {"const": kind.tag}
            required_names.append(kind.tag_field)
        made = getattr(typing.get_origin(kind.cls) or kind.cls, "__dataclass_fields__", {})
        for field in _in_order(kind):
            if field.name in made and not made[field.name].init:
                continue
            properties[field.encode_name] = self._of(field.type)
            if field.required:
                required_names.append(field.encode_name)
        return {
            "type": "object",
            "properties": properties,
            "required": required_names,
            "additionalProperties": False,
        }


def _in_order(kind: Any) -> list[inspect.Field]:
    """Return a class's fields in source order; msgspec sorts a TypedDict's."""
    if not isinstance(kind, inspect.TypedDictType):
        return list(kind.fields)
    cls = typing.get_origin(kind.cls) or kind.cls
    names = list(cls.__annotations__)  # a TypedDict's include those it inherits
    return sorted(kind.fields, key=lambda field: names.index(field.name))


def _number(name: str) -> Callable[[_Builder, Any], Schema]:
    def build(builder: _Builder, kind: Any) -> Schema:
        step = kind.multiple_of
        if step is not None and Decimal(step) != Decimal(repr(step)):
            # 0.1 is 0.1000000000000000055 as a float, and msgspec reads multiples of this.
            raise InvalidConstraint(
                f"msgspec reads few multiples of {step}, which no float is; "
                f"use pydantic.Field(multiple_of={step})"
            )
        limits = {
            "minimum": kind.ge,
            "exclusiveMinimum": kind.gt,
            "maximum": kind.le,
            "exclusiveMaximum": kind.lt,
            "multipleOf": step,
        }
        return {"type": name} | {key: limit for key, limit in limits.items() if limit is not None}

    return build


def _string(builder: _Builder, kind: inspect.StrType) -> Schema:
    schema: Schema = {"type": "string"}
    _bound(schema, kind, "Length")
    if kind.pattern is not None:
        schema["pattern"] = kind.pattern
    return schema


def _base64(builder: _Builder, kind: Any) -> Schema:
    return {"type": "string", "pattern": base64_pattern(kind.min_length or 0, kind.max_length)}


def _moment(builder: _Builder, kind: inspect.DateTimeType) -> Schema:
    offset = "" if kind.tz is False else OFFSET
    return {"type": "string", "pattern": f"^{DATE}T{TIME}{offset}$"}


def _clock(builder: _Builder, kind: inspect.TimeType) -> Schema:
    offset = "" if kind.tz is False else OFFSET
    return {"type": "string", "pattern": f"^{TIME}{offset}$"}


def _literal(builder: _Builder, kind: inspect.LiteralType) -> Schema:
    return _one_of(kind.values)


def _enum(builder: _Builder, kind: inspect.EnumType) -> Schema:
    return _one_of(_members(kind.cls))


def _one_of(values: Sequence[Any]) -> Schema:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def _members(cls: type[enum.Enum]) -> list[Any]:
    return [member.value for member in cls]


def _key_pattern(key: inspect.Type) -> str | None:
    if isinstance(key, inspect.IntType | inspect.FloatType) and key != type(key)():
        return None  # bounded: the schema of the number would be that of a JSON number, not a key
    return _KEY_PATTERNS.get(type(key))


def _is_any_text(key: inspect.Type) -> bool:
    if isinstance(key, inspect.UnionType):
        return any(_is_any_text(one) for one in key.types)
    return isinstance(key, inspect.AnyType) or key == inspect.StrType()


def _bound(schema: Schema, kind: Any, noun: str) -> None:
    if kind.min_length is not None:
        schema[f"min{noun}"] = kind.min_length
    if kind.max_length is not None:
        schema[f"max{noun}"] = kind.max_length


def _described(kind: inspect.Type) -> str:
    return name_of(kind.cls) if hasattr(kind, "cls") else type(kind).__name__


def _always(schema: Schema) -> Callable[[_Builder, Any], Schema]:
    return lambda builder, kind: dict(schema)


_BUILDERS: tuple[tuple[Any, Callable[[_Builder, Any], Schema]], ...] = (
    (inspect.Metadata, _Builder.annotated),
    ((inspect.AnyType, inspect.RawType), _always({})),
    (inspect.NoneType, _always({"type": "null"})),
    (inspect.BoolType, _always({"type": "boolean"})),
    (inspect.IntType, _number("integer")),
    (inspect.FloatType, _number("number")),
    (inspect.StrType, _string),
    ((inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType), _base64),
    (inspect.DateTimeType, _moment),
    (inspect.TimeType, _clock),
    (inspect.DateType, _always({"type": "string", "pattern": f"^{DATE}$"})),
    (inspect.TimeDeltaType, _always({"type": "string", "pattern": DURATION})),
    (inspect.UUIDType, _always({"type": "string", "format": "uuid"})),
    (inspect.DecimalType, _always({"type": "string", "pattern": NUMBER_TEXT})),
    (inspect.EnumType, _enum),
    (inspect.LiteralType, _literal),
    (inspect.UnionType, _Builder.union),
    (inspect.TupleType, _Builder.tuple),
    (inspect.CollectionType, _Builder.array),
    ((inspect.DictType, inspect.FrozenDictType), _Builder.mapping),
    (
        (inspect.StructType, inspect.DataclassType, inspect.TypedDictType, inspect.NamedTupleType),
        _Builder.fields,
    ),
)
