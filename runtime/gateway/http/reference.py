"""What each endpoint takes, told by the types that decode its bodies, for people and as OpenAPI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
from msgspec import inspect

from rootlace.runtime.gateway.http.endpoint import Endpoint
from rootlace.runtime.gateway.http.fields import Standing, standing

_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_NAMES = {
    inspect.StrType: "string",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "boolean",
    inspect.NoneType: "null",
}


@dataclass(frozen=True)
class Field:
    """A field of a body; `path` is its place, such as `messages[].role`."""

    path: str
    type: str
    required: bool
    standing: Standing | None


def shown_path(endpoint: Endpoint) -> str:
    """The path as people write it."""
    return _PARAMETER.sub(r"{\1}", endpoint.path)


def fields(body: type[msgspec.Struct]) -> list[Field]:
    """The fields of a body, and of the objects in it, in the order in which they are declared."""
    info = inspect.type_info(body)
    assert isinstance(info, inspect.StructType)
    return list(_fields(info, "", deep=True))


def _fields(struct: inspect.StructType, below: str, deep: bool) -> Iterator[Field]:
    for field in struct.fields:
        path = f"{below}{field.encode_name}"
        yield Field(path, _shown(field.type), field.required, standing(field))
        if not deep:
            continue
        for inner, place in _structs(field.type, path):
            yield from _fields(inner, f"{place}.", deep=False)


def _structs(type_: inspect.Type, path: str) -> Iterator[tuple[inspect.StructType, str]]:
    """The objects that a value of the type is made of, and where they stand."""
    for each in _alternatives(type_):
        if isinstance(each, inspect.StructType):
            yield each, path
        elif isinstance(each, inspect.ListType):
            for item in _alternatives(each.item_type):
                if isinstance(item, inspect.StructType):
                    yield item, f"{path}[]"


def _alternatives(type_: inspect.Type) -> list[inspect.Type]:
    if isinstance(type_, inspect.Metadata):
        return _alternatives(type_.type)
    if isinstance(type_, inspect.UnionType):
        return [each for one in type_.types for each in _alternatives(one)]
    return [type_]


def _shown(type_: inspect.Type) -> str:
    """A type in JSON's words; that a field may be null goes without saying."""
    names: list[str] = []
    for each in _alternatives(type_):
        if isinstance(each, inspect.NoneType):
            continue
        names.append(_shown_one(each))
    return " or ".join(dict.fromkeys(names)) or "null"


def _shown_one(type_: inspect.Type) -> str:
    if isinstance(type_, inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in sorted(map(str, type_.values)))
    if isinstance(type_, inspect.ListType | inspect.VarTupleType):
        return f"list of ({_shown(type_.item_type)})"
    if isinstance(type_, inspect.StructType | inspect.DictType):
        return "object"
    return _NAMES.get(type(type_), "anything")


# ---------------------------------------------------------------- OpenAPI


def openapi(endpoints: Sequence[Endpoint], name: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `endpoints`, of a server with the model `name`."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    schemas, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    of_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, of_body.get(endpoint.body))  # type: ignore[arg-type]
        paths.setdefault(shown_path(endpoint), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Rootlace: {name}", "version": metadata.version("rootlace")},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


# The interfaces differ in what stands beside the error, and Ollama's is a text.
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": ["object", "string"]}},
    "required": ["error"],
}


def _operation(endpoint: Endpoint, schema: dict[str, Any] | None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": endpoint.says,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}_{endpoint.path}").strip("_"),
        "responses": {
            "200": {"description": endpoint.says},
            "default": {"description": "an error", "content": error},
        },
    }
    if names := _PARAMETER.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if schema is not None:
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
