"""Endpoints: a path, its handler, and the types of bodies and replies.

    async def rerank(self, body: RerankBody) -> Ranking        the types say how it is called

Routes, batches, the message of a 404, the OpenAPI document and the page for people are made of
endpoints.

Sections: endpoint, reference, OpenAPI, reference page.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, cached_property, reduce
from importlib import metadata
from inspect import signature
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import jinja2
import msgspec
from aiohttp import web
from msgspec import inspect

from rootlace.runtime.server.http.body import (
    RECEIVING,
    Standing,
    alternatives,
    read_body,
    read_query,
    standing,
)
from rootlace.runtime.server.http.replies import Stream, json_response

# Endpoint -----------------------------------------------------------------------------------------


JSON = "application/json"
PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
"""Variable part of a path."""


class Endpoint(msgspec.Struct, frozen=True, dict=True):
    """Path with its handler. `says` is one line for people. `call` gets the arguments that its
    parameters name: the decoded `body` and `query`, the `request`, and parts of the path. It
    returns a `reply`, a `Stream`, or aiohttp's response. `takes` is the body's content type,
    `content` the reply's. `other_body`: another type accepted in place of `body`; both are
    documented elsewhere."""

    method: str
    path: str
    call: Callable[..., Awaitable[Any]]
    says: str
    reply: Any = None
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    content: str = JSON
    takes: str = JSON
    other_body: type[msgspec.Struct] | None = None

    @property
    def bodies(self) -> list[type[msgspec.Struct]]:
        return [each for each in (self.body, self.other_body) if each is not None]

    @property
    def streams(self) -> bool:
        """Return whether the reply may be a stream; never for an endpoint with two bodies."""
        return len(self.bodies) == 1 and "stream" in self.bodies[0].__struct_fields__

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset(signature(self.call).parameters)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. Raises the errors of `read_body`, `read_query` and `call`."""
        wanted = self._wanted
        values: dict[str, Any] = {n: v for n, v in request.match_info.items() if n in wanted}
        if "request" in wanted:
            values["request"] = request
        elif "body" in wanted and self.body is not None:
            values["body"] = await read_body(request, self.body)
        elif self.method == "POST":
            await request.app[RECEIVING].read(request)  # whatever is sent
        if "query" in wanted and self.query is not None:
            values["query"] = read_query(request, self.query)
        reply = await self.call(**values)
        if isinstance(reply, Stream):
            return await reply.send(request)
        return reply if isinstance(reply, web.StreamResponse) else json_response(reply)


def endpoint(
    method: str, path: str, call: Callable[..., Awaitable[Any]], says: str, **stated: Any
) -> Endpoint:
    """Make an endpoint from the types of `call`; `stated` fields take precedence."""
    types = get_type_hints(call)
    reply = types.pop("return")
    replies = [
        kind
        for kind in (get_args(reply) if get_origin(reply) in (Union, UnionType) else (reply,))
        if not (isinstance(kind, type) and issubclass(kind, Stream | web.StreamResponse))
    ]
    found = {"reply": reduce(or_, replies)} if replies else {}
    found |= {name: kind for name, kind in types.items() if name in ("body", "query")}
    return Endpoint(method, path, call, says, **(found | stated))


def shown_path(endpoint: Endpoint) -> str:
    """Return the path in the notation for people."""
    return PARAMETER.sub(r"{\1}", endpoint.path)


# Reference ----------------------------------------------------------------------------------------


_NAMES = {
    inspect.StrType: "string",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "boolean",
    inspect.NoneType: "null",
}


class Field(msgspec.Struct, frozen=True):
    """Field of a body; `path` is its place, such as `messages[].role`."""

    path: str
    type: str
    required: bool
    standing: Standing | None


_Object = inspect.StructType | inspect.TypedDictType


def fields(kind: Any) -> list[Field]:
    """List the fields of a body, a query or a reply, and of objects in it, as declared. Of a union
    of objects, lists the fields of all."""
    found = [
        field
        for info in alternatives([inspect.type_info(kind)])
        if isinstance(info, _Object)
        for field in _fields(info, "", deep=True)
    ]
    return list({field.path: field for field in found}.values())


def _fields(struct: _Object, below: str, deep: bool) -> Iterator[Field]:
    for field in struct.fields:
        path = f"{below}{field.encode_name}"
        yield Field(path, _shown(field.type), field.required, standing(field))
        if not deep:
            continue
        for inner, place in _structs(field.type, path):
            yield from _fields(inner, f"{place}.", deep=False)


def _structs(type_: inspect.Type, path: str) -> Iterator[tuple[_Object, str]]:
    """Give the objects in a value of the type, and their places."""
    for each in alternatives([type_]):
        if isinstance(each, _Object):
            yield each, path
        elif isinstance(each, inspect.ListType):
            for item in alternatives([each.item_type]):
                if isinstance(item, _Object):
                    yield item, f"{path}[]"


def _shown(type_: inspect.Type) -> str:
    """Name a type in JSON's words; null goes without saying."""
    found = alternatives([type_])
    names = [_shown_one(each) for each in found if not isinstance(each, inspect.NoneType)]
    return " or ".join(dict.fromkeys(names)) or "null"


def _shown_one(type_: inspect.Type) -> str:
    if isinstance(type_, inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in sorted(map(str, type_.values)))
    if isinstance(type_, inspect.ListType | inspect.VarTupleType):
        return f"list of ({_shown(type_.item_type)})"
    if isinstance(type_, _Object | inspect.DictType):
        return "object"
    return _NAMES.get(type(type_), "anything")


# OpenAPI ------------------------------------------------------------------------------------------


def openapi(endpoints: Sequence[Endpoint], name: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `endpoints`, of a server with the model `name`."""
    types = [each for one in endpoints for each in (*one.bodies, one.reply) if each is not None]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    for schema in components.values():
        properties = schema.get("properties", {})
        for field, example in ({"model": name} | _EXAMPLES).items():
            if field in properties:
                properties[field]["examples"] = [example]
    for kind, schema in zip(types, schemas, strict=True):
        if names := getattr(kind, "one_of", ()):
            component = components[schema["$ref"].rpartition("/")[2]]
            component["oneOf"] = [_alone(name, names) for name in names]
    found = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        bodies = [next(found) for _ in endpoint.bodies]
        body = {"anyOf": bodies} if len(bodies) > 1 else next(iter(bodies), None)
        reply = None if endpoint.reply is None else next(found)
        operation = _operation(endpoint, body, reply)
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


_EXAMPLES = {
    "prompt": "Two and two make",
    "text": "Two and two make",
    "query": "Which is a fruit?",
    "documents": ["an apple", "a stone"],
    "choices": [" four", " five"],
    "messages": [{"role": "user", "content": "Hello"}],
}


def _alone(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a schema that requires the field `name`, and null for the others of `names`."""
    kinds: dict[str, Any] = {each: {"type": "null"} for each in names}
    return {"required": [name], "properties": kinds | {name: {"not": {"type": "null"}}}}


# The interfaces' error objects differ, and Ollama's error is a text.
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": ["object", "string"]}},
    "required": ["error"],
}


def _operation(
    endpoint: Endpoint, body: dict[str, Any] | None, reply: dict[str, Any] | None
) -> dict[str, Any]:
    content = {endpoint.content: {"schema": reply} if reply else {}}
    if endpoint.streams:  # events, each of which is a line of JSON
        content |= {kind: {} for kind in ("text/event-stream", "application/x-ndjson")}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": endpoint.says,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}_{endpoint.path}").strip("_"),
        "responses": {
            "200": {"description": endpoint.says, "content": content},
            "default": {"description": "an error", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PARAMETER.findall(endpoint.path)
    ]
    if endpoint.query is not None:
        parameters += _query_parameters(endpoint.query)
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation


def _query_parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    (_, components) = msgspec.json.schema_components([kind])
    (schema,) = components.values()
    return [
        {"name": name, "in": "query", "required": False, "schema": about}
        for name, about in schema["properties"].items()
    ]


# Reference page -----------------------------------------------------------------------------------
#
# `GET /openapi.json`, and the same for people at `GET /docs`: one self-contained page.


_PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rootlace: {{ name }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
code, h2 { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
td, th { border-top: 1px solid var(--line); padding: .25rem .5rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
nav { columns: 16rem; font-size: .875rem; } nav a { display: block; }
.refused td:first-child { text-decoration: line-through; } .ignored, .refused { opacity: .65; }
summary { cursor: pointer; }
</style></head><body>
<h1>{{ name }}, served by Rootlace</h1>
<p>To try it: <a href="./">the playground</a>. The same for machines:
<a href="openapi.json">openapi.json</a>. Every field may be null, which means its default.</p>
<nav>{% for one in sections %}<a href="#{{ one.anchor }}">{{ one.title }}</a>{% endfor %}</nav>
{% for one in sections %}
<h2 id="{{ one.anchor }}">{{ one.title }}</h2><p>{{ one.says }}</p>
{% for title, rows in one.tables %}
<details><summary>{{ title }}</summary><table>
{% for field, says in rows %}
<tr class="{{ field.standing.kind or 'served' }}"><td><code>{{ field.path }}</code></td>
<td>{{ field.type }}</td><td>{{ field.standing or says }}</td></tr>
{% endfor %}
</table></details>
{% endfor %}
{% endfor %}
</body></html>
"""


class Reference:
    """Handlers of the documents. `endpoints` is the list of all endpoints; it may still grow."""

    def __init__(self, model: Callable[[], str], endpoints: Sequence[Endpoint]) -> None:
        """`model` returns the served model's name, for examples."""
        self._model = model
        self._endpoints = endpoints

    async def openapi(self) -> dict[str, Any]:
        return openapi(self._endpoints, self._model())

    async def page(self) -> web.Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return web.Response(
            text=reference_page(self._endpoints, self._model()),
            content_type="text/html",
            headers={"Content-Security-Policy": policy},
        )


def reference_page(endpoints: Sequence[Endpoint], name: str) -> str:
    """Write the page for people."""
    return _template().render(name=name, sections=[_section(endpoint) for endpoint in endpoints])


@cache
def _template() -> jinja2.Template:
    return jinja2.Environment(autoescape=True).from_string(_PAGE)


def _section(endpoint: Endpoint) -> dict[str, Any]:
    """Return the page's section on an endpoint, with notes on each field."""
    title = f"{endpoint.method} {shown_path(endpoint)}"
    tables = []
    for name, kind in (
        ("Fields", None if endpoint.other_body else endpoint.body),
        ("Query", endpoint.query),
    ):
        if kind is not None:
            rows = [(field, "Required." if field.required else "") for field in fields(kind)]
            tables.append((name, rows))
    if endpoint.reply is not None and (found := fields(endpoint.reply)):
        rows = [(field, "" if field.required else "Where there is one.") for field in found]
        tables.append(("Reply", rows))
    anchor = title.replace(" ", "").replace("{", "").replace("}", "")
    return {"title": title, "anchor": anchor, "says": endpoint.says, "tables": tables}
