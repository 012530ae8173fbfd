"""JSON schemas of pydantic's types, made by pydantic itself.

Nothing here imports pydantic before there is a type that needs it.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

from rootlace.types.msgspec_types import DATE, HEX, INT_KEY, NUMBER_TEXT, UUID_KEY

Schema = dict[str, Any]


def is_model(kind: Any) -> bool:
    """Whether it is a pydantic model, or a class that has the methods of one."""
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("model_json_schema", "model_validate_json")
    )


def is_pydantic(kind: Any) -> bool:
    """Whether pydantic must describe and read the type, because some part of it is pydantic's."""
    if is_model(kind):
        return True
    if "pydantic" not in sys.modules and "annotated_types" not in sys.modules:
        return False
    try:
        return _has_own(kind)
    except TypeError:  # not hashable
        return _has_own.__wrapped__(kind)


@functools.lru_cache(maxsize=512)
def _has_own(kind: Any) -> bool:
    return any(_is_own(part) for part in _parts(kind, set()))


def _is_own(part: Any) -> bool:
    own = part if isinstance(part, type) else type(part)
    package = own.__module__.partition(".")[0]
    if package in ("pydantic", "pydantic_core", "annotated_types"):
        return True
    return isinstance(part, type) and (
        is_model(part)
        or "__is_pydantic_dataclass__" in part.__dict__
        or hasattr(part, "__get_pydantic_core_schema__")
    )


def _parts(kind: Any, seen: set[int]) -> Iterator[Any]:
    """The type and everything it is made of: arguments, annotations' metadata, fields."""
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


def schema_of(kind: Any) -> Schema:
    """See `types.schema_of`. Raises what pydantic raises, and what the model's own hooks do."""
    return _sharpened(_described(kind))


def parse_as(kind: Any, text: str) -> Any:
    """See `types.parse_as`. Raises ValueError."""
    if is_model(kind):
        return kind.model_validate_json(text)
    return _adapter(kind).validate_json(text)


def _described(kind: Any) -> Schema:
    if is_model(kind) and not hasattr(kind, "__pydantic_core_schema__"):
        schema = kind.model_json_schema()
    elif is_model(kind):
        schema = kind.model_json_schema(schema_generator=_exact_generator())
    else:
        schema = _adapter(kind).json_schema(schema_generator=_exact_generator())
    return typing.cast(Schema, schema)


@functools.lru_cache(maxsize=256)
def _cached_adapter(kind: Any) -> Any:
    return importlib.import_module("pydantic").TypeAdapter(kind)


def _adapter(kind: Any) -> Any:
    try:
        return _cached_adapter(kind)
    except TypeError:  # not hashable; what pydantic does not like raises again
        return importlib.import_module("pydantic").TypeAdapter(kind)


@functools.cache
def _exact_generator() -> Any:
    """pydantic's schema generator, which here also says what its schemas leave out: objects are
    closed, keys that are not strings have a pattern, and decimals are numbers."""
    base: Any = importlib.import_module("pydantic.json_schema").GenerateJsonSchema

    class ExactJsonSchema(base):  # type: ignore[misc]
        def model_schema(self, schema: Any) -> Schema:
            return _closed(super().model_schema(schema))

        def dataclass_schema(self, schema: Any) -> Schema:
            return _closed(super().dataclass_schema(schema))

        def typed_dict_schema(self, schema: Any) -> Schema:
            return _closed(super().typed_dict_schema(schema))

        def dict_schema(self, schema: Any) -> Schema:
            found: Schema = super().dict_schema(schema)
            pattern = _CORE_KEYS.get(schema.get("keys_schema", {}).get("type"))
            if pattern is not None and "propertyNames" not in found:
                values = found.pop("additionalProperties", True)
                found.pop("patternProperties", None)
                found["patternProperties"] = {pattern: {} if values is True else values}
                found["additionalProperties"] = False
            return found

        def decimal_schema(self, schema: Any) -> Schema:
            found: Schema = super().decimal_schema(schema)
            numbers = [one for one in found.get("anyOf", ()) if one.get("type") == "number"]
            return numbers[0] if numbers else found

    return ExactJsonSchema


_CORE_KEYS = {
    "int": INT_KEY,
    "float": NUMBER_TEXT,
    "decimal": NUMBER_TEXT,
    "uuid": UUID_KEY,
    "date": f"^{DATE}$",
}
# Where the model's author composed the schema by hand, its objects are left as they are.
_COMPOSING = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties", "$ref"}
)


def _closed(schema: Schema) -> Schema:
    """The schema of an object with no other properties than its own.

    pydantic ignores others; one that is to have them says so (`extra="allow"`).
    """
    if "properties" in schema and not _COMPOSING & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


# Formats that only pydantic has: those that allow any text, and UUIDs of one version.
_ANY_TEXT = frozenset({"binary", "password", "path"})
_UUID_FORMAT = re.compile("uuid([1-8])")


def _sharpened(schema: Schema) -> Schema:
    """Replace pydantic's extensions of JSON Schema by what JSON Schema has for them."""
    definitions = schema.get("$defs", {})
    for node in _nodes(schema):
        _require_tag(node, definitions)
        form = node.get("format")
        if not isinstance(form, str) or node.get("type") != "string":
            continue
        if form in _ANY_TEXT:
            del node["format"]
        elif version := _UUID_FORMAT.fullmatch(form):
            del node["format"]
            tail = f"{version[1]}{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}"
            node["pattern"] = f"^{HEX}{{8}}-{HEX}{{4}}-{tail}$"
    return schema


def _nodes(value: Any) -> Iterator[Schema]:
    """Every object in a schema."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _require_tag(node: Schema, definitions: dict[str, Schema]) -> None:
    """Require the tag of a tagged union, as pydantic does when it reads one.

    pydantic's schemas leave a tag with a default out of `required`. With it, at most one of the
    alternatives fits, so that `oneOf` is `anyOf`.
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
