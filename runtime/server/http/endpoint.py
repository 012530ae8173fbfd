"""An endpoint: a path, what answers there, and what it takes and gives.

    async def rerank(self, body: RerankBody) -> Ranking        the types say how it is called

Routes, batches, the OpenAPI document and the message of a 404 know endpoints by this.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from inspect import signature
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from aiohttp import web

from rootlace.runtime.server.http.body import RECEIVING, read_body, read_query
from rootlace.runtime.server.http.replies import Stream, json_response

JSON = "application/json"
PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
"""A part of a path that differs."""


@dataclass(frozen=True)
class Endpoint:
    """`says` is one line for people. `call` is given what its parameters name: the decoded `body`
    and `query`, the `request`, and parts of the path. It gives a `reply`, a `Stream`, or a response
    of aiohttp's. Bodies are JSON where `takes` does not say otherwise, replies where `content` does
    not. `other_body`: another type that is taken in place of `body`; both are described where they
    belong."""

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
        """Whether its reply may be a stream: where one of two bodies is taken, none is answered."""
        return len(self.bodies) == 1 and "stream" in self.bodies[0].__struct_fields__

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset(signature(self.call).parameters)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. Raises what `read_body`, `read_query` and `call` do."""
        wanted = self._wanted
        given: dict[str, Any] = {n: v for n, v in request.match_info.items() if n in wanted}
        if "request" in wanted:
            given["request"] = request
        elif "body" in wanted and self.body is not None:
            given["body"] = await read_body(request, self.body)
        elif self.method == "POST":
            await request.app[RECEIVING].read(request)  # whatever is sent
        if "query" in wanted and self.query is not None:
            given["query"] = read_query(request, self.query)
        found = await self.call(**given)
        if isinstance(found, Stream):
            return await found.send(request)
        return found if isinstance(found, web.StreamResponse) else json_response(found)


def endpoint(
    method: str, path: str, call: Callable[..., Awaitable[Any]], says: str, **stated: Any
) -> Endpoint:
    """An endpoint that takes and gives what the types of `call` say, unless it is `stated`."""
    types = get_type_hints(call)
    given = types.pop("return")
    replies = [
        kind
        for kind in (get_args(given) if get_origin(given) in (Union, UnionType) else (given,))
        if not (isinstance(kind, type) and issubclass(kind, Stream | web.StreamResponse))
    ]
    found = {"reply": reduce(or_, replies)} if replies else {}
    found |= {name: kind for name, kind in types.items() if name in ("body", "query")}
    return Endpoint(method, path, call, says, **(found | stated))


def shown_path(endpoint: Endpoint) -> str:
    """The path as people write it."""
    return PARAMETER.sub(r"{\1}", endpoint.path)
