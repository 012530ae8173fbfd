"""API key check."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.http.errors import Handler
from rootlace.wire.errors import Unauthorized

OPEN_PATHS = frozenset({"/health"})


def api_key_middleware(api_key: str) -> Middleware:
    """Refuse requests without `Authorization: Bearer api_key`, except to `OPEN_PATHS`."""
    expected = api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            given = token.strip().encode("utf-8", "surrogateescape")
            # compare_digest takes as long for a key that is nearly right as for any other.
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, expected):
                raise Unauthorized("the API key is missing or wrong (Authorization: Bearer ...)")
        return await handler(request)

    return check
