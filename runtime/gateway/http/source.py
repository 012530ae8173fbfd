"""Where a request comes from: among those without an API key, who shares the engine with whom."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.http.errors import Handler

_SOURCE: ContextVar[str] = ContextVar("source", default="batches")
_HEADER = "X-Rootlace-Source"
"""What a front passes on comes from its own address, and has the client's here, behind the secret
that the two share: whoever else writes it is not believed."""
_ADDRESS = web.RequestKey("address", str)
_OF_THE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", _HEADER.lower()}


def source_middleware(front_secret: str) -> Middleware:
    """Let what the handler starts know the client's address, or the one that a front of this secret
    says ("": there is none)."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        secret, _, said = request.headers.get(_HEADER, "").partition(" ")
        if front_secret and hmac.compare_digest(secret.encode(), front_secret.encode()):
            request[_ADDRESS] = said
        _SOURCE.set(address_of(request))
        return await handler(request)

    return note


def address_of(request: web.BaseRequest) -> str:
    """The client's address, or "unknown"."""
    return request.get(_ADDRESS) or request.remote or "unknown"


def source() -> str:
    """The address of the client whose request the running task answers, or "batches"."""
    return _SOURCE.get()


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of a request or a reply that are not about its connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_THE_CONNECTION]


def from_source(
    headers: Iterable[tuple[str, str]], address: str, front_secret: str
) -> list[tuple[str, str]]:
    """Those of a request from this address, as its front passes it on."""
    return [*passed_on(headers), (_HEADER, f"{front_secret} {address}")]
