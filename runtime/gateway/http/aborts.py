"""Requests that can be ended by their id (`rid`); `POST /abort`, and sglang's `/abort_request`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.body import Body, read_body
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored
from rootlace.runtime.gateway.http.replies import json_response
from rootlace.runtime.gateway.keys.account import owner


class AbortBody(Body):
    """`POST /abort`."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: Annotated[str | None, ignored("the reason is always 'abort'")] = None


class Aborted(msgspec.Struct):
    """So many requests were ended."""

    aborted: int
    success: bool = True


class Aborts:
    """What is running, by id, and the handler that ends it: of the same API key alone."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Callable[[], None]]] = {}

    @contextmanager
    def running(self, named: Sequence[tuple[str, Callable[[], None]]]) -> Iterator[None]:
        """While the block runs, each id ends what is beside it. Several may have the same id."""
        keys = [((owner(), rid), abort) for rid, abort in named]
        for key, abort in keys:
            self._running.setdefault(key, []).append(abort)
        try:
            yield
        finally:
            for key, abort in keys:
                self._running[key].remove(abort)
                if not self._running[key]:
                    del self._running[key]

    async def handle(self, request: web.Request) -> web.Response:
        body = await read_body(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise InvalidParameter("rid", "give rid, or abort_all")
        asker = owner()
        found = [
            abort
            for key, aborts in self._running.items()
            if key[0] == asker and (body.abort_all or key[1] == body.rid)
            for abort in aborts
        ]
        for abort in found:
            abort()
        return json_response(Aborted(len(found)))
