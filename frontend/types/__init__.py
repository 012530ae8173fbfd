"""Python types as constraints: the JSON schema of a type, and its value parsed from text.

msgspec handles the standard library's types, dataclasses, TypedDicts, NamedTuples, enums and
Structs; pydantic handles its models. Schemas are *closed*: an object has only the type's
properties. For keys, dates and binary data the schemas allow exactly the texts that the parser
accepts. So a generated text ends and can be parsed.

`partial_json` parses incomplete JSON. `constraint_kinds` converts the arguments of each kind of
constraint, and finds misspelt keywords in schemas.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import msgspec

from rootlace.types.msgspec_types import (
    DATE,
    HEX,
    HOST,
    INT_KEY,
    INTERFACE4,
    INTERFACE6,
    IPV4,
    IPV6,
    NETWORK4,
    NETWORK6,
    NUMBER_TEXT,
    SHORT_DURATION,
    TIME,
    USER,
    UUID_KEY,
    Schema,
    base64_pattern,
    described,
    name_of,
    once_per_type,
)
from rootlace.wire.errors import InvalidConstraint

# JSON schemas of pydantic's types, made by pydantic itself.
#
# Nothing here imports pydantic before there is a type that needs it.


def is_model(kind: Any) -> bool:
    """Return whether `kind` is a pydantic model, or a class with a model's methods."""
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("model_json_schema", "model_validate_json")
    )


@once_per_type
def is_pydantic(kind: Any) -> bool:
    """Return whether pydantic must describe and parse the type: a part of it is pydantic's, or
    msgspec cannot parse it."""
    parts = [kind] if is_model(kind) else list(_parts(kind, set()))
    if any(map(_is_own, parts)):
        return True
    # msgspec.Meta says nothing to pydantic.
    return any(map(_is_beyond_msgspec, parts)) and msgspec.Meta not in map(type, parts)


def _is_beyond_msgspec(part: Any) -> bool:
    """Return whether `part` needs pydantic: a path, a union of several dataclasses or TypedDicts,
    or a recursive alias (`type X = ...`). So does a dataclass with required fields outside
    `__init__`."""
    if typing.get_origin(part) in (typing.Union, types.UnionType):
        members = [typing.get_origin(each) or each for each in typing.get_args(part)]
        # Before Python 3.12, pydantic reads no TypedDict of typing.
        dicts = sum(map(typing.is_typeddict, members)) if sys.version_info >= (3, 12) else 0
        return dicts > 1 or sum(map(dataclasses.is_dataclass, members)) > 1
    if (value := getattr(part, "__value__", None)) is not None and not isinstance(part, type):
        return any(each is part for each in _parts(value, set()))
    if isinstance(part, type) and dataclasses.is_dataclass(part):
        defaults = ((f.default, f.default_factory) for f in dataclasses.fields(part) if not f.init)
        return (dataclasses.MISSING, dataclasses.MISSING) in defaults
    return isinstance(part, type) and issubclass(part, PurePath)


def _is_own(part: Any) -> bool:
    type_ = part if isinstance(part, type) else type(part)
    package = type_.__module__.partition(".")[0]
    if package in ("pydantic", "pydantic_core", "annotated_types"):
        return True
    return isinstance(part, type) and (
        is_model(part)
        or "__is_pydantic_dataclass__" in part.__dict__
        or hasattr(part, "__get_pydantic_core_schema__")
    )


def _parts(kind: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the type and all its parts: arguments, annotations' metadata, fields."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    yield kind
    yield from getattr(kind, "__metadata__", ())
    inner = list(typing.get_args(kind))
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return
    if isinstance(origin, type):
        inner.append(origin)
    if (alias := getattr(kind, "__value__", None)) is not None:
        inner.append(alias)  # `type X = ...`
    if isinstance(kind, type) and getattr(kind, "__annotations__", None) and not is_model(kind):
        try:
            inner += typing.get_type_hints(kind, include_extras=True).values()
        except Exception:  # names that cannot be found: making the schema reports them
            return
    for part in inner:
        yield from _parts(part, seen)


@once_per_type
def _adapter(kind: Any) -> Any:
    return importlib.import_module("pydantic").TypeAdapter(kind)


@functools.cache
def _exact_generator() -> Any:
    """Make pydantic's schema generator more exact. Objects are closed, and keys other than strings
    have a pattern. Decimals are numbers with a limited number of digits, and URLs have an allowed
    scheme. Times without a zone have no offset. Union members that a function chooses may overlap.
    """
    base: Any = importlib.import_module("pydantic.json_schema").GenerateJsonSchema

    def then(change: Callable[[Schema, Any], Schema], method: Any) -> Any:
        return lambda self, schema: change(method(self, schema), schema)

    class ExactJsonSchema(base):  # type: ignore[misc]
        model_schema = then(_closed, base.model_schema)
        dataclass_schema = then(_closed, base.dataclass_schema)
        typed_dict_schema = then(_closed, base.typed_dict_schema)
        url_schema = then(_of_schemes, base.url_schema)
        multi_host_url_schema = then(_of_schemes, base.multi_host_url_schema)

        def dataclass_args_schema(self, schema: Any) -> Schema:
            given = [field for field in schema["fields"] if field.get("init", True)]
            found: Schema = super().dataclass_args_schema({**schema, "fields": given})
            return found

        def _get_alias_name(self, field: Any, name: str) -> str:
            aliases: Any = field.get("validation_alias")
            by_name = self._config.populate_by_name or getattr(
                self._config, "validate_by_name", False
            )
            if by_name or not isinstance(aliases, list):
                return typing.cast(str, super()._get_alias_name(field, name))
            for path in aliases if isinstance(aliases[0], list) else [aliases]:
                if len(path) == 1:
                    return typing.cast(str, path[0])
            raise InvalidConstraint(f"{name!r} is read from within another field (AliasPath)")

        def dict_schema(self, schema: Any) -> Schema:
            found: Schema = super().dict_schema(schema)
            keys = schema.get("keys_schema", {"type": "str"})
            if names := _written_keys(
                keys
            ):  # with a pattern, used-up names would not end the object
                return found | {"propertyNames": {"enum": names}}
            pattern = _CORE_KEYS.get(keys["type"])
            if pattern is not None and not found.get("propertyNames", {}).keys() - {"$ref"}:
                values = found.get("additionalProperties", True)
                found.pop("propertyNames", None)
                found["patternProperties"] = {pattern: {} if values is True else values}
            return (
                found | {"additionalProperties": False} if "patternProperties" in found else found
            )

        def tagged_union_schema(self, schema: Any) -> Schema:
            found: Schema = super().tagged_union_schema(schema)
            if callable(schema["discriminator"]) and "oneOf" in found:
                # pydantic calls the function, whichever members fit.
                found["anyOf"] = found.pop("oneOf")
            return found

        def decimal_schema(self, schema: Any) -> Schema:
            found: Schema = super().decimal_schema(schema)
            numbers = [one for one in found.get("anyOf", ()) if one.get("type") == "number"]
            return _of_digits(numbers[0], schema) if numbers else found

        def datetime_schema(self, schema: Any) -> Schema:
            if schema.get("tz_constraint") == "naive":
                return {"type": "string", "pattern": f"^{DATE}T{TIME}$"}
            return typing.cast(Schema, super().datetime_schema(schema))

        def bytes_schema(self, schema: Any) -> Schema:
            # pydantic's configuration gives the encoding.
            form = "base64url" if self._config.val_json_bytes == "base64" else "binary"
            return {**super().bytes_schema(schema), "format": form, _OF_BYTES: True}

    return ExactJsonSchema


_OF_BYTES = "\0of bytes"
"""Mark of a bytes schema for `_sharpened`: its format alone does not tell text from bytes."""
_CORE_KEYS = {
    "int": INT_KEY,
    "float": NUMBER_TEXT,
    "decimal": NUMBER_TEXT,
    "uuid": UUID_KEY,
    "date": f"^{DATE}$",
}


def _written_keys(keys: Any) -> list[str]:
    """Return the texts that pydantic parses as such a key, if they are few and missing in its
    schema."""
    if keys["type"] == "bool":
        return ["true", "false"]
    values = keys.get("expected") or [member.value for member in keys.get("members", ())]
    if all(isinstance(value, str) for value in values):
        return []
    numbers = keys.get("sub_type") in ("int", "float")  # an IntEnum, say
    texts = [str(value) for value in values if numbers or isinstance(value, str)]
    if not texts:
        raise InvalidConstraint(f"no key of JSON is read as one of {values}")
    return texts


# Objects with these keywords were composed by hand, and stay unchanged.
_COMPOSING = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties", "$ref"}
)


def _closed(schema: Schema, kind: Any) -> Schema:
    """Close the schema of an object: no properties but its own. pydantic ignores others, unless a
    model allows them (`extra="allow"`)."""
    if "properties" in schema and not _COMPOSING & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


# Each position of the point is an alternative; few numbers have more digits.
_MOST_DIGITS = 15


def _of_digits(number: Schema, kind: Any) -> Schema:
    """Return the schema of a decimal with its limits on all digits and on those after the point."""
    places, digits = kind.get("decimal_places"), kind.get("max_digits")
    if digits is None:
        return number if places is None else _of_places(number, places)
    if places is None and digits <= _MOST_DIGITS:
        return {"anyOf": [_within(_of_places(number, n), digits - n) for n in range(digits + 1)]}
    if places is None:
        return _within(number, digits)
    bounded = _within(_of_places(number, min(places, digits)), max(digits - places, 0))
    if digits > places:
        return bounded
    # pydantic counts the 0 before the point if the number is 0.
    low, high = bounded["exclusiveMinimum"], bounded["exclusiveMaximum"]
    positive = {**bounded, "exclusiveMinimum": max(low, 0)}
    return {"anyOf": [positive, {**bounded, "exclusiveMaximum": min(high, 0)}]}


def _of_places(number: Schema, places: int) -> Schema:
    if places > -sys.float_info.min_10_exp:  # finer than JSON's numbers are read
        return number
    step = float(f"1e-{places}") if places else 1
    if "multipleOf" not in number:
        return {**number, "multipleOf": step}
    return {**number, "allOf": [{"multipleOf": step}]}


def _within(number: Schema, digits: int) -> Schema:
    """Limit a number's digits before the point."""
    if digits > sys.float_info.max_10_exp:
        return number
    end = 10**digits
    low, high = number.get("exclusiveMinimum", -end), number.get("exclusiveMaximum", end)
    return {**number, "exclusiveMinimum": max(low, -end), "exclusiveMaximum": min(high, end)}


def _of_schemes(url: Schema, kind: Any) -> Schema:
    """Limit a URL's schema to the allowed schemes."""
    if schemes := kind.get("allowed_schemes"):
        # A file's host has rules of its own, and no port.
        files = "file:///" if "file" in schemes else ""
        others = "|".join(re.escape(one) for one in schemes if one != "file")
        start = f"({others})://"
        if url.get("format") == "uri":
            other = others and f"{start}{USER}{HOST}([/?#]|$)"
            url["pattern"] = f"^({'|'.join(filter(None, (other, files)))})"
        else:  # a list of hosts, which is no URI
            del url["format"]
            url["pattern"] = f"^{start}{USER}{HOST}(,{HOST})*(/[A-Za-z0-9._~-]*)?$"
    return url


# Formats that only pydantic has: those that allow any text, UUIDs of one version, and others.
_ANY_TEXT = frozenset({"binary", "password", "path"})
_BASE64 = frozenset({"base64", "base64url"})
_PATTERNS = {
    "ipv4network": f"^({NETWORK4})$",
    "ipv6network": f"^({NETWORK6})$",
    "ipvanynetwork": f"^({NETWORK4}|{NETWORK6})$",
    "ipv4interface": f"^{INTERFACE4}$",
    "ipv6interface": f"^{INTERFACE6}$",
    "ipvanyinterface": f"^({INTERFACE4}|{INTERFACE6})$",
    "ipvanyaddress": f"^({IPV4}|{IPV6})$",
}
_UUID_FORMAT = re.compile("uuid([1-8])")


def _sharpened(schema: Schema) -> Schema:
    """Replace pydantic's extensions of JSON Schema by standard keywords."""
    definitions = schema.get("$defs", {})
    for node in _nodes(schema):
        _require_tag(node, definitions)
        of_bytes, form = node.pop(_OF_BYTES, False), node.get("format")
        if not isinstance(form, str) or node.get("type") != "string":
            continue
        if form in _ANY_TEXT:
            del node["format"]
        elif form in _BASE64 and "pattern" not in node:
            del node["format"]
            # Lengths count decoded bytes.
            sizes = node.pop("minLength", 0), node.pop("maxLength", None)
            pattern = base64_pattern(*sizes, text=not of_bytes)
            node["pattern"] = pattern.replace("+/", "_-") if form == "base64url" else pattern
        elif form == "duration":
            node.setdefault("pattern", SHORT_DURATION)
        elif form in _PATTERNS and "pattern" not in node:
            del node["format"]
            node["pattern"] = _PATTERNS[form]
        elif version := _UUID_FORMAT.fullmatch(form):
            del node["format"]
            tail = f"{version[1]}{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}"
            node["pattern"] = f"^{HEX}{{8}}-{HEX}{{4}}-{tail}$"
    return schema


def _nodes(value: Any) -> Iterator[Schema]:
    """Yield every object in a schema."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _require_tag(node: Schema, definitions: dict[str, Schema]) -> None:
    """Require the tag of a tagged union, as pydantic's parser does.

    pydantic's schemas leave a tag with a default out of `required`. With a required tag at most one
    alternative fits, so that `oneOf` equals `anyOf`.
    """
    tag = node.get("discriminator")
    if not isinstance(tag, dict) or "oneOf" not in node:
        return
    name = tag.get("propertyName")
    branches = [_resolved(branch, definitions) for branch in node["oneOf"]]
    if not all(name in branch.get("properties", {}) for branch in branches):
        return
    for branch in branches:
        required = branch.setdefault("required", [])
        if name not in required:
            required.append(name)
    del node["discriminator"]
    node["anyOf"] = node.pop("oneOf")


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    return definitions.get(name, schema)


def schema_of(kind: Any) -> Schema:
    """Return the JSON schema (draft 2020-12) whose valid texts `parse_as` turns into values of
    `kind`.

    Takes pydantic (v2) models, dataclasses, TypedDicts, NamedTuples, msgspec Structs, Literals,
    Enums (as values), plain types and combinations. `Annotated` may have `msgspec.Meta`, pydantic's
    `Field` or `annotated_types`. Properties keep the fields' order; one with a default may be left
    out. Raises InvalidConstraint naming the type.
    """
    if isinstance(kind, str):
        raise InvalidConstraint(f"type must be a type, not the string {kind!r}")
    try:
        if is_pydantic(kind):
            of_model = is_model(kind)
            if of_model and not hasattr(kind, "__pydantic_core_schema__"):
                return _sharpened(kind.model_json_schema())
            describe = kind.model_json_schema if of_model else _adapter(kind).json_schema
            return _sharpened(describe(schema_generator=_exact_generator()))
        return described(kind)
    except InvalidConstraint as error:
        raise InvalidConstraint(f"no JSON schema can be made of {name_of(kind)}: {error}") from None
    except Exception as error:  # the type's own hooks may raise anything
        reason = " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__
        raise InvalidConstraint(
            f"no JSON schema can be made of {name_of(kind)}: {reason}"
        ) from error


def parse_as(kind: Any, text: str) -> Any:
    """Parse JSON `text` as a value of type `kind`. Raises ValueError with the reason."""
    try:
        if is_model(kind):
            return kind.model_validate_json(text)
        if is_pydantic(kind):
            return _adapter(kind).validate_json(text)
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from error


def encoded(value: Any, **options: Any) -> bytes:
    """Encode `value` as JSON, pydantic models and paths too; `options` are `msgspec.json.encode`'s.
    Raises TypeError, ValueError or RecursionError for other values."""
    return msgspec.json.encode(value, enc_hook=_plain, **options)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


@once_per_type
def schema_text(kind: Any) -> str:
    """Return `schema_of(kind)` as compact JSON text."""
    return msgspec.json.encode(schema_of(kind)).decode()
