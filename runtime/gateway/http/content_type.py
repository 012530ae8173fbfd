"""Refuses bodies that do not say that they are what an endpoint takes.

A web page may send a form or plain text to any server without asking it first; for JSON its browser
asks, and learns that the page may not.
"""

from __future__ import annotations

from aiohttp import hdrs, web

from rootlace.runtime.gateway.http.endpoint import JSON, Endpoint
from rootlace.runtime.gateway.http.errors import Handler, UnsupportedMediaType

_NO_TYPE = "application/octet-stream"


def checked(endpoint: Endpoint) -> Handler:
    """The endpoint's handler, which raises UnsupportedMediaType for a body of another type than
    the endpoint takes. One of no type is taken for JSON: aiohttp calls it octets, as its clients
    do, and no browser sends octets without asking first."""
    if endpoint.method != hdrs.METH_POST:
        return endpoint.handler  # it reads no body

    async def handle(request: web.Request) -> web.StreamResponse:
        given = request.content_type
        if given != endpoint.takes and not (given == _NO_TYPE and endpoint.takes == JSON):
            raise UnsupportedMediaType(
                f"the body is {given}: {request.path} takes {endpoint.takes}; "
                f"send the header Content-Type: {endpoint.takes}"
            )
        return await endpoint.handler(request)

    return handle
